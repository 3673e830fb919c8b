"""The draft tree: built on the device without a heap, and walked without a loop.

DDTree (arXiv 2604.12989, section 4) takes the `budget` most probable prefixes under the product of
the drafter's per-position distributions. The most probable prefixes of one depth extend the most
probable ones of the depth before, so a beam of width `budget` per depth holds all candidates, and
of a beam sorted by score times a sorted candidate list only the pairs (i, r) with
(i+1)(r+1) <= budget can survive: every other pair has `budget` others above it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from ddtree_jax.select import largest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tree:
    """One tree a request. Node 0 is the root; a parent's index is below its children's.

    Bit j of the ancestor words of node i is set iff j is i or an ancestor of i. Nodes from `size`
    on are unused: they see nothing, and nothing sees them.
    """

    tokens: Int[Array, "r n"]
    parent: Int[Array, "r n"]  # -1 for the root and unused nodes
    depth: Int[Array, "r n"]
    rank: Int[Array, "r n"]  # 0 for the parent's likeliest child
    score: Float[Array, "r n"]  # log-probability of the path from the root, in the drafter's eyes
    size: Int[Array, " r"]  # used nodes, the root counted
    ancestors: UInt32[Array, "r n w"]


def candidates(
    log_q: Float[Array, "r l v"], top_k: int
) -> tuple[Float[Array, "r l k"], Int[Array, "r l k"]]:
    """The `top_k` likeliest tokens of every position, best first; equal ones by lowest id.

    Entries are log-probabilities, made float32 and at most 0; NaN counts as impossible.
    """
    log_q = jnp.minimum(log_q.astype(jnp.float32), 0.0)
    return largest(jnp.where(jnp.isnan(log_q), -jnp.inf, log_q), top_k)


def build(
    root: Int[Array, " r"],
    log_q: Float[Array, "r l k"],
    tokens: Int[Array, "r l k"],
    budget: int,
    active: Bool[Array, " r"],
) -> Tree:
    """The `budget` best prefixes over sorted candidates (`candidates`) as a tree of budget+1 nodes.

    Selection and node order: by path score, summed in float32 from the root down, best first; of
    equal scores the shallower node, then the one whose parent comes first in its own depth, then
    the lower rank. That is a heap with the key (-s_d, d, -s_{d-1}, .., -s_1, r_1, .., r_d).
    Impossible candidates (-inf) are left out, so a tree may stay smaller than its budget. Requests
    that are not `active` get a tree of size 0.
    """
    requests, horizon, top_k = log_q.shape
    score, beams = jnp.zeros((requests, 1), jnp.float32), []
    for depth in range(horizon if budget else 0):
        pairs = [
            (i, r)
            for i in range(score.shape[1])
            for r in range(top_k)
            if (i + 1) * (r + 1) <= budget
        ]
        i, r = (jnp.asarray(column, jnp.int32) for column in zip(*pairs, strict=True))
        score, kept = lax.top_k(score[:, i] + log_q[:, depth, r], min(budget, len(pairs)))
        beams.append((score, i[kept], r[kept]))
    widths = [beam[0].shape[1] for beam in beams]
    total = sum(widths)
    used = min(budget, total)
    if used == 0:
        return _finish(root[:, None], [], budget, active)

    best, kept = lax.top_k(jnp.concatenate([b[0] for b in beams], axis=1), used)
    # Where each candidate ended up among the nodes; the beam of a depth starts at its offset.
    node = jnp.zeros((requests, total), jnp.int32)
    rows = jnp.arange(requests, dtype=jnp.int32)[:, None]
    node = node.at[rows, kept].set(jnp.arange(1, used + 1, dtype=jnp.int32)[None])
    offsets = [sum(widths[:d]) for d in range(horizon)]
    parents = [jnp.zeros((requests, widths[0]), jnp.int32)]
    for d in range(1, horizon):
        parents.append(jnp.take_along_axis(node, offsets[d - 1] + beams[d][1], axis=1))
    parent = jnp.concatenate(parents, axis=1)
    rank = jnp.concatenate([b[2] for b in beams], axis=1)
    depth = jnp.concatenate([jnp.full((w,), d + 1, jnp.int32) for d, w in enumerate(widths)])
    token = jnp.concatenate(
        [jnp.take_along_axis(tokens[:, d], b[2], axis=1) for d, b in enumerate(beams)], axis=1
    )
    columns = [
        jnp.take_along_axis(token, kept, axis=1),
        jnp.take_along_axis(parent, kept, axis=1),
        depth[kept],
        jnp.take_along_axis(rank, kept, axis=1),
        best,
    ]
    return _finish(root[:, None], columns, budget, active)


def chain(
    root: Int[Array, " r"],
    tokens: Int[Array, "r l"],
    drafted: Int[Array, " r"],
    active: Bool[Array, " r"],
) -> Tree:
    """The first `drafted` of `tokens` in one line, whatever their scores."""
    horizon = tokens.shape[1]
    depth = jnp.broadcast_to(jnp.arange(1, horizon + 1, dtype=jnp.int32)[None], tokens.shape)
    here = depth <= drafted[:, None]
    score = jnp.where(here, 0.0, -jnp.inf)
    columns = [tokens, depth - 1, depth, jnp.zeros_like(depth), score]
    return _finish(root[:, None], columns, horizon, active)


def _finish(root, columns, budget, active) -> Tree:
    """Put the root in front, clear unused nodes, derive the ancestor words."""
    requests, nodes = root.shape[0], budget + 1
    empty = jnp.zeros((requests, 0), jnp.int32)
    token, parent, depth, rank, score = columns or (empty,) * 4 + (empty.astype(jnp.float32),)
    score = _pad(jnp.concatenate([jnp.zeros_like(root, jnp.float32), score], 1), nodes, -jnp.inf)
    # Scores fall along the nodes, so the possible ones are a prefix.
    size = jnp.where(active, jnp.isfinite(score).sum(axis=1), 0).astype(jnp.int32)
    used = jnp.arange(nodes, dtype=jnp.int32)[None] < size[:, None]

    def column(first, rest, unused):
        values = _pad(jnp.concatenate([first, rest], axis=1), nodes, unused)
        return jnp.where(used, values, unused).astype(jnp.int32)

    parent = column(jnp.full_like(root, -1), parent, -1)
    depth = column(jnp.zeros_like(root), depth, 0)
    return Tree(
        tokens=column(root, token, 0),
        parent=parent,
        depth=depth,
        rank=column(jnp.zeros_like(root), rank, 0),
        score=jnp.where(used, score, -jnp.inf),
        size=size,
        ancestors=ancestor_words(parent, used),
    )


def _pad(values, width, fill):
    return jnp.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)


def ancestor_words(parent: Int[Array, "r n"], used: Bool[Array, "r n"]) -> UInt32[Array, "r n w"]:
    """Ancestor bits of every node, itself included, 32 to a word; no bits for unused nodes.

    Pointer doubling: after k rounds a node knows its ancestors up to 2^k - 1 levels up.
    """
    nodes = parent.shape[1]
    index = jnp.arange(nodes, dtype=jnp.int32)
    word = jnp.arange(-(-nodes // 32), dtype=jnp.int32)
    bit = jnp.uint32(1) << (index % 32).astype(jnp.uint32)
    own = jnp.where(index[:, None] // 32 == word[None], bit[:, None], jnp.uint32(0))
    words = jnp.where(used[..., None], own[None], 0)
    jump = jnp.where(parent >= 0, parent, index[None])
    for _ in range(max(nodes - 1, 0).bit_length()):
        words = words | jnp.take_along_axis(words, jump[..., None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    return jnp.where(used[..., None], words, 0)


def visibility(ancestors: UInt32[Array, "r n w"]) -> Bool[Array, "r n n"]:
    """The ancestor words as a matrix: entry (i, j) says that node i sees node j."""
    nodes = jnp.arange(ancestors.shape[1], dtype=jnp.int32)
    bits = ancestors[..., nodes // 32] >> (nodes % 32).astype(jnp.uint32)[None, None]
    return (bits & 1) == 1


def walk(
    tree: Tree, target: Int[Array, "r n"], horizon: int
) -> tuple[Int[Array, "r path"], Int[Array, " r"], Int[Array, " r"]]:
    """Follow children that carry their parent's target token, as deep as they go.

    `target` is the token the target chooses after each node. Returns the nodes of the path by
    depth, the root first ([r, horizon+1]; entries past the length are 0), its length (0 for an
    empty tree), and the last node's target token: the bonus. No two children of a node carry the
    same token, so the path is unique.
    """
    nodes = tree.tokens.shape[1]
    index = jnp.arange(nodes, dtype=jnp.int32)
    used = index[None] < tree.size[:, None]
    wanted = jnp.take_along_axis(target, jnp.maximum(tree.parent, 0), axis=1)
    match = used & ((tree.parent < 0) | (tree.tokens == wanted))
    sees = visibility(tree.ancestors)
    reached = used & (match[:, None, :] | ~sees).all(axis=-1)
    last = jnp.argmax(jnp.where(reached, tree.depth, -1), axis=1).astype(jnp.int32)
    on_path = jnp.take_along_axis(sees, last[:, None, None], axis=1)[:, 0]
    depths = jnp.arange(horizon + 1, dtype=jnp.int32)
    at_depth = on_path[:, None] & (tree.depth[:, None] == depths[None, :, None])
    path = jnp.argmax(at_depth, axis=-1).astype(jnp.int32)
    length = on_path.sum(axis=-1).astype(jnp.int32)
    bonus = jnp.take_along_axis(target, last[:, None], axis=1)[:, 0]
    return path, length, bonus
