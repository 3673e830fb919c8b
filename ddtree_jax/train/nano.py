"""Sizes of the bundled model kimi-nano and of its drafter, and tiny stand-ins for tests."""

from dataclasses import dataclass, replace

from ddtree_jax.config import DFlashConfig, KimiConfig, Yarn

RANKS = 2048  # byte-pair ranks; the 256 ids above are special tokens
EOS = RANKS + 1
MASK = RANKS + 254

YARN = Yarn(
    factor=2.0, original_max_position_embeddings=2048, attention_factor=1.0, mscale_all_dim=1.0
)

TARGET = KimiConfig(
    vocab_size=RANKS + 256,
    hidden_size=256,
    num_hidden_layers=5,
    num_attention_heads=8,
    q_lora_rank=128,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    intermediate_size=768,
    moe_intermediate_size=256,
    n_routed_experts=24,
    num_experts_per_tok=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    # Four experts at a quarter each sum to half the size of one: 2 makes them like the shared.
    routed_scaling_factor=2.0,
    norm_topk_prob=True,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    max_position_embeddings=4096,
    yarn=YARN,
    expert_bits=4,
    eos_token_ids=(EOS,),
)

DRAFTER = DFlashConfig(
    hidden_size=256,
    intermediate_size=928,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    vocab_size=RANKS + 256,
    num_target_layers=5,
    target_layer_ids=(0, 1, 2, 3, 4),
    mask_token_id=MASK,
    block_size=8,
    layer_types=("sliding_attention",) * 3 + ("full_attention",),
    sliding_window=512,
    yarn=YARN,
)


@dataclass(frozen=True)
class Scale:
    """A target (as exported, INT4) and the drafter that fits it."""

    target: KimiConfig
    drafter: DFlashConfig

    @property
    def trained(self) -> KimiConfig:
        """The target as trained: its experts dense."""
        return replace(self.target, expert_bits=None)


NANO = Scale(TARGET, DRAFTER)

TINY = Scale(
    replace(
        TARGET,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
    ),
    replace(
        DRAFTER,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_target_layers=3,
        target_layer_ids=(0, 2),
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=24,
    ),
)


def main() -> None:
    """Print parameters and bytes of both models as published."""
    import jax
    import jax.numpy as jnp

    from ddtree_jax.model.dflash import dflash_graph
    from ddtree_jax.model.kimi import kimi_graph

    total = 0
    for name, (_, state) in (
        ("target", kimi_graph(TARGET, jnp.bfloat16)),
        ("drafter", dflash_graph(DRAFTER, jnp.bfloat16)),
    ):
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        total += size
        print(f"{name}: {size / 1e6:.2f} MB")
    dense = sum(leaf.size for leaf in jax.tree.leaves(kimi_graph(NANO.trained, jnp.float32)[1]))
    print(f"target parameters: {dense / 1e6:.2f} M; both: {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
