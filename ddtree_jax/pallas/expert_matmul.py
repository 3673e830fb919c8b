"""Routed experts as a grouped matmul: only experts that rows are routed to are read.

INT4 weights stay packed as published: eight values a 32-bit word, least significant nibble first,
each stored as value + 8; one bf16 scale for every 32 inputs of an output row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

GROUP = 32  # inputs that share a scale


class Int4(NamedTuple):
    """Stacked INT4 matrices [layers, experts, out, in]: packed words and group scales."""

    words: Int32[Array, "layers experts out words"]
    scales: Float[Array, "layers experts out groups"]


def dequantize(words: Int32[Array, "*s w"], scales: Float[Array, "*s g"], dtype) -> Array:
    """The matrix [.., out, in] as value * scale, multiplied in `dtype`.

    In bf16 this rounds exactly as the published library's decompression does.
    """
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32).reshape((1,) * words.ndim + (8,))
    values = ((words[..., None] >> shifts) & 15) - 8
    values = values.reshape(*scales.shape, GROUP).astype(dtype)
    return (values * scales[..., None].astype(dtype)).reshape(*words.shape[:-1], -1)


def expert_matrix(weight: Array | Int4, layer, expert, dtype) -> Float[Array, "out in"]:
    """One expert's matrix, dequantised if need be; layer and expert may be traced."""
    if isinstance(weight, Int4):
        return dequantize(weight.words[layer, expert], weight.scales[layer, expert], dtype)
    return weight[layer, expert].astype(dtype)


def expert_mlp(x, gate, up, down, layer: int, ids, weights) -> Float[Array, "m hidden"]:
    """The routed experts on the platform at hand; arguments as in `expert_mlp_reference`."""
    return lax.platform_dependent(
        x, gate, up, down, ids, weights,
        cuda=lambda x, gate, up, down, *w: expert_mlp_dense(x, gate, up, down, layer, *w),
        default=lambda x, gate, up, down, *w: expert_mlp_reference(x, gate, up, down, layer, *w),
    )  # fmt: skip


def expert_mlp_reference(
    x: Float[Array, "m hidden"],
    gate: Array | Int4,
    up: Array | Int4,
    down: Array | Int4,
    layer: int | Int[Array, ""],
    ids: Int[Array, "m k"],
    weights: Float[Array, "m k"],
) -> Float[Array, "m hidden"]:
    """sum_k weights[m,k] * down(silu(gate x) * up x) of expert ids[m,k]; ids outside: inert.

    Rows are sorted by expert and worked on in blocks of one expert each; the loop runs over the
    blocks that exist, so an expert without rows is never read. The k products of a row are summed
    in the order of `ids`. Dropless for any routing.
    """
    stack = gate.words if isinstance(gate, Int4) else gate
    experts = stack.shape[1]
    m, k = ids.shape
    pairs = m * k
    block = min(128, 1 << max(0, (2 * pairs // experts).bit_length() - 1))
    inert = (ids < 0) | (ids >= experts)
    flat = jnp.where(inert, experts, ids).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    last_block = jnp.cumsum((counts + block - 1) // block, dtype=jnp.int32)
    high = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def matmul(rows, weight, expert):
        matrix = expert_matrix(weight, layer, expert, x.dtype)
        return jnp.einsum("bi,oi->bo", rows, matrix, precision=high)

    def step(i, out):
        expert = jnp.searchsorted(last_block, i, side="right", method="compare_all")
        used = (counts[expert] + block - 1) // block
        start = ends[expert] - counts[expert] + (i - last_block[expert] + used) * block
        slots = start + jnp.arange(block, dtype=jnp.int32)
        here = slots < ends[expert]
        pair = order[jnp.minimum(slots, pairs - 1)]
        rows = x[pair // k]
        hidden = jax.nn.silu(matmul(rows, gate, expert)) * matmul(rows, up, expert)
        return out.at[jnp.where(here, pair, pairs)].set(matmul(hidden, down, expert), mode="drop")

    out = lax.fori_loop(0, last_block[-1], step, jnp.zeros((pairs, x.shape[1]), x.dtype))
    weights = jnp.where(inert, 0, weights).astype(x.dtype)
    return jnp.einsum("mkh,mk->mh", out.reshape(m, k, -1), weights, precision=high)


def expert_mlp_dense(
    x: Float[Array, "m hidden"],
    gate: Array | Int4,
    up: Array | Int4,
    down: Array | Int4,
    layer: int,
    ids: Int[Array, "m k"],
    weights: Float[Array, "m k"],
) -> Float[Array, "m hidden"]:
    """As the reference, every expert on every row: few and large operations for a GPU.

    It reads all experts of the layer, which only a small model can afford.
    """

    def matrices(weight):
        if isinstance(weight, Int4):
            return dequantize(weight.words[layer], weight.scales[layer], x.dtype)
        return weight[layer].astype(x.dtype)

    high = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    experts = (gate.words if isinstance(gate, Int4) else gate).shape[1]
    chosen = ids[..., None] == jnp.arange(experts, dtype=ids.dtype)[None, None]
    routed = jnp.where(chosen, weights[..., None], 0).sum(axis=1).astype(x.dtype)
    hidden = jax.nn.silu(jnp.einsum("mh,ewh->mew", x, matrices(gate), precision=high))
    hidden = hidden * jnp.einsum("mh,ewh->mew", x, matrices(up), precision=high)
    hidden = hidden * routed[..., None]
    return jnp.einsum("mew,ehw->mh", hidden, matrices(down), precision=high)
