"""The DFlash drafter (arXiv 2602.06036, section 4.1): one pass guesses a whole block.

Its rows are the root and masks, embedded and read out by the target's own embedding and head. The
context enters as keys and values only: tapped layers of the target are fused once per committed
token (`context`), cached, and never pass through queries or MLPs.
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.config import DFlashConfig
from ddtree_jax.model.layers import MLP, Linear, RMSNorm, precision
from ddtree_jax.model.rope import cos_sin, rotate
from ddtree_jax.parallel import ALONE, Plan

# (queries, keys, values of the block [r, f, heads, d], layer) -> attended [r, f, heads, d]
BlockAttention = Callable[[Array, Array, Array, int], Array]


class DFlashAttention(nnx.Module):
    """Grouped-query attention with normed queries and keys; positions turn all of head_dim."""

    def __init__(self, config: DFlashConfig, *, rngs: nnx.Rngs, dtype, gain: float):
        c = config
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, q, rngs=rngs, dtype=dtype)
        self.k_proj = Linear(c.hidden_size, kv, rngs=rngs, dtype=dtype)
        self.v_proj = Linear(c.hidden_size, kv, rngs=rngs, dtype=dtype)
        self.o_proj = Linear(q, c.hidden_size, rngs=rngs, dtype=dtype, gain=gain)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype=dtype)
        self.config = config

    def queries(self, x, cos, sin):
        q = self.q_proj(x).reshape(*x.shape[:-1], -1, self.config.head_dim)
        return rotate(self.q_norm(q), cos[..., None, :], sin[..., None, :])

    def keys_values(self, x, cos, sin):
        shape = (*x.shape[:-1], -1, self.config.head_dim)
        keys = self.k_norm(self.k_proj(x).reshape(shape))
        return rotate(keys, cos[..., None, :], sin[..., None, :]), self.v_proj(x).reshape(shape)


class DFlashLayer(nnx.Module):
    def __init__(self, config: DFlashConfig, *, rngs: nnx.Rngs, dtype):
        c, gain = config, (2 * config.num_hidden_layers) ** -0.5
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype)
        self.self_attn = DFlashAttention(c, rngs=rngs, dtype=dtype, gain=gain)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, rngs=rngs, dtype=dtype, gain=gain)


class DFlash(nnx.Module):
    """`fc` fuses the taps, `hidden_norm` norms them once for all layers; no embedding, no head."""

    def __init__(self, config: DFlashConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        c = config
        self.fc = Linear(
            len(c.target_layer_ids) * c.hidden_size, c.hidden_size, rngs=rngs, dtype=dtype
        )
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype)
        self.layers = nnx.List(
            [DFlashLayer(c, rngs=rngs, dtype=dtype) for _ in range(c.num_hidden_layers)]
        )
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype)
        self.config, self.plan = config, ALONE

    def angles(self, positions, dtype):
        c = self.config
        return cos_sin(positions, c.head_dim, c.rope_theta, c.yarn, dtype)

    def context(
        self, taps: Float[Array, "*rows taps hidden"], positions: Int[Array, "*rows"]
    ) -> tuple[Float[Array, "layers *rows kv d"], Float[Array, "layers *rows kv d"]]:
        """Keys and values of committed tokens, for every layer; fused once, cached for good."""
        fused = self.hidden_norm(self.fc(taps.reshape(*taps.shape[:-2], -1)))
        cos, sin = self.angles(positions, fused.dtype)
        pairs = [layer.self_attn.keys_values(fused, cos, sin) for layer in self.layers]
        return jnp.stack([k for k, _ in pairs]), jnp.stack([v for _, v in pairs])

    def __call__(
        self,
        x: Float[Array, "r f hidden"],
        positions: Int[Array, "r f"],
        attention: BlockAttention,
    ) -> Float[Array, "r f hidden"]:
        """Embedded block rows (the root, then masks) to hidden rows for the target's head."""
        cos, sin = self.angles(positions, x.dtype)
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            attn = layer.self_attn
            keys, values = attn.keys_values(normed, cos, sin)
            out = attention(attn.queries(normed, cos, sin), keys, values, index)
            x = x + self.plan.whole(attn.o_proj(out.reshape(*x.shape[:-1], -1)))
            x = x + self.plan.whole(layer.mlp(layer.post_attention_layernorm(x)))
        return self.norm(x)


def block_visibility(
    config: DFlashConfig, layer: int, queries: Int[Array, " q"], keys: Int[Array, " k"], block: bool
) -> Bool[Array, "q k"]:
    """Which keys rows at positions `queries` see: all, the window's, or (in the block) the earlier.

    The window counts the row itself. Only sliding layers have a window, and only they can be
    causal within the block.
    """
    distance = queries[:, None] - keys[None, :]
    if config.layer_types[layer] == "full_attention":
        return jnp.ones_like(distance, dtype=bool)
    visible = jnp.abs(distance) < config.sliding_window
    return visible & (distance >= 0) if block and config.causal_sliding else visible


def grouped_attention(
    queries: Float[Array, "q heads d"],
    keys: Float[Array, "k kv d"],
    values: Float[Array, "k kv d"],
    mask: Bool[Array, "q k"],
) -> Float[Array, "q heads d"]:
    """Softmax attention with queries sharing key heads; masked keys may hold anything."""
    q, heads, d = queries.shape
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    high = precision(wide)
    seen = mask.any(axis=0)[:, None, None]
    keys, values = jnp.where(seen, keys, 0), jnp.where(seen, values, 0)
    grouped = queries.reshape(q, keys.shape[1], -1, d)
    scores = jnp.einsum(
        "qgid,kgd->giqk", grouped, keys, precision=high, preferred_element_type=wide
    )
    scores = jnp.where(mask[None, None], scores * d**-0.5, -jnp.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1)).astype(values.dtype)
    return jnp.einsum("giqk,kgd->qgid", weights, values, precision=high).reshape(q, heads, d)


@lru_cache
def dflash_graph(config: DFlashConfig, dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """The module's graph and abstract parameters, without allocating a weight."""
    return nnx.split(nnx.eval_shape(lambda: DFlash(config, rngs=nnx.Rngs(0), dtype=dtype)))


def merge_dflash(
    config: DFlashConfig, leaves: tuple[jax.Array, ...], dtype, plan: Plan = ALONE
) -> DFlash:
    """The module around flat leaves (the order of `jax.tree.leaves`); called while tracing."""
    graph, abstract = dflash_graph(config, jnp.dtype(dtype))
    module = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(abstract), leaves))
    module.plan = plan
    return module
