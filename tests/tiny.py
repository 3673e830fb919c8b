"""A tiny random Kimi with a drafter of its shape, small enough to compile in a second or two.

Its vocabulary is small, so that drafts from random weights are accepted often by chance alone.
"""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.config import DFlashConfig, KimiConfig, Yarn
from ddtree_jax.loading import Model
from ddtree_jax.model.dflash import DFlash
from ddtree_jax.model.kimi import Kimi
from ddtree_jax.model.moe import Experts
from ddtree_jax.state import Weights

TARGET = KimiConfig(
    vocab_size=12, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, q_lora_rank=16,
    kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, intermediate_size=48,
    moe_intermediate_size=32, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1,
    first_k_dense_replace=1, routed_scaling_factor=2.0, norm_topk_prob=True, rms_norm_eps=1e-5,
    rope_theta=50000.0, max_position_embeddings=1024,
    yarn=Yarn(factor=4.0, original_max_position_embeddings=256, mscale_all_dim=1.0),
)  # fmt: skip
DRAFTER = DFlashConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, rope_theta=50000.0, vocab_size=12,
    num_target_layers=2, target_layer_ids=(0, 1), mask_token_id=11, block_size=8,
    layer_types=("sliding_attention", "full_attention"), sliding_window=20,
    yarn=Yarn(factor=4.0, original_max_position_embeddings=256),
)  # fmt: skip


@lru_cache
def tiny_model(dtype: str = "float32", seed: int = 0, **changes) -> Model:
    """Random weights with logits peaked enough that a drafter agrees now and then."""
    config = replace(TARGET, **changes)
    target = Kimi(config, rngs=nnx.Rngs(seed), dtype=jnp.dtype(dtype))
    draw_int4(target.experts, seed)
    drafter = DFlash(DRAFTER, rngs=nnx.Rngs(seed + 1), dtype=jnp.dtype(dtype))
    leaves = [tuple(jax.tree.leaves(nnx.state(m))) for m in (target, drafter)]
    return Model(Weights(*leaves, config, DRAFTER, dtype), None, "tiny")


def draw_int4(experts: Experts | None, seed: int) -> None:
    """Values for quantized experts, which begin as zeros, about as large as dense ones have."""
    if experts is None or not experts.quantized:
        return
    rng = np.random.default_rng(seed)
    for name in ("gate", "up", "down"):
        words, scales = (getattr(experts, f"{name}_{part}") for part in ("words", "scales"))
        spread = 4.6 * (8 * words.shape[-1]) ** 0.5  # of sixteen values, and of all inputs
        drawn = rng.integers(-(2**31), 2**31, words.shape), rng.uniform(0.5, 1.5, scales.shape)
        words[...] = jnp.asarray(drawn[0].astype(np.int32))
        scales[...] = jnp.asarray(drawn[1] / spread, scales.dtype)
