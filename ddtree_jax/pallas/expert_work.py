"""Which rows go to which expert: the work list of the grouped matmul."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int, Int32

from ddtree_jax.pallas.expert_config import FLAGS, ExpertConfig
from ddtree_jax.pallas.expert_weights import DEPTH, GROUP, OFFSET


class Work(NamedTuple):
    """Rows sorted by expert, every expert's first row at a multiple of 8.

    A slot is up to `tile` rows of one expert; a pair is one of the k choices of a row.
    """

    slots: Int32[Array, "slots 4"]  # expert, first row, rows, 0
    used: Int32[Array, "1"]  # slots in use
    row: Int32[Array, " rows"] | None  # the batch row each sorted row is a copy of; 0 where padded
    pair: Int32[Array, " rows"]  # its pair, row * k + choice; 0 where padded
    share: Float[Array, " rows"]  # its router weight
    flags: tuple[Int32[Array, " blocks"], ...]  # zeros, for each of the two launches


class Rows(NamedTuple):
    """Sorted rows as a launch reads them. `bias` [rows/8, inputs/128, 4, 8] serves scale="bias"."""

    values: BFloat16[Array, "rows inputs"]
    bias: Float[Array, "eights steps 4 8"] | None


def work_list(
    ids: Int[Array, "m k"], weights: Float[Array, "m k"], experts: int, tile: int
) -> Work:
    """Slots of at most `tile` rows; pairs with an id outside 0 .. experts-1 are in none."""
    k, pairs = ids.shape[1], ids.size
    flat = jnp.where((ids < 0) | (ids >= experts), experts, ids).reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    padded = (counts + 7) // 8 * 8
    first = jnp.cumsum(padded, dtype=jnp.int32) - padded
    start = jnp.cumsum(counts, dtype=jnp.int32) - counts
    tiles = (counts + tile - 1) // tile
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    slot = jnp.arange(slot_bound(pairs, experts, tile), dtype=jnp.int32)
    expert = jnp.searchsorted(ends, slot, side="right", method="compare_all").astype(jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    skipped = (slot - (ends - tiles)[expert]) * tile
    rows = jnp.clip(counts[expert] - skipped, 0, tile)
    slots = jnp.stack([expert, first[expert] + skipped, rows, jnp.zeros_like(rows)], axis=1)
    sorted_to = flat[order]
    here = jnp.minimum(sorted_to, experts - 1)
    place = first[here] + jnp.arange(pairs, dtype=jnp.int32) - start[here]
    place = jnp.where(sorted_to < experts, place, row_bound(pairs, experts))
    empty = jnp.zeros(row_bound(pairs, experts), jnp.int32)
    pair = empty.at[place].set(order, mode="drop")
    share = weights.astype(jnp.float32).reshape(-1)[pair]
    flags = jnp.zeros(FLAGS, jnp.int32)
    return Work(slots, ends[-1:], pair // k, pair, share, (flags, flags))


def slot_bound(pairs: int, experts: int, tile: int) -> int:
    """The most slots any routing can have."""
    return min(pairs, experts + pairs // tile)


def row_bound(pairs: int, experts: int) -> int:
    """The most sorted rows, those between experts counted."""
    return 8 * slot_bound(pairs, experts, 8)


def sorted_rows(x: BFloat16[Array, "m inputs"], work: Work, config: ExpertConfig) -> Rows:
    """The rows of x in the order of the work list, and the bias that goes with them."""
    values = x[work.row]
    if not config.biased:
        return Rows(values, None)
    groups = values.astype(jnp.float32).reshape(-1, 8, x.shape[1] // DEPTH, DEPTH // GROUP, GROUP)
    return Rows(values, -OFFSET * groups.sum(axis=-1).transpose(0, 2, 3, 1))
