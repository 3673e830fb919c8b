"""Published configs are read whole; what they do not hold is refused, or compared with the rest."""

from copy import deepcopy

import pytest
from checkpoint import SMALL_DRAFTER, SMALL_TARGET
from published import (
    DEEPSEEK_V3,
    DRAFTER,
    DRAFTERS,
    FP8,
    INT4,
    INT4_TEXT,
    K25,
    PUBLISHED,
    TEXT,
    YARN,
)
from refusal import refused

from ddtree_jax.config import Yarn
from ddtree_jax.read_config import read_drafter_config, read_target_config
from ddtree_jax.write_config import published_config, published_drafter_config


@pytest.mark.parametrize("name", PUBLISHED)
def test_targets(name):
    published = PUBLISHED[name]
    text = published.get("text_config", published)
    found = read_target_config(published)
    yarn = text.get("rope_scaling", text.get("rope_parameters"))
    assert found.num_hidden_layers == text["num_hidden_layers"]
    assert found.rope_theta == 50000.0
    assert found.expert_bits == (4 if "quantization_config" in text else None)
    assert found.eos_token_ids == (text["eos_token_id"],)
    wanted = yarn and Yarn(yarn["factor"], 4096, yarn["beta_fast"], mscale_all_dim=1.0)
    assert found.yarn == wanted


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters(name):
    found = read_drafter_config(DRAFTERS[name])
    assert (found.block_size, found.mask_token_id) == (8, 163838)
    assert found.target_layer_ids == (1, 12, 24, 35, 47, 58)
    assert list(found.layer_types) == DRAFTERS[name]["layer_types"]
    assert (found.yarn is None) == (name == "a tied target, no scaling")


def test_deepseek_v3_is_refused_for_what_differs():
    published = dict(DEEPSEEK_V3)
    for name, value, said in (
        ("n_group", 1, "n_group=8"),
        ("num_nextn_predict_layers", 0, "num_nextn_predict_layers=1"),
        ("topk_group", 1, "topk_group=4"),
        ("quantization_config", None, "quant_method='fp8'"),
    ):
        refused(said, read_target_config, published)
        published[name] = value
    assert read_target_config(published).routed_scaling_factor == 2.5


UNKNOWN = {
    "swiglu_limit": 7.0, "attention_chunk_size": 8192, "alibi": True, "parallel_residual": True,
    "logits_cap": 30.0, "final_logit_cap": 30.0, "mla_use_nope": True, "use_rope": False,
    "linear_attn_config": {"kda_layers": [1]}, "nope_interval": 4, "attn_temperature_tuning": True,
    "gating": "elementwise", "mup_width": 256, "moe_renormalize": True, "qk_layernorm": True,
    "index_topk": 2048, "partial_rotary_factor": 0.5, "yarn": {"factor": 4}, "expert_bits": 4,
    "eos_token_ids": [1], "layer_scale": 0, "text": "x" * 9999,
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_fields(name):
    """Whatever they are called, in every place; null is as good as absent."""
    said = f"unknown config field {name}="
    for published in (TEXT, K25):
        refused(said, read_target_config, published | {name: UNKNOWN[name]})
        assert read_target_config(published | {name: None}) == read_target_config(published)
    inner = K25 | {"text_config": INT4_TEXT | {name: UNKNOWN[name]}}
    refused(said, read_target_config, inner)
    refused(said, read_drafter_config, DRAFTER | {name: UNKNOWN[name]})
    inner = DRAFTER["dflash_config"]
    said = f"unknown config field dflash_config.{name}="
    wrong = {"dflash_config": inner | {name: UNKNOWN[name]}}
    refused(said, read_drafter_config, DRAFTER | wrong)
    assert read_drafter_config(DRAFTER | {"dflash_config": inner | {name: None}})


SMALL = SMALL_TARGET
TARGET_CONFLICTS = [
    ({"num_key_value_heads": 1}, "num_key_value_heads=1 is not supported: must be 2"),
    ({"qk_head_dim": 24}, "qk_head_dim=24 is not supported: must be 16"),
    ({"head_dim": 12}, "head_dim=12 is not supported: must be 8 or 16"),
    ({"num_local_experts": 4}, "num_local_experts=4 is not supported: must be 6"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types=['full_attention', 'full_att"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types=['sliding_attention', "),
    ({"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types=['sparse', 'sparse', 'sparse']"),
    ({"pruned_heads": {"0": [1]}}, "pruned_heads={'0': [1]} is not supported: must be {}"),
    ({"model_type": "deepseek_v2"}, "model_type='deepseek_v2'"),
    ({"model_type": ["kimi_k2"]}, "model_type=['kimi_k2']"),
    ({"is_causal": False}, "is_causal=False is not supported: must be True"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported: must be 0.0"),
    ({"pretraining_tp": 2}, "pretraining_tp=2 is not supported: must be 1"),
    ({"n_group": True}, "n_group=True is not supported: must be 1"),
    ({"attention_bias": 0}, "attention_bias=0 is not supported: must be False"),
    ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    ({"sliding_window": 4096}, "sliding_window=4096 is not supported: must be null"),
    ({"rope_interleave": False}, "rope_interleave=False is not supported: must be True"),
    (
        {"rope_parameters": {"rope_type": "default"}},
        "but rope_parameters=None: they must agree",
    ),
    ({"rope_parameters": YARN}, "they must agree"),
    (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        "rope_theta=50000.0 but rope_parameters.rope_theta=10000.0: they must agree",
    ),
    (
        {"rope_scaling": YARN | {"rope_theta": 1e6}},
        "rope_theta=50000.0 but rope_scaling.rope_theta=1000000.0: they must agree",
    ),
    (
        {"rope_scaling": YARN | {"rope_type": "default"}},
        "rope_scaling.type='yarn' but rope_scaling.rope_type='default'",
    ),
    (
        {"rope_scaling": {"type": "default", "factor": 4.0}},
        "unknown config field rope_scaling.factor=4.0",
    ),
]


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("case", range(len(TARGET_CONFLICTS)))
def test_fields_at_odds(case, wrapped):
    change, said = TARGET_CONFLICTS[case]
    published = deepcopy(published_config(SMALL, wrapped=wrapped))
    (published["text_config"] if wrapped else published).update(change)
    refused(said, read_target_config, published)


def test_fields_that_say_it_again():
    again = {
        "num_key_value_heads": 2, "qk_head_dim": 16, "head_dim": 16, "num_local_experts": 6,
        "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"],
        "pruned_heads": {}, "is_causal": True, "n_group": None, "sliding_window": None,
    }  # fmt: skip
    plain = published_config(SMALL, wrapped=False)
    again["rope_parameters"] = plain["rope_scaling"] | {"rope_theta": SMALL.rope_theta}
    assert read_target_config(plain | again) == SMALL


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 32}, "hidden_size=32 but text_config.hidden_size=64: they must agree"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1 but text_config.norm_topk_prob=True"),
        ({"rope_scaling": YARN}, "rope_scaling={'type': 'yarn'"),
        ({"quantization_config": FP8}, "quantization_config={'activation_scheme': 'dynamic'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"model_type": "kimi_k3"}, "model_type='kimi_k3' is not supported: must be 'kimi_k25'"),
    ],
)
def test_the_top_level_must_agree_with_the_text(change, said):
    published = published_config(SMALL)
    same = {"hidden_size": 64, "rope_theta": SMALL.rope_theta}
    assert read_target_config(published | same) == SMALL
    refused(said, read_target_config, published | change)


QUANTIZATION = [
    ("", {"kv_cache_scheme": {"num_bits": 8}}, "quantization_config.kv_cache_scheme={'num_bits'"),
    ("", {"sparsity_config": {"format": "dense"}}, "quantization_config.sparsity_config="),
    ("", {"rotation": "hadamard"}, "unknown config field quantization_config.rotation="),
    ("group_0", {"targets": ["Embedding"]}, "quantization_config.targets=['Embedding']"),
    ("group_0", {"weights": {}}, "config field quantization_config.weights.num_bits is missing"),
    ("weights", {"zp_dtype": "int8"}, "unknown config field quantization_config.weights.zp_dtype"),
    ("weights", {"actorder": "group"}, "actorder='group' is not supported: must be null"),
]


@pytest.mark.parametrize("case", range(len(QUANTIZATION)))
def test_quantization(case):
    where, change, said = QUANTIZATION[case]
    published = deepcopy(TEXT | {"quantization_config": INT4})
    places = {"": published["quantization_config"]}
    places["group_0"] = places[""]["config_groups"]["group_0"]
    places["weights"] = places["group_0"]["weights"]
    places[where].update(change)
    refused(said, read_target_config, published)


DRAFTER_CONFLICTS = [
    ({"is_causal": 1}, "is_causal=1 but dflash_config.is_causal=False: they must agree"),
    ({"is_causal": True}, "is_causal=True but dflash_config.is_causal=False: they must agree"),
    ({"dflash.is_causal": "no"}, "dflash_config.is_causal='no': must be true or false"),
    ({"dflash.is_causal": 0}, "dflash_config.is_causal=0: must be true or false"),
    ({"dflash.block_size": 5}, "block_size=6 but dflash_config.block_size=5: they must agree"),
    ({"mask_token_id": 7}, "mask_token_id=7 but dflash_config.mask_token_id="),
    ({"target_layer_ids": [0]}, "target_layer_ids=[0] but dflash_config."),
    ({"dflash.fusion": "sum"}, "unknown config field dflash_config.fusion='sum'"),
    ({"dflash.temperature": 0.5}, "unknown config field dflash_config.temperature=0.5"),
    ({"dflash.logit_cap": 30}, "unknown config field dflash_config.logit_cap=30"),
    ({"dflash.aux_offset": 1}, "unknown config field dflash_config.aux_offset=1"),
    ({"dflash.projector_type": "domino"}, "dflash_config.projector_type='domino'"),
    ({"dflash.attention_mode": "mla"}, "dflash_config.attention_mode='mla'"),
    ({"dflash.conv_kernel_size": 2}, "dflash_config.conv_kernel_size=2 is not supported"),
    ({"num_local_experts": 4}, "unknown config field num_local_experts=4"),
    ({"quantization_config": INT4}, "unknown config field quantization_config="),
    ({"model_type": "llama"}, "model_type='llama' is not supported: must be 'qwen3'"),
    ({"use_sliding_window": "yes"}, "use_sliding_window='yes': must be true or false"),
    ({"use_sliding_window": False}, "use_sliding_window=False but layer_types=["),
    ({"layer_types": None}, "config field layer_types is missing, though use_sliding_window"),
    ({"layer_types": [["full_attention"], []]}, "layer_types=['full_attention']: must be one"),
    ({"num_hidden_layers": 10**12, "layer_types": None, "use_sliding_window": False}, "1000000"),
]


@pytest.mark.parametrize("case", range(len(DRAFTER_CONFLICTS)))
def test_drafter_fields_at_odds(case):
    change, said = DRAFTER_CONFLICTS[case]
    published = deepcopy(published_drafter_config(SMALL_DRAFTER))
    for name, value in change.items():
        owner = published["dflash_config"] if name.startswith("dflash.") else published
        owner[name.removeprefix("dflash.")] = value
    refused(said, read_drafter_config, published)
