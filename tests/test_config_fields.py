"""Fields of published configs: each wrong value is refused with the field and the value."""

import math

import pytest
from checkpoint import SMALL_DRAFTER, SMALL_TARGET, VOCAB
from refusal import refused

from ddtree_jax.read_config import read_drafter_config, read_target_config
from ddtree_jax.write_config import published_config, published_drafter_config


def changed(config, name, value):
    """A published config with one field set (dots descend), or removed: value `...`."""
    *parents, last = name.split(".")
    owner = config
    for parent in parents:
        owner = owner.setdefault(parent, {})
    if value is ...:
        del owner[last]
    else:
        owner[last] = value
    return config


TARGET_FIELDS = [
    ("vocab_size", 0, "vocab_size=0"),
    ("hidden_size", -64, "hidden_size=-64"),
    ("hidden_size", 48, "hidden_size=48: must be a multiple of 32"),
    ("hidden_size", "64", "hidden_size='64'"),
    ("hidden_size", 64.5, "hidden_size=64.5"),
    ("hidden_size", ..., "hidden_size is missing"),
    ("kv_lora_rank", None, "kv_lora_rank is missing"),
    ("q_lora_rank", 0, "q_lora_rank=0"),
    ("q_lora_rank", "16", "q_lora_rank='16'"),
    ("qk_rope_head_dim", 7, "qk_rope_head_dim=7"),
    ("first_k_dense_replace", 4, "first_k_dense_replace=4"),
    ("num_experts_per_tok", 7, "num_experts_per_tok=7"),
    ("num_experts_per_tok", 0, "num_experts_per_tok=0"),
    ("moe_intermediate_size", 40, "moe_intermediate_size=40"),
    ("n_shared_experts", -1, "n_shared_experts=-1"),
    ("routed_scaling_factor", math.nan, "routed_scaling_factor=nan"),
    ("norm_topk_prob", 1, "norm_topk_prob=1"),
    ("rms_norm_eps", 0.0, "rms_norm_eps=0.0"),
    ("rope_theta", -1.0, "rope_theta=-1.0"),
    ("rope_theta", 1, "rope_theta=1: must be greater than 1"),
    ("rope_theta", 10**400, "rope_theta=1000000"),
    ("rope_theta", math.inf, "rope_theta=inf: must be a finite number"),
    ("hidden_size", 2**31, "hidden_size=2147483648: must be an integer below 2**31"),
    ("num_hidden_layers", 2000, "num_hidden_layers=2000: must be at most 1024"),
    ("eos_token_id", [[1]], "eos_token_id=[1]: must be a token id or a list of them"),
    ("eos_token_id", {"a": 1}, "eos_token_id={'a': 1}: must be a token id or"),
    ("eos_token_id", [1, None], "eos_token_id=None: must be a token id"),
    ("eos_token_id", True, "eos_token_id=True: must be a token id"),
    ("eos_token_id", VOCAB, f"eos_token_id={VOCAB}"),
    ("hidden_act", "gelu", "hidden_act='gelu'"),
    ("scoring_func", "softmax", "scoring_func='softmax'"),
    ("topk_method", "greedy", "topk_method='greedy'"),
    ("n_group", 8, "n_group=8"),
    ("tie_word_embeddings", True, "tie_word_embeddings=True"),
    ("attention_bias", True, "attention_bias=True"),
    ("attn_logit_softcapping", 30.0, "attn_logit_softcapping=30.0"),
    ("embedding_multiplier", 12, "embedding_multiplier=12"),
    ("use_qk_norm", True, "use_qk_norm=True"),
    ("rope_scaling", "yarn", "rope_scaling='yarn'"),
    ("rope_scaling.type", "linear", "rope_scaling.type='linear'"),
    ("rope_scaling.factor", 0.5, "rope_scaling.factor=0.5"),
    ("rope_scaling.factor", "four", "rope_scaling.factor='four'"),
    ("rope_scaling.factor", ..., "rope_scaling.factor is missing"),
    ("rope_scaling.truncate", False, "rope_scaling.truncate=False"),
    ("rope_scaling.short_factor", [1], "rope_scaling.short_factor=[1]"),
    ("rope_scaling.original_max_position_embeddings", 0, "original_max_position_embeddings=0"),
    ("rope_scaling.original_max_position_embeddings", 256.5, "256.5: must be an integer"),
    ("rope_scaling.factor", 10**400, "rope_scaling.factor=1000000"),
    ("rope_scaling.factor", math.nan, "rope_scaling.factor=nan: must be a finite number"),
    ("rope_scaling.beta_fast", 0, "rope_scaling.beta_fast=0.0: must be at least beta_slow=1.0"),
    ("rope_scaling.beta_fast", 0.5, "rope_scaling.beta_fast=0.5: must be at least beta_slow=1.0"),
    ("rope_scaling.beta_slow", 0, "rope_scaling.beta_slow=0.0: must be positive"),
    ("rope_scaling.beta_slow", -2, "rope_scaling.beta_slow=-2.0: must be positive"),
    ("rope_scaling.beta_slow", True, "rope_scaling.beta_slow=True: must be a finite number"),
    ("rope_scaling.mscale", -1.0, "rope_scaling.mscale=-1.0: must be 0 or greater"),
    ("rope_scaling.mscale_all_dim", -1.0, "rope_scaling.mscale_all_dim=-1.0: must be 0 or"),
    ("rope_scaling.attention_factor", 0, "rope_scaling.attention_factor=0.0: must be positive"),
    ("rope_scaling.type", ["yarn"], "rope_scaling.type=['yarn']"),
    ("quantization_config.format", "int-quantized", "format='int-quantized'"),
    ("quantization_config.config_groups", {}, "0 groups"),
    ("quantization_config.config_groups", [1], "config_groups=[1]"),
    ("quantization_config.config_groups.group_0.weights.num_bits", 8, "num_bits=8"),
    ("quantization_config.config_groups.group_0.weights.group_size", 128, "group_size=128"),
    ("quantization_config.config_groups.group_0.input_activations", {"num_bits": 8}, "input_act"),
]  # fmt: skip


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(("name", "value", "said"), TARGET_FIELDS)
def test_target_fields(name, value, said, wrapped):
    published = deep(published_config(SMALL_TARGET, wrapped=wrapped))
    assert read_target_config(published) == SMALL_TARGET
    changed(published["text_config"] if wrapped else published, name, value)
    refused(said, read_target_config, published)


DRAFTER_FIELDS = [
    ("hidden_size", 0, "hidden_size=0"),
    ("hidden_size", ..., "hidden_size is missing"),
    ("num_hidden_layers", "2", "num_hidden_layers='2'"),
    ("num_key_value_heads", 3, "num_key_value_heads=3"),
    ("head_dim", 7, "head_dim=7"),
    ("block_size", 1, "block_size=1"),
    ("block_size", ..., "dflash_config.block_size is missing"),
    ("dflash_config", ..., "dflash_config.mask_token_id is missing"),
    ("dflash_config", "yes", "dflash_config='yes'"),
    ("dflash_config.mask_token_id", ..., "dflash_config.mask_token_id is missing"),
    ("dflash_config.mask_token_id", VOCAB, f"mask_token_id={VOCAB}"),
    ("dflash_config.target_layer_ids", [], "target_layer_ids=()"),
    ("dflash_config.target_layer_ids", [0, 3], "target_layer_ids=(0, 3)"),
    ("dflash_config.target_layer_ids", 2, "target_layer_ids=2"),
    ("dflash_config.attention_value_scale", 2.0, "dflash_config.attention_value_scale=2.0"),
    ("dflash_config.final_logit_softcapping", 30, "dflash_config.final_logit_softcapping=30"),
    ("dflash_config.head_mixing", 2, "dflash_config.head_mixing=2"),
    ("layer_types", ["full_attention"], "layer_types=('full_attention',)"),
    ("layer_types", ["full_attention", "chunked"], "layer_types='chunked'"),
    ("sliding_window", None, "sliding_window=None"),
    ("sliding_window", -5, "sliding_window=-5"),
    ("rope_theta", ..., "rope_theta is missing"),
    ("hidden_act", "relu", "hidden_act='relu'"),
    ("query_scale", 2.0, "query_scale=2.0"),
    ("rope_scaling.type", "dynamic", "rope_scaling.type='dynamic'"),
]


@pytest.mark.parametrize(("name", "value", "said"), DRAFTER_FIELDS)
def test_drafter_fields(name, value, said):
    published = deep(published_drafter_config(SMALL_DRAFTER))
    assert read_drafter_config(published) == SMALL_DRAFTER
    refused(said, read_drafter_config, changed(published, name, value))


def deep(config):
    """A copy that may be changed at every depth."""
    return {k: deep(v) for k, v in config.items()} if isinstance(config, dict) else config


def test_generation_defaults_are_no_reason_to_refuse():
    """Fields that say nothing about the model's arithmetic are ignored, also unknown ones."""
    boilerplate = {"top_p": 0.9, "temperature": 1.0, "use_cache": False, "torch_dtype": "float16"}
    for read, published, config in (
        (read_target_config, published_config(SMALL_TARGET), SMALL_TARGET),
        (read_drafter_config, published_drafter_config(SMALL_DRAFTER), SMALL_DRAFTER),
    ):
        assert read(published | boilerplate) == config
