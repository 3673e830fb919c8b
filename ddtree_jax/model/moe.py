"""Mixture of experts as DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and Kimi K2 have it.

Selection sees a bias per expert that balances load; weights do not: they are the plain sigmoid
scores of the chosen experts, normalised and scaled.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.config import KimiConfig
from ddtree_jax.model.layers import MLP, matmul
from ddtree_jax.pallas.expert_router import choose
from ddtree_jax.pallas.expert_weights import (
    GROUP,
    Int4,
    Records,
    Weight,
    records_shape,
    stack_shape,
)
from ddtree_jax.parallel import ALONE, Plan


class Router(nnx.Module):
    """Scores in float32 or wider: `weight` [experts, hidden], bias added for selection only."""

    def __init__(self, config: KimiConfig, *, rngs: nnx.Rngs, dtype):
        shape = (config.n_routed_experts, config.hidden_size)
        values = jax.random.normal(rngs.params(), shape, jnp.float32) * shape[1] ** -0.5
        self.weight = nnx.Param(values.astype(dtype))
        self.e_score_correction_bias = nnx.Param(jnp.zeros(shape[0], jnp.float32))
        self.config = config

    def __call__(
        self, x: Float[Array, "m hidden"], valid: Bool[Array, " m"]
    ) -> tuple[Int[Array, "m k"], Float[Array, "m k"]]:
        """Expert ids and weights of every row; rows that are not valid go to no expert (id E)."""
        c = self.config
        how = c.num_experts_per_tok, c.norm_topk_prob, c.routed_scaling_factor
        logits = self.logits(x, self.weight[...])
        return choose(logits, self.e_score_correction_bias[...], valid, *how)

    def logits(self, x, weight) -> Float[Array, "m e"]:
        """Products of bf16 are exact in float32: a GPU need not widen the operands first."""
        wide = jnp.promote_types(x.dtype, jnp.float32)

        def widened(x, weight):
            return matmul(x.astype(wide), weight.astype(wide))

        if not x.dtype == weight.dtype == jnp.bfloat16:
            return widened(x, weight)
        return lax.platform_dependent(
            x, weight, default=widened,
            cuda=lambda x, w: jnp.einsum("mi,ei->me", x, w, preferred_element_type=wide),
        )  # fmt: skip


class Experts(nnx.Module):
    """All routed experts of all MoE layers, stacked: no step ever slices a layer out.

    Each of gate, up [layers, experts, width, hidden] and down [.., hidden, width] is dense, or INT4
    as a pair of `words` and `scales`, or INT4 in `records`, gate and up in one array.
    """

    def __init__(self, config: KimiConfig, *, rngs: nnx.Rngs, dtype, gain: float = 1.0):
        width, hidden = config.moe_intermediate_size, config.hidden_size
        self.quantized, self.records = config.expert_bits == 4, config.expert_records
        if self.records:
            for part, out, inner in (("gate", width, hidden), ("down", hidden, width)):
                name = "down_records" if part == "down" else "gate_up_records"
                shape = (config.num_moe_layers, config.n_routed_experts)
                records = jnp.zeros((*shape, *records_shape(part, out, inner)), jnp.int32)
                setattr(self, name, nnx.Param(records))
            return
        for name, out, inner, g in (
            ("gate", width, hidden, 1.0), ("up", width, hidden, 1.0), ("down", hidden, width, gain)
        ):  # fmt: skip
            stack = (config.num_moe_layers, config.n_routed_experts, out)
            if self.quantized:
                words = jnp.zeros((*stack, inner // 8), jnp.int32)
                setattr(self, f"{name}_words", nnx.Param(words))
                scales = jnp.zeros((*stack, inner // GROUP), jnp.bfloat16)
                setattr(self, f"{name}_scales", nnx.Param(scales))
            else:
                values = jax.random.normal(rngs.params(), (*stack, inner)) * g * inner**-0.5
                setattr(self, name, nnx.Param(values.astype(dtype)))

    def weights(self) -> tuple[Weight, Weight, Weight]:
        """gate, up and down as the grouped matmul takes them."""
        if self.records:
            both, down = self.gate_up_records[...], self.down_records[...]
            return Records(both, "gate"), Records(both, "up"), Records(down, "down")
        if not self.quantized:
            return self.gate[...], self.up[...], self.down[...]
        return tuple(
            Int4(getattr(self, f"{n}_words")[...], getattr(self, f"{n}_scales")[...])
            for n in ("gate", "up", "down")
        )


class MoE(nnx.Module):
    """What one MoE layer owns besides its slice of `Experts`: router and shared expert."""

    def __init__(self, config: KimiConfig, index: int, *, rngs: nnx.Rngs, dtype, gain: float):
        self.gate = Router(config, rngs=rngs, dtype=dtype)
        width = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = (
            MLP(config.hidden_size, width, rngs=rngs, dtype=dtype, gain=gain) if width else None
        )
        self.index = index

    def __call__(
        self,
        x: Float[Array, "m hidden"],
        valid: Bool[Array, " all"],
        experts: Experts,
        expert_mlp,
        plan: Plan = ALONE,
    ) -> tuple[Float[Array, "m hidden"], Int[Array, "m k"]]:
        """The layer's output and the experts every row went to; `valid` is of the plan's
        `all_rows`."""
        rows, total = plan.all_rows(x), self.gate.config.n_routed_experts
        ids, weights = self.gate(rows, valid)
        held, goes, first = experts.weights(), ids, ()
        if plan.splits("experts"):
            count = stack_shape(held[0])[1]
            first = (plan.first_expert(count),)
            # Padded to divide, there may be an expert with the id of unused rows, `total`.
            goes = jnp.where(ids < total, ids, count * plan.size)
        routed = expert_mlp(rows, *held, self.index, goes, weights, *first)
        shared = None if self.shared_experts is None else self.shared_experts(x)
        return plan.sum_experts(routed, shared), plan.own_rows(ids)
