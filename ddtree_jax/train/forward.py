"""The target's forward pass for training: expanded attention, every expert on every row.

With 24 narrow experts one wide matmul over all of them is faster than sorting rows; router
weights, zero for experts not chosen, make it equal to the routed sum. It drops nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.config import KimiConfig
from ddtree_jax.model.attention import causal_attention, flash_attention
from ddtree_jax.model.kimi import Kimi, Rows, merge_kimi
from ddtree_jax.model.layers import matmul, precision
from ddtree_jax.pallas.expert_weights import GROUP
from ddtree_jax.train.params import Flat, leaves

KEEP_WIDE = "e_score_correction_bias"  # float32 in the checkpoint too


def fake_quantize(weight: Float[Array, "*s i"]) -> Float[Array, "*s i"]:
    """INT4 values times their bf16 group scale, with the gradient of the identity."""
    values, scales = quantize(lax.stop_gradient(weight))
    rounded = (values * scales.astype(weight.dtype)[..., None]).reshape(weight.shape)
    # In this order the sum is the rounded value to the last bit.
    return lax.stop_gradient(rounded) + (weight - lax.stop_gradient(weight))


def quantize(weight: Float[Array, "*s i"]) -> tuple[Array, Array]:
    """Values -8..7 [.., groups, 32] (as floats) and bf16 scales max|w|/7 [.., groups]."""
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP)
    scales = (jnp.abs(groups).max(axis=-1) / 7).astype(jnp.bfloat16)
    scales = jnp.where(scales > 0, scales, 1).astype(jnp.bfloat16)
    values = jnp.round(groups / scales[..., None].astype(weight.dtype))
    return jnp.clip(values, -8, 7), scales


def pack(values: Float[Array, "*s g 32"]) -> Int[Array, "*s w"]:
    """Eight values plus 8 in a 32-bit word, the least significant nibble first."""
    nibbles = (values + 8).astype(jnp.uint32).reshape(*values.shape[:-2], -1, 8)
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32).reshape((1,) * (nibbles.ndim - 1) + (8,))
    return lax.bitcast_convert_type((nibbles << shifts).sum(-1, dtype=jnp.uint32), jnp.int32)


def working(masters: Flat, dtype, quantized: Bool[Array, ""] | bool) -> Flat:
    """The weights a step computes with: experts through INT4 where asked for, all in `dtype`."""

    def cast(name, value):
        if name.startswith("experts/"):
            value = jnp.where(quantized, fake_quantize(value), value)
        return value if name.endswith(KEEP_WIDE) else value.astype(dtype)

    return {name: cast(name, value) for name, value in masters.items()}


def build(config: KimiConfig, weights: Flat) -> Kimi:
    """The module around flat weights, its embedding with a gradient that is a matmul."""
    model = merge_kimi(config, leaves(weights), weights["embed_tokens/weight"].dtype)
    model.embed_tokens = lambda tokens: embed(weights["embed_tokens/weight"], tokens)
    return model


@jax.custom_vjp
def embed(weight: Float[Array, "v h"], tokens: Int[Array, " m"]) -> Float[Array, "m h"]:
    """Rows of `weight`. Its gradient adds thousands of rows to one: a matmul, not a scatter."""
    return jnp.take(weight, tokens, axis=0, mode="clip")


def _embed_forward(weight, tokens):
    return embed(weight, tokens), (tokens, weight)


def _embed_backward(saved, grad):
    tokens, weight = saved
    hot = tokens[:, None] == jnp.arange(weight.shape[0], dtype=tokens.dtype)[None]
    out = jnp.einsum("mv,mh->vh", hot.astype(grad.dtype), grad, preferred_element_type=jnp.float32)
    return out.astype(weight.dtype), None


embed.defvjp(_embed_forward, _embed_backward)


def flash(batch: int, length: int, implementation: str):
    """Attention over rows [batch * length]: 'cudnn' on a GPU in bf16, 'xla', or 'plain' (slow)."""

    def attend(mla, x, positions, layer):
        c = mla.config
        nope, rope, latents = mla.project(x, positions)
        keys, values = mla.expand(latents)
        queries = jnp.concatenate([nope, rope], axis=-1)
        q, k, v = (a.reshape(batch, length, *a.shape[1:]) for a in (queries, keys, values))
        if implementation == "plain":
            out = jax.vmap(lambda *a: causal_attention(*a, c.softmax_scale))(q, k, v)
        else:
            out = flash_attention(q, k, v, c.softmax_scale, implementation)
        return mla.o_proj(out.reshape(batch * length, -1)), latents

    return attend


def dense_experts(counts: list | None = None):
    """An `expert_mlp` over all experts; appends to `counts` the rows each layer's experts got."""

    def mlp(x, gate, up, down, layer, ids, weights):
        experts, width, hidden = gate.shape[1:]
        columns = jnp.arange(experts, dtype=ids.dtype)[None, None]
        chosen = ids[:, :, None] == columns  # [m, k, experts]
        if counts is not None:
            counts.append(chosen.sum(axis=(0, 1), dtype=jnp.int32))
        routed = jnp.where(chosen, weights[..., None], 0).sum(axis=1)
        wide = experts * width
        inner = _gated(
            matmul(x, gate[layer].reshape(wide, hidden)),
            matmul(x, up[layer].reshape(wide, hidden)),
            routed,
        )
        return matmul(inner, jnp.moveaxis(down[layer], 0, 1).reshape(hidden, wide))

    return mlp


@jax.checkpoint
def _gated(gate, up, routed):
    """silu(gate) * up * router weight; the backward pass recomputes it from its bf16 inputs."""
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    out = jax.nn.silu(gate.astype(wide)) * up.astype(wide)
    out = out.reshape(*routed.shape, -1) * routed.astype(wide)[..., None]
    return out.reshape(gate.shape).astype(gate.dtype)


def run(
    config: KimiConfig,
    weights: Flat,
    tokens: Int[Array, "b t"],
    implementation: str,
    taps: tuple[int, ...] = (),
    counts: list | None = None,
) -> Rows:
    """All layers over a batch of sequences that start at position 0; rows are flattened."""
    batch, length = tokens.shape
    flat = tokens.reshape(-1).astype(jnp.int32)
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    return build(config, weights)(
        flat,
        positions,
        jnp.ones(flat.shape, bool),
        flash(batch, length, implementation),
        taps,
        dense_experts(counts),
    )


def logits(weights: Flat, hidden: Float[Array, "*m h"]) -> Float[Array, "*m v"]:
    """The head, in float32 or wider."""
    return head(hidden, weights["lm_head/weight"])


@jax.custom_vjp
def head(hidden, weight):
    """hidden times weight^T, wide; its gradient matmuls are as narrow as `hidden`."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    high = precision(hidden.dtype)
    return jnp.einsum("...h,vh->...v", hidden, weight, precision=high, preferred_element_type=wide)


def _head_backward(saved, grad):
    hidden, weight = saved
    grad, high = grad.astype(hidden.dtype), precision(hidden.dtype)
    rows = jnp.einsum("...v,vh->...h", grad, weight, precision=high)
    flat = (grad.reshape(-1, grad.shape[-1]), hidden.reshape(-1, hidden.shape[-1]))
    return rows, jnp.einsum("mv,mh->vh", *flat, precision=high).astype(weight.dtype)


head.defvjp(lambda hidden, weight: (head(hidden, weight), (hidden, weight)), _head_backward)


def default_attention() -> str:
    return "cudnn" if jax.default_backend() == "gpu" else "xla"
