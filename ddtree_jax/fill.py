"""Leaves, or a device's part of them, out of a checkpoint's tensors: no byte more is read.

Of tensors whose rows are kept in another order all between the first and the last needed are read:
the order is changed within heads only, and heads are what is split.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ddtree_jax.pallas.expert_weights import Int4, down_records, gate_up_records
from ddtree_jax.shards import Shards

RECORDS = {"gate_up_records": ("gate", "up"), "down_records": ("down",)}
_FLOATS = ("BF16", "F16", "F32", "F64")
# The last word of a published name: the dtype it is written in, the dtypes it is read from.
_DTYPES = {
    "weight": (ml_dtypes.bfloat16, _FLOATS),
    "e_score_correction_bias": (np.float32, ("F32", "BF16", "F16")),
    "weight_packed": (np.int32, ("I32",)),
    "weight_scale": (ml_dtypes.bfloat16, ("BF16",)),
    "weight_shape": (np.int32, ("I32", "I64")),
}


class Piece(NamedTuple):
    """A published tensor, or the rows of one, and its place among the leaves."""

    key: str
    shape: tuple[int, ...]  # of the whole published tensor
    path: str  # of the leaf; of `weight_shape`, which is checked and not kept, none: ""
    index: tuple[int, ...] = ()  # layer and expert in a stacked leaf
    rows: np.ndarray | None = None  # published rows in the leaf's order; None: all, as they are
    value: tuple[int, ...] = ()  # what `weight_shape` must say

    @property
    def dtypes(self) -> tuple[Any, tuple[str, ...]]:
        return _DTYPES[self.key.rsplit(".", 1)[-1]]


def fill(
    shards: Shards,
    leaf: jax.ShapeDtypeStruct,
    pieces: list[Piece],
    placed: jax.ShapeDtypeStruct | None = None,
) -> jax.Array:
    """One leaf from its pieces; `placed` has the sharding, and the shape once padded by zeros."""
    read = _records if pieces[0].path.rpartition("/")[2] in RECORDS else _values
    if placed is None:
        return jnp.asarray(read(shards, leaf, pieces, tuple(slice(0, n) for n in leaf.shape)))
    parts, last, part = [], None, None
    places = placed.sharding.addressable_devices_indices_map(placed.shape)
    for device, index in places.items():
        bounds = [s.indices(n)[:2] for s, n in zip(index, placed.shape, strict=True)]
        with jax.default_device(device):
            if bounds != last:
                part = read(shards, leaf, pieces, tuple(slice(*b) for b in bounds))
            parts.append(jax.device_put(part, device))
        last = bounds
    return jax.make_array_from_single_device_arrays(placed.shape, placed.sharding, parts)


def _values(shards: Shards, leaf, pieces: list[Piece], part: tuple[slice, ...]) -> np.ndarray:
    buffer = np.zeros([s.stop - s.start for s in part], leaf.dtype)
    for piece in pieces:
        place, shape = _place(piece, part), leaf.shape[len(piece.index) :]
        inner = _clipped(part[len(piece.index) :], shape)
        if place is None or inner is None:
            continue
        if piece.rows is None:
            tensor = shards.read(piece.key, inner)
        else:
            rows = piece.rows.reshape(shape[:-1])[inner[:-1]]
            first = int(rows.min())
            between = slice(first, int(rows.max()) + 1), inner[-1]
            tensor = shards.read(piece.key, between)[rows - first]
        buffer[(*place, *(slice(0, n) for n in tensor.shape))] = tensor
    return buffer


def _records(shards: Shards, leaf, pieces: list[Piece], part: tuple[slice, ...]) -> jax.Array:
    """Pack expert by expert, in place, on the default device: nothing is held twice."""
    buffer = jnp.zeros([s.stop - s.start for s in part], leaf.dtype)
    of_expert: dict[tuple[int, ...], list[Piece]] = {}
    for piece in pieces:
        of_expert.setdefault(piece.index, []).append(piece)
    inner = _clipped(part[2:4], leaf.shape[2:4])  # tiles of rows, steps of columns
    for tensors in of_expert.values() if inner else ():
        place = _place(tensors[0], part)
        if place is None:
            continue
        parts = []  # words, scales of one or of both
        for piece in tensors:
            units = (n // m for n, m in zip(piece.shape, leaf.shape[2:4], strict=True))
            where = (slice(s.start * u, s.stop * u) for s, u in zip(inner, units, strict=True))
            parts.append(shards.read(piece.key, tuple(where)))
        buffer = _pack_into(buffer, jnp.asarray(place, jnp.int32), parts)
    return buffer


def _place(piece: Piece, part: tuple[slice, ...]) -> tuple[int, ...] | None:
    """Layer and expert within the part; None if it has others."""
    stack = list(zip(piece.index, part, strict=False))
    if not all(s.start <= i < s.stop for i, s in stack):
        return None
    return tuple(i - s.start for i, s in stack)


def _clipped(part: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """The part without padding; None if it is nothing else."""
    clipped = tuple(slice(s.start, min(s.stop, n)) for s, n in zip(part, shape, strict=True))
    return None if any(s.start >= s.stop for s in clipped) else clipped


@partial(jax.jit, donate_argnums=0)
def _pack_into(buffer: jax.Array, index: jax.Array, parts: list[jax.Array]) -> jax.Array:
    weights = [Int4(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
    records = gate_up_records(*weights) if len(weights) == 2 else down_records(*weights)
    tiles, steps = records.shape[:2]
    return buffer.at[index[0], index[1], :tiles, :steps].set(records)
