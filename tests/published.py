"""Complete `config.json` files as they are published.

The text tower's own fields, and the defaults that each version of transformers writes beside them.
"""

YARN = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
DEEPSEEK = "DeepseekV3ForCausalLM"
TEXT = {
    "architectures": [DEEPSEEK], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": f"modeling_deepseek.{DEEPSEEK}",
    },
    "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 262144, "model_type": "kimi_k2", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_scaling": YARN, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
LABELS = {
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
}
V4 = LABELS | {  # what transformers 4 writes for a config inside a config
    "_name_or_path": "", "add_cross_attention": False, "bad_words_ids": None,
    "begin_suppress_tokens": None, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "decoder_start_token_id": None, "diversity_penalty": 0.0,
    "do_sample": False, "dtype": "bfloat16", "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None,
    "finetuning_task": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "is_decoder": False, "is_encoder_decoder": False, "length_penalty": 1.0, "max_length": 20,
    "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
    "num_return_sequences": 1, "output_attentions": False, "output_hidden_states": False,
    "output_scores": False, "pad_token_id": 163839, "prefix": None, "problem_type": None,
    "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1.0,
    "return_dict": True, "return_dict_in_generate": False, "sep_token_id": None,
    "suppress_tokens": None, "task_specific_params": None, "temperature": 1.0,
    "tf_legacy_loss": False, "tie_encoder_decoder": False, "tokenizer_class": None, "top_k": 50,
    "top_p": 1.0, "torchscript": False, "transformers_version": "4.56.2", "typical_p": 1.0,
    "use_bfloat16": False,
}  # fmt: skip
V5 = LABELS | {
    "_name_or_path": "", "chunk_size_feed_forward": 0, "dtype": "bfloat16",
    "is_encoder_decoder": False, "output_attentions": False, "output_hidden_states": False,
    "pad_token_id": None, "problem_type": None, "return_dict": True,
    "transformers_version": "5.17.0",
}  # fmt: skip
INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
                "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": None, "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
WRAPPER = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163585, "ignore_index": -100,
    "media_placeholder_token_id": 163605, "model_type": "kimi_k25", "pad_token_id": 163839,
    "tie_word_embeddings": False, "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {"_attn_implementation": "flash_attention_2", "vt_hidden_size": 1152},
}  # fmt: skip
INT4_TEXT = TEXT | V4 | {"quantization_config": INT4}
SPELLED_ANEW = {k: v for k, v in TEXT.items() if k != "rope_scaling"} | {
    "model_type": "deepseek_v3",
    "rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 50000.0},
}
K25 = WRAPPER | {"text_config": INT4_TEXT}
END = {"eos_token_id": 163586}
PUBLISHED = {
    "Kimi-K2-Instruct, its FP8 apart": TEXT
    | {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
    | {"rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0}}
    | {"transformers_version": "4.48.3"},
    "Kimi-K2-Thinking": INT4_TEXT | {"rope_scaling": YARN | {"beta_fast": 1.0}} | END,
    "Kimi-K2.5": K25,
    "Kimi-K2.5, read and written by transformers 5": WRAPPER
    | {"quantization_config": INT4, "transformers_version": "5.7.0"}
    | {"text_config": SPELLED_ANEW | V5 | {"quantization_config": INT4}},
    "Kimi-K2.6": WRAPPER | END | {"text_config": INT4_TEXT | END},
    "all defaults of transformers 5": SPELLED_ANEW
    | V5
    | {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True},
    "Moonlight-16B-A3B": TEXT
    | END
    | {"hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192}
    | {"model_type": "deepseek_v3", "moe_intermediate_size": 1408, "n_routed_experts": 64}
    | {"n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6}
    | {"num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None}
    | {"rope_scaling": None, "routed_scaling_factor": 2.446, "torch_dtype": "bfloat16"},
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
DEEPSEEK_V3 = TEXT | {
    "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 3, "n_group": 8,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "n_routed_experts": 256,
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "quantization_config": FP8, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": YARN | {"factor": 40, "beta_fast": 32, "beta_slow": 1},
    "routed_scaling_factor": 2.5, "topk_group": 4, "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "vocab_size": 129280,
}  # fmt: skip
DRAFTER = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 8, "bos_token_id": 163584,
    "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    "dtype": "bfloat16", "eos_token_id": 163585, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "layer_types": ["full_attention"] * 6, "max_position_embeddings": 262144,
    "max_window_layers": 6, "model_type": "qwen3", "num_attention_heads": 64,
    "num_hidden_layers": 6, "num_key_value_heads": 8, "num_target_layers": 61,
    "rms_norm_eps": 1e-05, "rope_scaling": YARN, "rope_theta": 50000.0, "sliding_window": None,
    "tie_word_embeddings": False, "transformers_version": "4.57.3", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 163840,
}  # fmt: skip
WINDOWS = {
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
}
DRAFTERS = {
    "Kimi-K2.5-DFlash": DRAFTER,
    "Kimi-K2.6-DFlash": DRAFTER | WINDOWS | {"rope_scaling": YARN | {"type": "deepseek_yarn"}},
    "the block size inside": {k: v for k, v in DRAFTER.items() if k != "block_size"}
    | {"dflash_config": DRAFTER["dflash_config"] | {"block_size": 8, "projector_type": "dflash"}},
    "all defaults of transformers 5": {k: v for k, v in DRAFTER.items() if k[:5] != "rope_"}
    | V5
    | {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 50000.0}},
    "a tied target, no scaling": DRAFTER | {"tie_word_embeddings": True, "rope_scaling": None},
}
