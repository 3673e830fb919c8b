"""Wrong variants of the acceptance rules, each of which the enumerated law (`laws`) must expose.

A variant is the code itself with a piece of its source replaced. It must not only miss the target's
law: it must miss it as theory says that this fault does, so that no test fails for another reason.
"""

import inspect
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from laws import (
    LIMIT,
    NODES,
    V,
    as_tree,
    chain_law,
    coupled,
    coupled_law,
    drawn_law,
    error,
    target_law,
    tree_law,
)

from ddtree_jax import decide, tree
from ddtree_jax.rejection import draw, walk_chain, walk_tree

P = np.array([0.4, 0.25, 0.2, 0.15])
Q = np.array([0.55, 0.2, 0.15, 0.1])
EVEN = np.full(V, 0.25)
HALVES = np.array([0.5, 0.5, 0, 0])


def variant(function, *edits, **names):
    """The function with pieces of its source replaced, each of which must stand there once, and
    with other things behind some of the names that it uses."""
    source = inspect.getsource(function)
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    scope = {**vars(inspect.getmodule(inspect.unwrap(function))), **names}
    exec(source, scope)
    return scope[function.__name__]


def everywhere(p):
    """The law that has p after every prefix."""
    return {s: p for n in range(5) for s in itertools.product(range(V), repeat=n)}


def first(found):
    return found.sum(axis=tuple(range(1, found.ndim)))


def judge(found, right, p, wanted):
    """`found` has the first token's law `wanted`, `right` (of the code as it is) the target's."""
    assert error(right, everywhere(p)) < LIMIT
    assert error(found, everywhere(p)) > 1e-3
    np.testing.assert_allclose(first(found), wanted, rtol=0, atol=LIMIT)


# --- trees: children 1 and 2 of the root, 3 of 1 ---

TREE = (-1, 0, 0, 1), (0, 1, 2, 3)
HIT = "accept_coins[:, depth, None] < jnp.cumsum(mass, axis=1)"
TREES = {
    # Coins at the lower edges 0, 1/4 and 1/2 belong to the cells above them.
    "at most": ([(HIT, HIT.replace("<", "<="))], EVEN, "lowest", (), [0, 0.5, 0.5, 0]),
    "at most, and what has no mass": (
        [(HIT, HIT.replace("<", "<=")), ("child & (mass > 0) &", "child &")],
        np.eye(V)[0], "lowest", (), [0, 1, 0, 0],
    ),
    "a threshold of 1/2 for the sum": (
        [(HIT, "0.5 * " + HIT)], P, "middle", (0.5, 0.9),
        [0.1 * 0.4 / 0.55, 0.5, 0.4, 0.1 * 0.15 / 0.55],
    ),
    "a threshold of 0.22 for one child": (
        [(HIT, f"({HIT}) | (mass >= 0.22)")], P, "middle", (), [0, 1, 0, 0]
    ),
    "the rest is all of p": (
        [("rest = p.at[rows[:, None], tokens].set(0.0, mode=\"drop\")", "rest = p")],
        P, "middle", (), [0.55 * 0.4, 0.25 + 0.55 * 0.25, 0.2 + 0.55 * 0.2, 0.55 * 0.15],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_on_trees(name):
    edits, p, at, edges, wanted = TREES[name]
    law, rule = everywhere(p), variant(walk_tree, *edits)
    right = tree_law(*TREE, law, at=at, edges=edges)
    judge(tree_law(*TREE, law, rule, at, edges), right, p, wanted)


def test_siblings_that_are_equal():
    """Drafts drawn with replacement: the tree's builder asks for distinct candidates."""

    def children(tokens):
        log_q, yes = jnp.log(jnp.asarray([[[0.6, 0.3]]])), jnp.ones(1, bool)
        made = tree.build(jnp.zeros(1, jnp.int32), log_q, jnp.asarray([[tokens]]), 2, yes)
        return tree_law(made.parent[0].tolist(), made.tokens[0].tolist(), everywhere(P))

    _, distinct = tree.candidates(jnp.log(jnp.asarray([[[0.1, 0.6, 0.3, 0.0]]])), 2)
    twice = np.where(np.arange(V) == 1, 2 * 0.25, 0.5 * P / 0.75 * (np.arange(V) != 1))
    judge(children([1, 1]), children(distinct[0, 0].tolist()), P, twice)


def by_ratio(p, tree, child):
    """min(1, p/q) for one child after the other, of what the ones before left: max(p - q, 0).

    Returns the probability that each child is taken, and what is left at the end.
    """
    q, rows, reached, masses = jnp.asarray(Q, jnp.float32), jnp.arange(len(p)), 1.0, []
    for node in range(child.shape[1]):
        here, token = child[:, node], tree.tokens[:, node]
        kept = jnp.where(here, jnp.minimum(p[rows, token] / q[token], 1), 0)
        masses.append(reached * kept)
        reached = reached * (1 - kept)
        rest = jnp.maximum(p - q[None], 0)
        total = rest.sum(axis=1, keepdims=True)
        rest = jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), p)
        p = jnp.where(here[:, None], rest, p)
    return jnp.stack(masses, axis=1), p


def test_p_over_q_on_a_pruned_tree():
    """Right for children that were drawn from q, biased for q's two likeliest."""
    rule = variant(
        walk_tree,
        (
            "mass = jnp.where(child, jnp.take_along_axis(p, tree.tokens, axis=1), 0)",
            "mass, rest = by_ratio(p, tree, child)",
        ),
        ("rest = p.at[rows[:, None], tokens].set(0.0, mode=\"drop\")", "pass"),
        by_ratio=by_ratio,
    )  # fmt: skip

    def found(children, rule=rule):
        parents, tokens = (-1, 0, 0), (0, *children)
        p, child = jnp.asarray(P[None], jnp.float32), jnp.asarray([[False, True, True]])
        mass, _ = by_ratio(p, as_tree(parents, tokens, 1), child)
        edges = np.cumsum(np.asarray(mass)[0])
        return tree_law(parents, tokens, everywhere(P), rule, edges=edges)

    judge(found([0, 1]), found([0, 1], walk_tree), P, [0.4 / 0.55, 1 - 0.4 / 0.55, 0, 0])
    drawn = sum(Q[a] * Q[b] * found([a, b]) for a, b in itertools.product(range(V), repeat=2))
    assert error(drawn, everywhere(P)) < LIMIT


# --- chains drawn from q, the same at both depths ---

KEEP = "accept_coins[:, depth] * theirs < mine"
REST = "rest = jnp.maximum(p - law, 0)"
CHANCES = np.minimum(1, 2 * P / Q)
LEFT = np.maximum(P - Q, 0)
SOFT = np.exp(LEFT) / np.exp(LEFT).sum()
KEPT = np.minimum(P, Q)
CHAINS = {
    # Kept half of the time, and at a coin of 1/2, which is the lower edge of the other half.
    "at most": ([(KEEP, KEEP.replace("<", "<="))], EVEN, HALVES, "lowest", HALVES),
    "at most, and what has no mass": (
        [(KEEP, KEEP.replace("<", "<=")), ("(mine > 0) & ", "")],
        np.eye(V)[2], HALVES, "lowest", HALVES,
    ),
    "a threshold of 1/2": (
        [(KEEP, "0.5 * " + KEEP)], P, Q, "middle",
        Q * CHANCES + (1 - Q @ CHANCES) * LEFT / LEFT.sum(),
    ),
    "the rest is all of p": (
        [(REST, "rest = p")], P, Q, "middle", KEPT + LEFT.sum() * P
    ),
    "the rest through a softmax": (
        [(REST, REST + "; rest = jnp.exp(rest)")], P, Q, "middle", KEPT + LEFT.sum() * SOFT
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_on_chains(name):
    edits, p, q, at, wanted = CHAINS[name]
    law, rule = everywhere(p), variant(walk_chain, *edits)
    right = chain_law(law, [q, q], at=at)
    judge(chain_law(law, [q, q], rule, at), right, p, wanted)


def test_argmax_drafts_held_against_a_softmax_q():
    """The chain's tokens are q's likeliest, but accepted as if they had been drawn from q."""
    q = np.array([0.9, 0.1, 0, 0])
    sure = [np.eye(V)[0]] * 2

    def rule(tree, laws, *rest):
        return walk_chain(tree, jnp.broadcast_to(jnp.asarray(q, jnp.float32), laws.shape), *rest)

    left, kept = np.maximum(P - q, 0), 0.4 / 0.9
    edges = [kept]
    wanted = kept * np.eye(V)[0] + (1 - kept) * left / left.sum()
    found = chain_law(everywhere(P), sure, rule, edges=edges)
    judge(found, chain_law(everywhere(P), sure, edges=edges), P, wanted)


# --- the draw of a bonus, or of a chain's token ---

DRAWS = {
    "no logarithm": ([("jnp.log(p) + noise", "p + noise")], None),
    "no noise": ([("jnp.log(p) + noise", "jnp.log(p)")], np.eye(V)[0]),
    "what has no mass": ([("p > 0, jnp.log(p) + noise", "p >= 0, jnp.log(p + 1e-9) + noise")],
                         np.eye(V)[3]),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_draws(name):
    edits, wanted = DRAWS[name]
    p = np.array([0.9, 0.08, 0.02, 0])
    assert np.abs(drawn_law(np.random.default_rng(0), p) - p).max() < LIMIT
    found = drawn_law(np.random.default_rng(0), p, variant(draw, *edits))
    assert np.abs(found - p).max() > 1e-3
    if wanted is not None:
        np.testing.assert_allclose(found, wanted, rtol=0, atol=LIMIT)


def test_nothing_is_left_where_rounding_rejects_every_child():
    """Children that hold all the mass: their sum in float32 may be below the largest coin."""
    p = np.full(V, 1 / 3, np.float32)
    p[3] = 0
    p[:3] -= np.float32(1e-7)  # the sum is 1 - 3e-7
    tree = as_tree((-1, 0, 0, 0), (0, 0, 1, 2), 1)
    coins, no = jnp.full((1, 2), 1 - 2.0**-24), jnp.zeros((1, 4), bool)

    def found(*edits):
        rule = variant(walk_tree, *edits, distribution=lambda log_p, greedy: jnp.asarray(p[None]))
        _, length, left = rule(tree, jnp.zeros((1, 4, V)), no, no[:, 0], coins, 1)
        return length.tolist(), draw(left, jnp.zeros((1, V))).tolist()

    assert found() == ([2], [0])  # the last child, then a bonus from what follows it
    wrong = found(("covered = ~(rest.sum(axis=1) > 0)", "covered = greedy"))
    assert wrong == ([1], [-1])  # no child, and nothing to draw from


# --- coupled ---

COUPLED = {
    "the noise is left out": (
        {"coupled_tokens": variant(
            decide.coupled_tokens, ("perturbed(log_p, noise, law)", "log_p"))},
        [], [1, 0, 0, 0],
    ),
    "the noise of the depth above": (
        {}, [("tree.depth[..., None], axis", "jnp.maximum(tree.depth - 1, 0)[..., None], axis")],
        None,
    ),
    "every node follows the root's token": (
        {"walk": variant(tree.walk, ("jnp.maximum(tree.parent, 0)", "0 * tree.parent"))},
        [], None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUPLED)
def test_coupled(name):
    names, edits, wanted = COUPLED[name]
    rng, law = np.random.default_rng(0), everywhere(P)
    parents, tokens = (-1, 0, 0, 1), (0, 1, 2, 1)

    def draft(noise):
        return as_tree(parents, tokens, len(noise), NODES)

    right = coupled_law(rng, law, 3, draft)
    found = coupled_law(rng, law, 3, draft, variant(coupled, *edits, **names))
    # What is wrong below the root leaves the first token's law right.
    judge(found, right, P, first(target_law(law, 1)) if wanted is None else wanted)
