"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed and expanded.

A cache row of a token is its latent: 512 normed elements that keys and values are projected from,
then 64 rotated elements of the one key part that knows positions. Absorbed, the key projection
moves into the query and the value projection behind the attention, so attention reads latents
alone; expanded, keys and values are made for every head. Both give the same output.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.config import KimiConfig
from ddtree_jax.model.layers import Linear, RMSNorm, precision
from ddtree_jax.model.rope import cos_sin, rotate


class MLA(nnx.Module):
    """The projections around attention; the attention itself is the caller's.

    Heads are counted from the weights: with a part of them the output is that part's share of the
    sum over heads.

    `kv_b_key` [heads, nope, kv_lora] and `kv_b_value` [heads, v, kv_lora] are the two halves of
    the published `kv_b_proj`, kept apart so that no step slices a weight.
    """

    def __init__(self, config: KimiConfig, *, rngs: nnx.Rngs, dtype, gain: float = 1.0):
        c, heads = config, config.num_attention_heads
        q_size = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        if c.q_lora_rank is None:
            self.q_proj = Linear(c.hidden_size, q_size, rngs=rngs, dtype=dtype)
        else:
            self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, rngs=rngs, dtype=dtype)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps, dtype=dtype)
            self.q_b_proj = Linear(c.q_lora_rank, q_size, rngs=rngs, dtype=dtype)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.latent_size, rngs=rngs, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps, dtype=dtype)
        key = Linear(c.kv_lora_rank, heads * c.qk_nope_head_dim, rngs=rngs, dtype=dtype)
        value = Linear(c.kv_lora_rank, heads * c.v_head_dim, rngs=rngs, dtype=dtype)
        self.kv_b_key = nnx.Param(key.weight[...].reshape(heads, -1, c.kv_lora_rank))
        self.kv_b_value = nnx.Param(value.weight[...].reshape(heads, -1, c.kv_lora_rank))
        self.o_proj = Linear(heads * c.v_head_dim, c.hidden_size, rngs=rngs, dtype=dtype, gain=gain)
        self.config = config

    def project(
        self, x: Float[Array, "m hidden"], positions: Int[Array, " m"]
    ) -> tuple[Float[Array, "m h nope"], Float[Array, "m h rope"], Float[Array, "m latent"]]:
        """Query parts without and with position, and the rows' own latents, as a cache keeps."""
        c = self.config
        q = self.q_proj(x) if c.q_lora_rank is None else self._low_rank_queries(x)
        q = q.reshape(*x.shape[:-1], -1, c.qk_nope_head_dim + c.qk_rope_head_dim)
        nope, rope = q[..., : c.qk_nope_head_dim], q[..., c.qk_nope_head_dim :]
        down = self.kv_a_proj_with_mqa(x)
        cos, sin = cos_sin(positions, c.qk_rope_head_dim, c.rope_theta, c.yarn, x.dtype)
        key = rotate(down[..., c.kv_lora_rank :], cos, sin)
        latent = jnp.concatenate([self.kv_a_layernorm(down[..., : c.kv_lora_rank]), key], axis=-1)
        return nope, rotate(rope, cos[..., None, :], sin[..., None, :]), latent

    def _low_rank_queries(self, x):
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    @property
    def heads(self) -> int:
        return self.kv_b_key.shape[0]

    def absorb(self, nope, rope) -> Float[Array, "m heads latent"]:
        """Queries that meet latents directly: (nope W_UK, rope)."""
        absorbed = jnp.einsum(
            "mhd,hdc->mhc", nope, self.kv_b_key[...], precision=precision(nope.dtype)
        )
        return jnp.concatenate([absorbed, rope], axis=-1)

    def output(self, attended: Float[Array, "m heads kv_lora"]) -> Float[Array, "m hidden"]:
        """From attention-weighted latents back to the residual stream."""
        values = jnp.einsum(
            "mhc,hdc->mhd", attended, self.kv_b_value[...], precision=precision(attended.dtype)
        )
        return self.o_proj(values.reshape(values.shape[0], -1))

    def expand(self, latent: Float[Array, "t latent"]):
        """Keys [t, heads, nope + rope] and values [t, heads, v] of every head."""
        c, high = self.config, precision(latent.dtype)
        compressed, rope = latent[..., : c.kv_lora_rank], latent[..., c.kv_lora_rank :]
        keys = jnp.einsum("tc,hdc->thd", compressed, self.kv_b_key[...], precision=high)
        values = jnp.einsum("tc,hdc->thd", compressed, self.kv_b_value[...], precision=high)
        rope = jnp.broadcast_to(rope[:, None, :], (*keys.shape[:2], rope.shape[-1]))
        return jnp.concatenate([keys, rope], axis=-1), values


def expanded_attention(mla: MLA, x, positions, layer, flash: bool = True):
    """Attention of one sequence over itself, from position 0: prefill, and scoring of texts.

    Cheaper than absorbed attention for so many rows. Also returns the rows' latents. `flash=False`
    keeps to the plain form where flash attention could serve.
    """
    nope, rope, latents = mla.project(x, positions)
    queries = jnp.concatenate([nope, rope], axis=-1)
    keys, values = mla.expand(latents)
    plain = partial(causal_attention, scale=mla.config.softmax_scale)
    if flash and flash_serves(queries, values):
        fused = partial(flash_attention, scale=mla.config.softmax_scale)
        out = lax.platform_dependent(queries, keys, values, cuda=fused, default=plain)
    else:
        out = plain(queries, keys, values)
    return mla.o_proj(out.reshape(x.shape[0], -1)), latents


FLASH_FROM = 1024  # rows: the plain form's scores are small below


def flash_serves(queries: Float[Array, "t heads d"], values: Float[Array, "t heads v"]) -> bool:
    """Whether `flash_attention` can, and should, take the place of `causal_attention`."""
    if jax.default_backend() != "gpu" or queries.dtype != jnp.bfloat16:
        return False
    known = {"9.0", "10.0"}  # Hopper and Blackwell: cuDNN has wide heads there
    capable = all(getattr(d, "compute_capability", None) in known for d in jax.local_devices())
    t, d = queries.shape[0], queries.shape[2]
    return capable and t >= FLASH_FROM and d % 8 == 0 and values.shape[2] <= d <= 256


def flash_attention(
    queries: Float[Array, "*b t heads d"],
    keys: Float[Array, "*b t heads d"],
    values: Float[Array, "*b t heads v"],
    scale: float,
    implementation: str = "cudnn",
) -> Float[Array, "*b t heads v"]:
    """`causal_attention` of one sequence or of a batch; cuDNN's keeps the scores off memory.

    jax.nn wants values as wide as keys: the padding costs a fifth of the work at 192 and 128.
    """
    size = values.shape[-1]
    wide = jnp.pad(values, ((0, 0),) * (values.ndim - 1) + ((0, keys.shape[-1] - size),))
    out = jax.nn.dot_product_attention(
        queries, keys, wide, scale=scale, is_causal=True, implementation=implementation
    )
    return out[..., :size]


def causal_attention(
    queries: Float[Array, "t heads d"],
    keys: Float[Array, "t heads d"],
    values: Float[Array, "t heads v"],
    scale: float,
    block: int = 256,
) -> Float[Array, "t heads v"]:
    """Plain causal softmax attention of one sequence, queries in blocks so that scores stay small.

    Padding at the end needs no mask: no earlier row sees it.
    """
    t = queries.shape[0]
    block = min(block, t)
    if t % block:
        raise ValueError(f"{t} rows are not a multiple of the query block {block}")
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    high = precision(wide)

    def attend(start):
        q = lax.dynamic_slice_in_dim(queries, start, block)
        scores = jnp.einsum("qhd,khd->hqk", q, keys, precision=high, preferred_element_type=wide)
        visible: Bool[Array, "q k"] = (
            start + jnp.arange(block, dtype=jnp.int32)[:, None]
            >= jnp.arange(t, dtype=jnp.int32)[None, :]
        )
        scores = jnp.where(visible[None], scores * scale, -jnp.inf)
        weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
        out = jnp.einsum(
            "hqk,khd->qhd", weights.astype(values.dtype), values, precision=high,
            preferred_element_type=wide,
        )  # fmt: skip
        return (out / weights.sum(axis=-1).T[..., None]).astype(values.dtype)

    starts = jnp.arange(0, t, block, dtype=jnp.int32)
    return lax.map(attend, starts).reshape(t, *values.shape[1:])
