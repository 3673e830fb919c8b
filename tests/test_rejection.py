"""Exactness without Monte Carlo: the enumerated law of the emitted tokens is the target's (`laws`).

Wrong variants of the same code, which the enumeration must tell from it, are in
test_wrong_variants.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import (
    LIMIT,
    NODES,
    SHAPES,
    V,
    any_p,
    as_tree,
    chain_law,
    coupled_law,
    depths,
    drafted,
    drawn_law,
    emitted,
    error,
    even_p,
    logs,
    random_law,
    random_tree,
    target_law,
    tree_law,
)

from ddtree_jax import Sampling
from ddtree_jax.decide import best_candidates, coupled_tokens, drawn_chain, rejection_walk
from ddtree_jax.parallel import ALONE
from ddtree_jax.rejection import draw, walk_chain, walk_tree
from ddtree_jax.sampling import Law, keyed_noise
from ddtree_jax.tree import build, chain, walk

EDGES = ("lowest", "highest")  # coins of 0 and 1 - 2^-24 among them
SMALL, LARGE = 2.0**-24, 1 - 2.0**-24


def test_trees_of_all_shapes():
    rng = np.random.default_rng(1)
    tried = 0
    for parents in SHAPES:
        for _ in range(2):
            tokens = random_tree(rng, parents)
            if tokens is None:
                continue
            law = random_law(rng, max(depths(parents)) + 1)
            assert error(tree_law(parents, tokens, law), law) < LIMIT, (parents, tokens)
            tried += 1
    assert tried > 60


@pytest.mark.parametrize("at", EDGES)
def test_trees_whose_coins_lie_on_the_boundaries(at):
    """A cell of the coins holds its lower boundary and not its upper one; impossible tokens and
    ties are among the children."""
    rng = np.random.default_rng(2)
    for parents in SHAPES:
        tokens = random_tree(rng, parents)
        law = random_law(rng, max(depths(parents)) + 1, even_p)
        assert error(tree_law(parents, tokens, law, at=at), law) < LIMIT, (parents, tokens)


@pytest.mark.parametrize("horizon", (1, 2, 3))
def test_sampled_chains(horizon):
    rng = np.random.default_rng(horizon)
    for _ in range(3 if horizon < 3 else 1):
        law = random_law(rng, horizon + 1)
        q = [any_p(rng) for _ in range(horizon)]
        assert error(chain_law(law, q), law) < LIMIT


@pytest.mark.parametrize("at", EDGES)
def test_chains_whose_coins_lie_on_the_boundaries(at):
    rng = np.random.default_rng(5)
    for _ in range(8):
        law, q = random_law(rng, 3, even_p), [even_p(rng) for _ in range(2)]
        assert error(chain_law(law, q, at=at), law) < LIMIT


def test_chain_drawn_from_the_target_is_always_accepted():
    law = random_law(np.random.default_rng(3), 2)
    law[(0,)] = law[(1,)] = law[(2,)] = law[(3,)]
    assert error(chain_law(law, [law[()], law[(0,)]]), law) < LIMIT


def test_coupled_on_trees_of_all_shapes():
    """Summed over the orderings of every position's noise (`laws.noise_cells`)."""
    rng = np.random.default_rng(7)
    for parents in SHAPES:
        for _ in range(2):
            tokens = random_tree(rng, parents)
            law, total = random_law(rng, max(depths(parents)) + 1), max(depths(parents)) + 1

            def draft(noise, parents=parents, tokens=tokens):
                return as_tree(parents, tokens, len(noise), NODES)

            assert error(coupled_law(rng, law, total, draft), law) < LIMIT, (parents, tokens)


@pytest.mark.parametrize("top_k", (2, 4))
@pytest.mark.parametrize("horizon", (2, 3))
def test_coupled_on_trees_drafted_with_the_same_noise(horizon, top_k):
    """The tree may depend on the noise that decides, and yet moves no token."""
    rng = np.random.default_rng(8)
    for _ in range(3 if horizon < 3 else 1):
        law, q = random_law(rng, horizon + 1), [any_p(rng) for _ in range(horizon)]
        found = coupled_law(rng, law, horizon + 1, drafted(q, top_k))
        assert error(found, law) < LIMIT


def test_bonus_and_drafts_are_drawn_in_proportion():
    """Never a token without mass, whatever its noise; p need not be normalised."""
    rng = np.random.default_rng(9)
    for _ in range(20):
        p = any_p(rng)
        for scale in (1, 0.3):
            found = drawn_law(rng, p, lambda rows, noise, c=scale: draw(rows * c, noise))
            assert np.abs(found - p).max() < LIMIT
    assert draw(jnp.zeros((1, V)), jnp.zeros((1, V))).tolist() == [-1]


@pytest.mark.parametrize("coin", (0.0, SMALL, 0.5, LARGE))
def test_a_draft_without_a_chance_is_not_taken(coin):
    """At coin 0 neither; and the bonus is drawn from the rest."""
    tree = as_tree((-1, 0), [0, 1], 1)
    log_p, coins = logs([[0.5, 0, 0.5]] * 2, 1), jnp.full((1, 2), coin, jnp.float32)
    no = jnp.zeros((1, 2), bool)
    _, length, left = walk_tree(tree, log_p, no, no[:, 0], coins, 1)
    assert length.tolist() == [1] and left.tolist() == [[0.5, 0, 0.5]]


@pytest.mark.parametrize(
    "p, q, coin, kept, left",
    [
        # Without a chance it is not kept at coin 0, nor at any other; the rest of p follows.
        *(([1, 0, 0, 0], [0, 1, 0, 0], c, False, [1, 0, 0, 0]) for c in (0, SMALL, LARGE)),
        # As likely as it was drawn, or likelier: kept at the largest coin. Then p follows.
        *(([0.5, 0.5, 0, 0],) * 2 + (c, True, [0.5, 0.5, 0, 0]) for c in (0, SMALL, LARGE)),
        *(([0, 1, 0, 0], [0.5, 0.5, 0, 0], c, True, [0, 1, 0, 0]) for c in (0, SMALL, LARGE)),
        # Half as likely: kept below a coin of 1/2, not at it. The rest is token 2.
        *(
            ([0.5, 0.25, 0.25, 0], [0.5, 0.5, 0, 0], c, True, [0.5, 0.25, 0.25, 0])
            for c in (0, SMALL, 0.5 - SMALL)
        ),
        *(
            ([0.5, 0.25, 0.25, 0], [0.5, 0.5, 0, 0], c, False, [0, 0, 0.25, 0])
            for c in (0.5, LARGE)
        ),
    ],
)
def test_boundary_coins_of_a_sampled_chain(p, q, coin, kept, left):
    """Token 1 was drawn from q."""
    drafts, one = jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    tree = chain(0 * one, drafts, one, one > 0)
    coins, no = jnp.full((1, 2), coin, jnp.float32), jnp.zeros((1, 2), bool)
    laws = jnp.asarray([[q]], jnp.float32)
    _, length, found = walk_chain(tree, laws, logs([p, p], 1), no, no[:, 0], coins)
    assert length.tolist() == [2 if kept else 1] and found.tolist() == [left]


ONE_STOP = [-np.inf, -np.inf, 1, -np.inf]  # nothing is left once token 2 is barred


@pytest.mark.parametrize(
    "bad", ([np.nan, 0, 0, 0], [np.inf, 0, 0, 0], [-np.inf] * 4, ONE_STOP), ids=str
)
@pytest.mark.parametrize("acceptance", ("coupled", "rejection", "drawn"))
def test_rows_from_which_nothing_can_be_chosen(acceptance, bad):
    """Their request gets no bonus, and no node that is not a child; its neighbour goes on."""
    tree = as_tree((-1, 0, 0, 1), [0, 1, 2, 3], 2)
    if acceptance == "drawn":
        drafts, three = jnp.ones((2, 3), jnp.int32), jnp.full(2, 3)
        tree = chain(jnp.zeros(2, jnp.int32), drafts, three, three > 0)
    logits = jnp.zeros((2, 4, V)).at[0, 0].set(jnp.asarray(bad))
    law, positions = Law.of([Sampling(1.0), Sampling(1.0, seed=1)]), jnp.arange(8).reshape(2, 4)
    stops = jnp.full((2, 1), -1), jnp.zeros((2, 4), bool)
    if bad is ONE_STOP:
        stops = jnp.array([[2], [-1]]), stops[1].at[0, 0].set(True)
    if acceptance == "coupled":
        noise = keyed_noise(law, positions, V)
        bonus = coupled_tokens(ALONE, logits, law, positions, noise, *stops, V)[:, 0]
        length = jnp.ones(2)
    else:
        q = jnp.full((2, 3, V), 0.25) if acceptance == "drawn" else None
        _, length, bonus = rejection_walk(ALONE, tree, logits, law, positions, *stops, q, V)
    assert bonus[0] == -1 and length[0] == 1 and bonus[1] >= 0


@pytest.mark.parametrize("method", ("tree", "chain"))
def test_law_of_a_step(method):
    """Through the step's own coins and noise, over many seeds: each is drawn apart from the others.

    200,000 draws: an error of 0.005 is four and a half standard deviations and more.
    """
    rng, n = np.random.default_rng(0), 200_000
    law = random_law(rng, 2, lambda rng: rng.dirichlet(np.ones(V)))
    q = np.stack([rng.dirichlet(np.ones(V)) for _ in range(2)])
    seeds = Law.of([Sampling(1.0)])
    seeds = jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), seeds)
    seeds = replace(seeds, seed=jnp.arange(n, dtype=jnp.uint32))
    positions = jnp.broadcast_to(jnp.arange(5, 8), (n, 3))

    @jax.jit
    def run(law_of_seeds, table):
        zero, yes = jnp.zeros(n, jnp.int32), jnp.ones(n, bool)
        log_q = jnp.broadcast_to(jnp.log(jnp.asarray(q, jnp.float32)), (n, 2, V))
        how = law_of_seeds, positions[:, :2]
        if method == "chain":
            laws, tree = drawn_chain(ALONE, log_q, *how, zero, yes, V)
        else:
            found = best_candidates(ALONE, log_q, *how, None, 2, V, False)
            laws, tree = None, build(zero, *found, 4, yes)
        # A node's row: the law after the tokens that lead to it, by number.
        code = jnp.zeros_like(tree.tokens)
        for node in range(1, code.shape[1]):
            before = jnp.take_along_axis(code, jnp.maximum(tree.parent[:, [node]], 0), axis=1)
            code = code.at[:, node].set(before[:, 0] * (V + 1) + tree.tokens[:, node] + 1)
        stops = jnp.full((n, 1), -1), jnp.zeros(code.shape, bool)
        walked = rejection_walk(ALONE, tree, table[code], law_of_seeds, positions, *stops, laws, V)
        return tree, walked

    table = np.full(((V + 1) ** 2, V), 1 / V)
    for prefix, p in law.items():
        if len(prefix) <= 2:
            table[sum((t + 1) * (V + 1) ** i for i, t in enumerate(reversed(prefix)))] = p
    tree, walked = run(seeds, jnp.log(jnp.asarray(table, jnp.float32)))
    assert len(np.unique(walked[1])) == 3  # runs of every length
    found = emitted(walked, tree, np.full(n, 1 / n), law, 3)
    assert np.abs(found - target_law(law, 3)).max() < 0.005
    assert np.abs(found.sum(axis=(1, 2)) - law[()]).max() < 0.005


def test_children_that_cover_the_support():
    """Rounding may reject every child though they hold all the mass: never a token outside."""
    rng = np.random.default_rng(0)
    n = 2000
    p = rng.random((n, 3)).astype(np.float32)
    p /= p.sum(axis=1, keepdims=True)
    tree = as_tree((-1, 0, 0, 0), [0, 0, 1, 2], n)
    rows = np.concatenate([p, np.zeros((n, 1), np.float32)], axis=1)
    log_p = jnp.log(jnp.asarray(np.repeat(rows[:, None], 4, axis=1)))
    coins = jnp.full((n, 2), 1 - 2.0**-24, jnp.float32)
    no = jnp.zeros((n, 4), bool)
    path, length, _ = walk_tree(tree, log_p, no, no[:, 0], coins, 1)
    assert (np.asarray(length) == 2).all()
    assert set(np.asarray(tree.tokens)[np.arange(n), np.asarray(path)[:, 1]]) <= {0, 1, 2}


def test_greedy_rows_take_the_argmax_path():
    rng = np.random.default_rng(2)
    n = 64
    tree = as_tree((-1, 0, 0, 1), [0, 1, 2, 3], n)
    log_p = jnp.asarray(rng.normal(size=(n, 4, V)), jnp.float32)
    yes, no = jnp.ones(n, bool), jnp.zeros((n, 4), bool)
    coins = jnp.asarray(rng.random((n, 3)), jnp.float32)
    path, length, left = walk_tree(tree, log_p, no, yes, coins, 2)
    rejected = path, length, draw(left, jnp.zeros((n, V)))
    walked = walk(tree, jnp.argmax(log_p, axis=-1).astype(jnp.int32), 2)
    for a, b in zip(rejected, walked, strict=True):
        np.testing.assert_array_equal(a, b)
