"""Expert weights as they are kept: dense, INT4 as published, or INT4 in the kernel's records.

Published INT4: eight values a 32-bit word, least significant nibble first, each stored as
value + 8; one bf16 scale for every 32 inputs of an output row.

A record is what one pipeline stage of the kernel copies in one piece: 256 output rows by 128
inputs as four blocks of 64 rows, [4, 9, 128] words. The first 8 x 128 words of a block are its
nibbles, the last 128 its scales, both in the order in which the 128 threads of a warpgroup want
them as the left operand of a Hopper matrix product:

    thread t, lane = (t % 32) // 4, column = t % 4:
    word 512 j + 4 t + s holds, for p, b, h in 0, 1, in nibble 4 p + 2 b + h,
        input 64 j + 16 s + 8 b + 2 column + p of row 16 (t // 32) + lane + 8 h;
    scale word 4 (t // 4) + g holds, in half h, the scale of inputs 32 g .. of that row;

so a thread loads 16 bytes at a time, shuffles nothing, and finds a pair of neighbouring inputs in
nibbles i and i + 4. The record of tile i, step j covers inputs 128 j .. of rows 256 i .. of `down`;
gate and up share records, whose first two blocks are rows 128 i .. of gate and last two of up.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

GROUP = 32  # inputs that share a scale
BLOCK = 64  # output rows one warpgroup multiplies at once
ROWS, DEPTH = 4 * BLOCK, 128  # of a record
OFFSET = 136  # of a nibble the kernel makes bf16: 128 of the exponent, 8 of the storage


class Int4(NamedTuple):
    """Stacked INT4 matrices [layers, experts, out, in] as published: words and group scales."""

    words: Int32[Array, "layers experts out words"]
    scales: Float[Array, "layers experts out groups"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Records:
    """Stacked INT4 matrices in records. `gate` and `up` are two names for the same array."""

    words: Int32[Array, "layers experts tiles steps 4 9 128"]
    part: str = field(metadata={"static": True})

    def __post_init__(self):
        if self.part not in ("gate", "up", "down"):
            raise ValueError(f"part={self.part!r}: must be gate, up or down")


Weight = Array | Int4 | Records  # [layers, experts, out, in] of gate, up or down


def dequantize(words: Int32[Array, "*s w"], scales: Float[Array, "*s g"], dtype) -> Array:
    """The matrix [.., out, in] as value * scale, multiplied in `dtype`.

    In bf16 this rounds exactly as the published library's decompression does.
    """
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32).reshape((1,) * words.ndim + (8,))
    return scaled(((words[..., None] >> shifts) & 15).reshape(*words.shape[:-1], -1), scales, dtype)


def scaled(nibbles: Int32[Array, "*s i"], scales: Float[Array, "*s g"], dtype) -> Array:
    values = (nibbles - 8).reshape(*scales.shape, GROUP).astype(dtype)
    return (values * scales[..., None].astype(dtype)).reshape(nibbles.shape)


def stack_shape(weight: Weight) -> tuple[int, int, int, int]:
    """(layers, experts, out, in), however the weights are kept."""
    if isinstance(weight, Records):
        layers, experts, tiles, steps = weight.words.shape[:4]
        rows = ROWS if weight.part == "down" else ROWS // 2
        return layers, experts, tiles * rows, steps * DEPTH
    if isinstance(weight, Int4):
        *lead, words = weight.words.shape
        return *lead, words * 8
    return weight.shape


def expert_matrix(weight: Weight, layer, expert, dtype) -> Float[Array, "out in"]:
    """One expert's matrix, dequantised if need be; layer and expert may be traced."""
    if isinstance(weight, Records):
        return dequantize(*published(weight.words[layer, expert], weight.part), dtype)
    if isinstance(weight, Int4):
        return dequantize(weight.words[layer, expert], weight.scales[layer, expert], dtype)
    return weight[layer, expert].astype(dtype)


def layer_matrices(weight: Weight, layer, dtype) -> Float[Array, "experts out in"]:
    """All experts of a layer; for small models only."""
    if isinstance(weight, Records):
        return dequantize(*published(weight.words[layer], weight.part), dtype)
    if isinstance(weight, Int4):
        return dequantize(weight.words[layer], weight.scales[layer], dtype)
    return weight[layer].astype(dtype)


def records_shape(part: str, out: int, inner: int) -> tuple[int, ...]:
    """[tiles, steps, 4, 9, 128] of one expert; ValueError where the kernel's tiles do not fit."""
    rows = ROWS if part == "down" else ROWS // 2
    for size, unit, what in ((out, rows, "outputs"), (inner, DEPTH, "inputs")):
        if size % unit:
            raise ValueError(f"{part} of {size} {what}: records need a multiple of {unit}")
    return out // rows, inner // DEPTH, ROWS // BLOCK, 9, 128


def gate_up_records(gate: Int4, up: Int4) -> Int32[Array, "*s tiles steps 4 9 128"]:
    """Records of published gate and up matrices [.., width, hidden] (any leading axes)."""
    pairs = zip(gate, up, strict=True)
    halves = ([w.reshape(*w.shape[:-2], -1, ROWS // 2, w.shape[-1]) for w in p] for p in pairs)
    both = (jnp.concatenate(h, axis=-2) for h in halves)
    return down_records(Int4(*(w.reshape(*w.shape[:-3], -1, w.shape[-1]) for w in both)))


def down_records(weight: Int4) -> Int32[Array, "*s tiles steps 4 9 128"]:
    """Records of a published matrix [.., out, in], rows as they are."""
    words, scales = weight
    lead, n = words.shape[:-2], words.ndim - 2
    tiles, steps, *_ = records_shape("down", words.shape[-2], words.shape[-1] * 8)
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32).reshape((1,) * words.ndim + (8,))
    # tile block warp half lane | step j s b column pair
    nibbles = ((words[..., None] >> shifts) & 15).reshape(
        *lead, tiles, 4, 4, 2, 8, steps, 2, 4, 2, 4, 2
    )
    order = (0, 5, 1, 6, 2, 4, 9, 7, 10, 8, 3)  # tile step block j warp lane column s | pair b half
    nibbles = nibbles.transpose(*range(n), *(n + i for i in order))
    nibbles = nibbles.reshape(*lead, tiles, steps, 4, 8, 128, 8)
    packed = (nibbles << shifts.reshape((1,) * (nibbles.ndim - 1) + (8,))).sum(-1, dtype=jnp.int32)
    bits = lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32)
    bits = bits.reshape(*lead, tiles, 4, 4, 2, 8, steps, 4)  # .. half lane | step group
    order = (0, 5, 1, 2, 4, 6, 3)  # tile step block warp lane group | half
    bits = bits.transpose(*range(n), *(n + i for i in order))
    bits = (bits[..., 0] | (bits[..., 1] << 16)).reshape(*lead, tiles, steps, 4, 1, 128)
    return jnp.concatenate([packed, bits], axis=-2)


def block_values(
    block: Int32[Array, "*s 9 128"],
) -> tuple[Int[Array, "*s 64 128"], Float[Array, "*s 64 4"]]:
    """Nibbles (value + 8) and bf16 scales of blocks, in matrix order."""
    lead, n = block.shape[:-2], block.ndim - 2
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32).reshape((1,) * (n + 2) + (8,))
    nibbles = (block[..., :8, :, None] >> shifts) & 15
    nibbles = nibbles.reshape(*lead, 2, 4, 8, 4, 4, 2, 2, 2)  # j warp lane column s | pair b half
    order = (1, 7, 2, 0, 4, 6, 3, 5)  # warp half lane | j s b column pair
    nibbles = nibbles.transpose(*range(n), *(n + i for i in order)).reshape(*lead, BLOCK, DEPTH)
    words = block[..., 8, :].reshape(*lead, 4, 8, 4, 1)  # warp lane group
    halves = (
        words >> jnp.arange(0, 32, 16, dtype=jnp.int32).reshape((1,) * (n + 3) + (2,))
    ) & 65535
    halves = halves.transpose(*range(n), *(n + i for i in (0, 3, 1, 2))).reshape(*lead, BLOCK, 4)
    return nibbles, lax.bitcast_convert_type(halves.astype(jnp.uint16), jnp.bfloat16)


def published(records: Int32[Array, "*s tiles steps 4 9 128"], part: str) -> Int4:
    """The inverse of packing, bit for bit: words and scales [.., out, ..] of one part."""
    blocks = {"gate": slice(0, 2), "up": slice(2, 4), "down": slice(0, 4)}[part]
    nibbles, scales = block_values(records[..., blocks, :, :])

    def rows(values):  # .. tiles steps blocks 64 inputs -> .. out in
        values = jnp.moveaxis(values, -4, -2)
        count = values.shape[-5] * values.shape[-4] * BLOCK
        return values.reshape(*values.shape[:-5], count, -1)

    nibbles = rows(nibbles)
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32).reshape((1,) * nibbles.ndim + (8,))
    words = (nibbles.reshape(*nibbles.shape[:-1], -1, 8) << shifts).sum(-1, dtype=jnp.int32)
    return Int4(words, rows(scales))
