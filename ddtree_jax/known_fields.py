"""Which fields of a published `config.json` are known, and what is made of each.

A field is read, or harmless (it says nothing about the arithmetic of decoding text), or fixed:
honoured at few values, mostly one. Any other is refused by name. Null is as good as absent: by it
the libraries that write these files mean an option that was not set.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ddtree_jax.checks import is_number, show
from ddtree_jax.config import DFlashConfig, KimiConfig


class Known(NamedTuple):
    """The fields one object may hold."""

    read: frozenset[str]
    harmless: frozenset[str]
    fixed: Mapping[str, tuple]  # a field and the values at which it is honoured


def check_fields(fields: Mapping[str, Any], known: Known, prefix: str = "") -> None:
    """Raise ValueError naming the first field that is unknown, or fixed at another value."""
    for name, value in fields.items():
        if value is None or name in known.read or name in known.harmless:
            continue
        if name not in known.fixed:
            raise ValueError(
                f"unknown config field {prefix}{name}={show(value)}: it may change the "
                "arithmetic; if it does not, remove it or set it to null"
            )
        if not any(same(value, one) for one in known.fixed[name]):
            wanted = " or ".join(map(show, known.fixed[name])) or "null"
            raise ValueError(f"{prefix}{name}={show(value)} is not supported: must be {wanted}")


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, but no number is true or false."""
    return a == b and (type(a) is type(b) or (is_number(a) and is_number(b)))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Written by transformers into every config, whatever the model; training; other modalities. Of
# settings of generation the caller's `Sampling` is the only source.
_HARMLESS = _words("""
    _name_or_path name_or_path _commit_hash _attn_implementation _attn_implementation_autoset
    _attn_implementation_internal _experts_implementation architectures auto_map dtype torch_dtype
    transformers_version tokenizer_class prefix finetuning_task task_specific_params problem_type
    id2label label2id num_labels torchscript tf_legacy_loss use_bfloat16 is_decoder
    tie_encoder_decoder cross_attention_hidden_size chunk_size_feed_forward
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    bos_token_id pad_token_id sep_token_id decoder_start_token_id

    use_cache do_sample early_stopping num_beams num_beam_groups num_return_sequences
    max_length min_length temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff
    repetition_penalty encoder_repetition_penalty length_penalty diversity_penalty
    exponential_decay_length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id
    remove_invalid_values assistant_confidence_threshold assistant_lookbehind target_lookbehind
    num_assistant_tokens num_assistant_tokens_schedule

    initializer_range
""")
_TRAINING = _words("aux_loss_alpha seq_aux router_aux_loss_coef output_router_logits ep_size")
_MULTIMODAL = _words("""
    vision_config ignore_index media_placeholder_token_id use_unified_vision_chunk
    video_placeholder image_token_id video_token_id vision_start_token_id vision_end_token_id
    projection_hidden_size projection_layer_norm_eps
""")
_ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
_FIXED = {
    "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
    "attention_dropout": (0.0,), "pretraining_tp": (1,), "pruned_heads": ({},),
    "is_encoder_decoder": (False,), "add_cross_attention": (False,),
}  # fmt: skip

# Fields that other fields imply: `read_config` compares them.
TARGET_IMPLIED = _words(
    "num_key_value_heads head_dim qk_head_dim num_local_experts layer_types mlp_layer_types"
)
TARGET = Known(
    read=frozenset(KimiConfig.__dataclass_fields__)
    - {"yarn", "expert_bits", "expert_records", "eos_token_ids"}
    | TARGET_IMPLIED
    | _ROPE
    | {"eos_token_id", "quantization_config"},
    harmless=_HARMLESS | _TRAINING | _MULTIMODAL | {"max_window_layers"},
    fixed=_FIXED
    | {
        "model_type": ("kimi_k2", "deepseek_v3"), "tie_word_embeddings": (False,),
        "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "n_group": (1,),
        "topk_group": (1,), "moe_layer_freq": (1,), "rope_interleave": (True,),
        "num_nextn_predict_layers": (0,), "is_causal": (True,),
        "use_sliding_window": (False,), "sliding_window": (),
    },
)  # fmt: skip
# The top level beside `text_config`; fields of the text may stand there too, if both agree.
WRAPPER = Known(
    read=TARGET.read | {"text_config"},
    harmless=TARGET.harmless,
    fixed=TARGET.fixed | {"model_type": ("kimi_k25",)},
)
QUANTIZATION = Known(
    read=_words("quant_method format config_groups"),
    harmless=_words("ignore version global_compression_ratio"),
    fixed={
        "quantization_status": ("compressed",), "kv_cache_scheme": (),
        "sparsity_config": ({},), "transform_config": ({},),
    },
)  # fmt: skip
QUANTIZATION_GROUP = Known(
    read=frozenset({"weights"}),
    harmless=frozenset(),
    fixed={
        "targets": (["Linear"],), "format": ("pack-quantized",),
        "input_activations": (), "output_activations": (),
    },
)  # fmt: skip
QUANTIZATION_WEIGHTS = Known(
    read=frozenset(),
    harmless=_words("observer observer_kwargs"),
    fixed={
        "num_bits": (4,), "type": ("int",), "symmetric": (True,), "strategy": ("group",),
        "group_size": (32,), "dynamic": (False,), "actorder": (),
    },
)  # fmt: skip

# A drafter owns neither embedding nor head, so that there is nothing to tie.
DRAFTER = Known(
    read=frozenset(DFlashConfig.__dataclass_fields__) - {"yarn", "causal_sliding"}
    | _ROPE
    | {"dflash_config", "is_causal", "use_sliding_window"},
    harmless=_HARMLESS
    | _words("eos_token_id max_position_embeddings max_window_layers tie_word_embeddings"),
    fixed=_FIXED | {"model_type": ("qwen3",)},
)
# `dflash_config`; the files have some of its fields at the top level instead.
DFLASH_READ = _words("block_size is_causal mask_token_id target_layer_ids")
DFLASH = Known(
    read=DFLASH_READ,
    harmless=_words("mask_token num_anchors loss_decay_gamma"),
    fixed={
        "input_embedding_scale": (1.0,), "output_multiplier": (1.0,),
        "final_logit_softcapping": (), "attention_sink_bias": (False,),
        "attention_value_scale": (1.0,), "attention_mode": ("gqa",),
        "causal_head": (False,), "sample_from_anchor": (False,),
        "projector_type": ("dflash",), "conv_kernel_size": (),
        "conv_group_size": (), "selector_rank": (), "selector_top_k": (),
    },
)  # fmt: skip
