"""Rejection sampling against drafts: on trees over siblings, on chains sampled from the drafter.

Both keep the target's distribution exactly. They spend fresh coins on every pass, so the text
depends on how it was drafted; `coupled` sampling does not (`sampling`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddtree_jax.tree import Tree


def distribution(log_p: Float[Array, "r v"], greedy) -> Float[Array, "r v"]:
    """Probabilities of unnormalised logs in float32; greedy requests put all on the argmax."""
    top = log_p.max(axis=-1, keepdims=True)
    p = jnp.exp((log_p - jnp.where(jnp.isfinite(top), top, 0)).astype(jnp.float32))
    best = jnp.argmax(log_p, axis=-1)[:, None]
    one_hot = jnp.arange(log_p.shape[-1], dtype=best.dtype)[None] == best
    p = jnp.where(greedy[:, None], one_hot.astype(jnp.float32), p)
    return p / p.sum(axis=-1, keepdims=True)


def draw(p: Float[Array, "r v"], noise: Float[Array, "r v"]) -> Int[Array, " r"]:
    """A token in proportion to p, which need not be normalised; -1 where there is no mass.

    The argmax of log p plus Gumbel noise, as `coupled` draws. An inverse CDF would not do: in
    float32 the cumulated mass of 163,840 tokens loses half of them.
    """
    token = jnp.argmax(jnp.where(p > 0, jnp.log(p) + noise, -jnp.inf), axis=-1)
    return jnp.where((p > 0).any(axis=-1), token.astype(jnp.int32), -1)


def walk_tree(
    tree: Tree,
    log_p: Float[Array, "r n v"],
    broken,
    greedy,
    accept_coins: Float[Array, "r depths"],
    horizon: int,
) -> tuple[Int[Array, "r path"], Int[Array, " r"], Float[Array, "r v"]]:
    """Tree-structured rejection, target-only: the tree is a function of the context alone.

    At a node one coin u is held against the running sum of its children's target probabilities, in
    sibling order: the first child with u < sum and p > 0 is taken, so child c with probability
    p(c). If none is, the bonus is to be drawn from p without the children. Returns path and length
    as `tree.walk` does, and what the bonus is drawn from (`draw`): nothing where the target broke.
    """
    requests, nodes = tree.tokens.shape
    index = jnp.arange(nodes, dtype=jnp.int32)
    rows = jnp.arange(requests, dtype=jnp.int32)
    used = index[None] < tree.size[:, None]
    at = jnp.zeros(requests, jnp.int32)
    path = jnp.zeros((requests, horizon + 1), jnp.int32)
    length = (tree.size > 0).astype(jnp.int32)
    left = jnp.zeros((requests, log_p.shape[-1]), jnp.float32)
    going = tree.size > 0
    for depth in range(horizon + 1):
        p = distribution(log_p[rows, at], greedy)
        child = used & (tree.parent == at[:, None])
        mass = jnp.where(child, jnp.take_along_axis(p, tree.tokens, axis=1), 0)
        # Children lie in sibling order: their scores fall with the node index.
        hit = child & (mass > 0) & (accept_coins[:, depth, None] < jnp.cumsum(mass, axis=1))
        tokens = jnp.where(child, tree.tokens, p.shape[-1])
        rest = p.at[rows[:, None], tokens].set(0.0, mode="drop")
        # If the children hold all the mass and rounding rejects them all, the last one is right.
        covered = ~(rest.sum(axis=1) > 0)
        last = nodes - 1 - jnp.argmax((mass > 0)[:, ::-1], axis=1)
        taken = jnp.where(hit.any(axis=1), jnp.argmax(hit, axis=1), last).astype(jnp.int32)
        fails = broken[rows, at]
        descend = going & ~fails & (hit.any(axis=1) | covered)
        left = jnp.where((going & ~fails & ~descend)[:, None], rest, left)
        at = jnp.where(descend, taken, at)
        if depth < horizon:
            path = path.at[:, depth + 1].set(jnp.where(descend, taken, 0))
        length = length + descend
        going = descend
    return path, length, left


def walk_chain(
    tree: Tree,
    q: Float[Array, "r horizon v"],
    log_p: Float[Array, "r n v"],
    broken,
    greedy,
    accept_coins: Float[Array, "r depths"],
) -> tuple[Int[Array, "r path"], Int[Array, " r"], Float[Array, "r v"]]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1) on a chain drawn from q.

    Token d is kept if u q(d) < p(d); the first rejected position draws from max(p - q, 0), a
    fully accepted chain from p. The tree is the chain (`tree.chain`). Returns as `walk_tree` does.
    """
    tokens, drafted = tree.tokens[:, 1:], tree.size - 1
    requests, horizon = tokens.shape
    rows = jnp.arange(requests, dtype=jnp.int32)
    going = tree.size > 0
    length = going.astype(jnp.int32)
    left = jnp.zeros((requests, log_p.shape[-1]), jnp.float32)
    for depth in range(horizon + 1):
        p = distribution(log_p[:, depth], greedy)
        here = going & ~broken[:, depth]
        if depth < horizon:
            there = depth < drafted
            token, law = tokens[:, depth], q[:, depth]
            mine, theirs = p[rows, token], law[rows, token]
            keep = here & there & (mine > 0) & (accept_coins[:, depth] * theirs < mine)
            rest = jnp.maximum(p - law, 0)
            empty = ~(rest.sum(axis=1, keepdims=True) > 0)
            rest = jnp.where(empty | ~there[:, None], p, rest)
        else:
            keep, rest = jnp.zeros(requests, bool), p
        left = jnp.where((here & ~keep)[:, None], rest, left)
        length = length + keep
        going = keep
    path = jnp.broadcast_to(jnp.arange(horizon + 1, dtype=jnp.int32)[None], (requests, horizon + 1))
    return jnp.where(path < length[:, None], path, 0), length, left
