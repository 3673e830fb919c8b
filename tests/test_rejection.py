"""Exactness without Monte Carlo: the enumerated law of the emitted tokens is the target's (`laws`).

Wrong variants of the same code, which the enumeration must tell from it, are in
test_wrong_variants.
"""

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
    error,
    even_p,
    logs,
    random_law,
    random_tree,
    tree_law,
)

from ddtree_jax.rejection import draw, walk_chain, walk_tree
from ddtree_jax.tree import chain, walk

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


def test_boundary_coins():
    """0 never takes what has no mass; the largest coin never runs past the last possible token."""
    p = jnp.asarray([[0.0, 1, 0], [0.5, 0.5, 0], [0, 0, 1], [0.3, 0.0, 0.7]])
    for coin, wanted in (
        (0.0, [1, 0, 2, 0]),
        (SMALL, [1, 0, 2, 0]),
        (LARGE, [1, 1, 2, 2]),
        (1.0, [1, 1, 2, 2]),
    ):
        assert draw(p, jnp.full(4, coin, jnp.float32)).tolist() == wanted
    # A draft of probability 0 is not taken at coin 0, nor at any other.
    tree = as_tree((-1, 0), [0, 1], 4)
    log_p = jnp.log(jnp.broadcast_to(jnp.asarray([1.0, 0, 0])[None, None], (4, 2, 3)))
    coins = jnp.asarray([[c, c] for c in (0.0, SMALL, 0.5, LARGE)], jnp.float32)
    no = jnp.zeros((4, 2), bool)
    _, length, bonus = walk_tree(tree, log_p, no, no[:, 0], coins, coins, 1)
    assert length.tolist() == [1] * 4 and bonus.tolist() == [0] * 4


@pytest.mark.parametrize(
    "p, q, coin, kept, bonus",
    [
        # Without a chance it is not kept at coin 0, nor at any other; the rest of p follows.
        *(([1, 0, 0, 0], [0, 1, 0, 0], coin, False, 0) for coin in (0, SMALL, LARGE)),
        # As likely as it was drawn, or likelier: kept at the largest coin.
        *(([0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], coin, True, 1) for coin in (0, SMALL, LARGE)),
        *(([0, 1, 0, 0], [0.5, 0.5, 0, 0], coin, True, 1) for coin in (0, SMALL, LARGE)),
        # Half as likely: kept below a coin of 1/2, not at it. The last of the rest is token 2.
        *(([0.5, 0.25, 0.25, 0], [0.5, 0.5, 0, 0], c, True, 2) for c in (0, SMALL, 0.5 - SMALL)),
        *(([0.5, 0.25, 0.25, 0], [0.5, 0.5, 0, 0], c, False, 2) for c in (0.5, LARGE)),
    ],
)
def test_boundary_coins_of_a_sampled_chain(p, q, coin, kept, bonus):
    """Token 1 was drawn from q; the draw's coin is the largest."""
    drafts, one = jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    tree = chain(0 * one, drafts, one, one > 0)
    coins, no = jnp.full((1, 2), coin, jnp.float32), jnp.zeros((1, 2), bool)
    laws = jnp.asarray([[q]], jnp.float32)
    last = jnp.full((1, 2), LARGE, jnp.float32)
    _, length, said = walk_chain(tree, laws, logs([p, p], 1), no, no[:, 0], coins, last)
    assert length.tolist() == [2 if kept else 1] and said.tolist() == [bonus]


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
    path, length, _ = walk_tree(tree, log_p, no, no[:, 0], coins, coins, 1)
    assert (np.asarray(length) == 2).all()
    assert set(np.asarray(tree.tokens)[np.arange(n), np.asarray(path)[:, 1]]) <= {0, 1, 2}


def test_greedy_rows_take_the_argmax_path():
    rng = np.random.default_rng(2)
    n = 64
    tree = as_tree((-1, 0, 0, 1), [0, 1, 2, 3], n)
    log_p = jnp.asarray(rng.normal(size=(n, 4, V)), jnp.float32)
    yes, no = jnp.ones(n, bool), jnp.zeros((n, 4), bool)
    coins = jnp.asarray(rng.random((n, 3)), jnp.float32)
    rejected = walk_tree(tree, log_p, no, yes, coins, coins, 2)
    walked = walk(tree, jnp.argmax(log_p, axis=-1).astype(jnp.int32), 2)
    for a, b in zip(rejected, walked, strict=True):
        np.testing.assert_array_equal(a, b)
