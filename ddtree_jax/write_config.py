"""`config.json` as the public checkpoints have it, built from our configs.

`read_target_config(published_config(c)) == c`, and likewise for the drafter.
"""

from typing import Any

from ddtree_jax.config import DFlashConfig, KimiConfig, Yarn
from ddtree_jax.pallas.expert_weights import GROUP
from ddtree_jax.read_rope import read_yarn
from ddtree_jax.tokenizer import SPECIAL_TOKENS

_PLACEHOLDER = "<|kimi_k25_video_placeholder|>"

_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
                "actorder": None,
                "observer": "minmax",
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [
        "re:.*lm_head.*",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:vision_tower.*",
        "re:mm_projector.*",
    ],
}


def published_config(config: KimiConfig, *, wrapped: bool = True) -> dict[str, Any]:
    """A target's `config.json`: K2.6's wrapper around `text_config`, or the plain text form.

    The ids of [BOS], [PAD] and the media placeholder are where Kimi's tokenizer puts them: special
    tokens are the last 256 of the vocabulary.
    """
    c, base = config, config.vocab_size - SPECIAL_TOKENS
    eos = list(c.eos_token_ids)
    tokens = {
        "bos_token_id": base if base >= 0 else None,
        "eos_token_id": (eos[0] if len(eos) == 1 else eos) if eos else None,
        "pad_token_id": c.vocab_size - 1,
    }
    copied = (
        "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
        "num_hidden_layers", "num_attention_heads", "n_routed_experts", "num_experts_per_tok",
        "n_shared_experts", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace",
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "rms_norm_eps", "rope_theta", "max_position_embeddings",
    )  # fmt: skip
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **{name: getattr(c, name) for name in copied},
        "num_key_value_heads": c.num_attention_heads,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
        "pretraining_tp": 1,
        "initializer_range": 0.02,
        "use_cache": True,
        "rope_scaling": _rope_scaling(c.yarn, explicit=False),
        **tokens,
        "dtype": "bfloat16",
    }
    if c.latent_norm_eps != KimiConfig.latent_norm_eps:
        text["latent_norm_eps"] = c.latent_norm_eps  # not published anywhere: our own field
    if c.expert_bits == 4:
        text["quantization_config"] = _INT4
    if not wrapped:
        return text
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        **tokens,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": base + 21 if base >= 0 else None,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": _PLACEHOLDER,
        "text_config": text,
    }


def published_drafter_config(
    config: DFlashConfig, *, max_position_embeddings: int = 262144
) -> dict[str, Any]:
    """A DFlash drafter's `config.json`, with every disputed flag explicit."""
    c = config
    copied = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "sliding_window",
        "vocab_size", "num_target_layers", "block_size",
    )  # fmt: skip
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **{name: getattr(c, name) for name in copied},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": list(c.layer_types),
        "use_sliding_window": "sliding_attention" in c.layer_types,
        "max_position_embeddings": max_position_embeddings,
        "rope_scaling": _rope_scaling(c.yarn, explicit=True),
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "dflash_config": {
            "mask_token_id": c.mask_token_id,
            "target_layer_ids": list(c.target_layer_ids),
            "is_causal": c.causal_sliding,
        },
    }


def _rope_scaling(yarn: Yarn | None, explicit: bool) -> dict[str, Any] | None:
    """The published form of YaRN; `attention_factor` stands there if asked for, or if it must."""
    if yarn is None:
        return None
    fields: dict[str, Any] = {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    if yarn.mscale_all_dim:
        fields |= {"mscale": yarn.mscale_all_dim, "mscale_all_dim": yarn.mscale_all_dim}
    if explicit or read_yarn(fields) != yarn:
        fields["attention_factor"] = yarn.attention_factor
    return fields
