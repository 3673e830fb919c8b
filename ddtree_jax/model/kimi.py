"""The text tower of Kimi K2.6 in Flax NNX.

Parameter paths are the published names, but for the routed experts, which are stacked over layers,
and `kv_b_proj`, which is kept as its two halves. One forward serves prefill, verify and training:
they differ in the attention they pass in.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.config import KimiConfig
from ddtree_jax.model.attention import MLA
from ddtree_jax.model.layers import MLP, Embedding, Head, RMSNorm
from ddtree_jax.model.moe import Experts, MoE
from ddtree_jax.pallas.expert_matmul import expert_mlp as default_expert_mlp
from ddtree_jax.parallel import ALONE, Plan

# (mla, normed rows [m, hidden], positions [m], layer) -> (output [m, hidden], latents [m, latent])
Attention = Callable[[MLA, Array, Array, int], tuple[Array, Array]]


class Rows(NamedTuple):
    """What a forward pass over M rows leaves: for the head, the drafter and the cache."""

    hidden: Float[Array, "m hidden"]  # after the final norm
    taps: Float[Array, "m taps hidden"]  # outputs of the tapped layers, before the final norm
    latents: Float[Array, "layers m latent"]
    experts: Int[Array, "moe_layers m k"] | None  # the routers' choices; None without MoE layers


class DecoderLayer(nnx.Module):
    """Pre-norm attention, then a dense MLP or experts."""

    def __init__(self, config: KimiConfig, index: int, *, rngs: nnx.Rngs, dtype):
        c, gain = config, (2 * config.num_hidden_layers) ** -0.5
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype)
        self.self_attn = MLA(c, rngs=rngs, dtype=dtype, gain=gain)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype)
        dense = index < c.first_k_dense_replace
        self.mlp = (
            MLP(c.hidden_size, c.intermediate_size, rngs=rngs, dtype=dtype, gain=gain)
            if dense
            else MoE(c, index - c.first_k_dense_replace, rngs=rngs, dtype=dtype, gain=gain)
        )
        self.index, self.dense = index, dense

    def __call__(self, x, positions, valid, attention: Attention, experts, expert_mlp, plan: Plan):
        normed = self.input_layernorm(x)
        out, latents = attention(self.self_attn, normed, positions, self.index)
        x = x + plan.whole(out)
        normed = self.post_attention_layernorm(x)
        if self.dense:
            return x + plan.whole(self.mlp(normed)), latents, None
        out, chosen = self.mlp(normed, valid, experts, expert_mlp, plan)
        return x + out, latents, chosen


class Kimi(nnx.Module):
    """Embedding, layers, final norm, head."""

    def __init__(self, config: KimiConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        c = config
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, rngs=rngs, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(c, i, rngs=rngs, dtype=dtype) for i in range(c.num_hidden_layers)]
        )
        gain = (2 * c.num_hidden_layers) ** -0.5
        self.experts = Experts(c, rngs=rngs, dtype=dtype, gain=gain) if c.num_moe_layers else None
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype)
        self.lm_head = Head(c.hidden_size, c.vocab_size, rngs=rngs, dtype=dtype)
        self.config, self.plan = config, ALONE

    def __call__(
        self,
        tokens: Int[Array, " m"],
        positions: Int[Array, " m"],
        valid: Bool[Array, " m"],
        attention: Attention,
        tap_layers: tuple[int, ...] = (),
        expert_mlp=default_expert_mlp,
    ) -> Rows:
        """Run M rows through all layers. Rows that are not `valid` reach no expert.

        Taps are outputs of whole layers: transformers' `hidden_states[layer + 1]`, also for the
        last layer, where transformers would give the normed one.

        Rows are summed up in float32 or wider: rounding them to bf16 after every layer makes of a
        last-bit difference between two kernels one of a whole step, and more near-ties part.
        """
        x = self.embed(tokens)
        dtype = x.dtype
        x = x.astype(jnp.promote_types(dtype, jnp.float32))
        latents, taps, experts = [], {}, []
        valid = self.plan.all_rows(valid)  # once: only the experts ask
        for layer in self.layers:
            x, rows, chosen = layer(
                x, positions, valid, attention, self.experts, expert_mlp, self.plan
            )
            latents.append(rows)
            if chosen is not None:
                experts.append(chosen)
            if layer.index in tap_layers:
                taps[layer.index] = x.astype(dtype)
        tapped = [taps[i] for i in tap_layers]
        stacked = jnp.stack(tapped, axis=1) if tapped else x[:, None][:, :0].astype(dtype)
        experts = jnp.stack(experts) if experts else None
        return Rows(self.norm(x), stacked, jnp.stack(latents), experts)

    @property
    def heads(self) -> int:
        """Attention heads of a layer on this device."""
        return self.layers[0].self_attn.heads

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows hidden"]:
        return self.plan.embed(self.embed_tokens, tokens)


@lru_cache
def kimi_graph(config: KimiConfig, dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """The module's graph and abstract parameters, without allocating a weight."""
    return nnx.split(nnx.eval_shape(lambda: Kimi(config, rngs=nnx.Rngs(0), dtype=dtype)))


def merge_kimi(
    config: KimiConfig, leaves: tuple[jax.Array, ...], dtype, plan: Plan = ALONE
) -> Kimi:
    """The module around flat leaves (the order of `jax.tree.leaves`); called while tracing."""
    graph, abstract = kimi_graph(config, jnp.dtype(dtype))
    module = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(abstract), leaves))
    module.plan = plan
    return module
