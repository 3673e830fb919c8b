"""Published `config.json` files to our configs.

A field that changes the arithmetic and that this code does not implement is refused by name;
generation defaults and other boilerplate are ignored.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ddtree_jax.config import (
    DFlashConfig,
    KimiConfig,
    Yarn,
    is_int,
    is_number,
    require,
    yarn_mscale,
)


def read_target_config(published: Mapping[str, Any]) -> KimiConfig:
    """Read a published config: the K2.5/K2.6 wrapper (`text_config`) or the plain text form.

    Raises ValueError for a missing field, a value this code cannot honour, and an unknown
    field whose name speaks of the arithmetic.
    """
    fields = _section(published, "text_config") or dict(published)
    quantization = _section(fields, "quantization_config") or _section(
        published, "quantization_config"
    )
    rope = _section(fields, "rope_scaling") or _section(fields, "rope_parameters")
    if "rope_theta" not in fields and "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    _check_fixed(fields, _KIMI_FIXED)
    _refuse_unknown(fields, set(_KIMI_FIXED) | set(KimiConfig.__dataclass_fields__) | _KIMI_KNOWN)
    made = {"yarn", "expert_bits", "eos_token_ids"}
    optional = {"q_lora_rank": None, "latent_norm_eps": KimiConfig.latent_norm_eps}
    names = [name for name in KimiConfig.__dataclass_fields__ if name not in made]
    _require_present(fields, [name for name in names if name not in optional])
    values = {name: fields.get(name, optional.get(name)) for name in names}
    eos = [published.get("eos_token_id"), fields.get("eos_token_id")]
    ids = [i for e in eos if e is not None for i in (e if isinstance(e, list) else [e])]
    return KimiConfig(
        **values,
        yarn=read_yarn(rope),
        expert_bits=_expert_bits(quantization),
        eos_token_ids=tuple(dict.fromkeys(ids)),
    )


def read_drafter_config(published: Mapping[str, Any]) -> DFlashConfig:
    """Read a drafter's `config.json`; raises ValueError as `read_target_config`."""
    fields, own = dict(published), _section(published, "dflash_config")
    _check_fixed(fields, _DFLASH_FIXED)
    known = set(_DFLASH_FIXED) | set(DFlashConfig.__dataclass_fields__) | _DFLASH_KNOWN
    _refuse_unknown(fields, known)
    for name, neutral in _DFLASH_NEUTRAL.items():
        if own.get(name, neutral) not in (neutral, None):
            raise ValueError(f"dflash_config.{name}={own[name]!r} is not supported")
    _refuse_unknown(own, _DFLASH_OWN | set(_DFLASH_NEUTRAL), "dflash_config.")
    rope = _section(fields, "rope_scaling") or _section(fields, "rope_parameters")
    own.setdefault("block_size", fields.get("block_size"))
    fields.setdefault("rope_theta", rope.get("rope_theta"))
    copied = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "vocab_size",
        "num_target_layers",
    )  # fmt: skip
    _require_present(fields, copied)
    _require_present(own, ("block_size", "mask_token_id", "target_layer_ids"), "dflash_config.")
    for values, name in ((own, "target_layer_ids"), (fields, "layer_types")):
        value = values.get(name)
        require(value is None or isinstance(value, list), name, value, "a list")
    layers = fields["num_hidden_layers"]
    kinds = fields.get("layer_types")
    if not kinds and is_int(layers):  # another type is refused below, by name
        kinds = ["full_attention"] * layers
    return DFlashConfig(
        **{name: fields[name] for name in copied},
        target_layer_ids=tuple(own["target_layer_ids"]),
        mask_token_id=own["mask_token_id"],
        block_size=own["block_size"],
        layer_types=tuple(kinds or ()),
        sliding_window=fields.get("sliding_window"),
        causal_sliding=bool(own.get("is_causal", fields.get("is_causal", False))),
        yarn=read_yarn(rope),
    )


def read_yarn(fields: Mapping[str, Any] | None) -> Yarn | None:
    """Read `rope_scaling` or `rope_parameters`; None where no scaling is asked for.

    `attention_factor`, where the file names none, is the ratio of the two mscale terms, or
    0.1 ln(factor) + 1 if the file gives no mscale at all (transformers' rule).
    """
    if not fields:
        return None
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return None
    known = ("yarn", "deepseek_yarn")
    require(kind in known, "rope_scaling.type", kind, "'yarn' or 'default'")
    known = {
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
        "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate",
    }  # fmt: skip
    for name in sorted(set(fields) - known):
        raise ValueError(f"rope_scaling.{name}={fields[name]!r} is not supported")
    require(fields.get("truncate", True) is True, "rope_scaling.truncate", False, "true")
    _require_present(fields, ("factor", "original_max_position_embeddings"), "rope_scaling.")
    for name in sorted(known - {"rope_type", "type", "truncate"}):
        value = fields.get(name)
        ok = value is None or is_number(value)
        require(ok, f"rope_scaling.{name}", value, "a finite number")
    factor = float(fields["factor"])
    mscale, all_dim = fields.get("mscale"), fields.get("mscale_all_dim")
    amplitude = fields.get("attention_factor")
    if amplitude is None and mscale and all_dim:
        amplitude = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    elif amplitude is None:
        amplitude = yarn_mscale(factor, 1.0)
    return Yarn(
        factor=factor,
        original_max_position_embeddings=int(fields["original_max_position_embeddings"]),
        beta_fast=float(fields.get("beta_fast") or 32),
        beta_slow=float(fields.get("beta_slow") or 1),
        attention_factor=float(amplitude),
        mscale_all_dim=float(all_dim or 0.0),
    )


def _section(published: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object under this name, empty if there is none."""
    value = published.get(name)
    require(value is None or isinstance(value, Mapping), name, value, "an object or null")
    return dict(value or {})


def _require_present(found: Mapping[str, Any], names: Iterable[str], prefix: str = "") -> None:
    for name in names:
        if found.get(name) is None:
            raise ValueError(f"config field {prefix}{name} is missing")


def _check_fixed(fields: Mapping[str, Any], fixed: Mapping[str, tuple]) -> None:
    for name, allowed in fixed.items():
        if name in fields and fields[name] not in allowed:
            shown = " or ".join(repr(a) for a in allowed)
            raise ValueError(f"{name}={fields[name]!r} is not supported: must be {shown}")


def _refuse_unknown(fields: Mapping[str, Any], known: set[str], prefix: str = "") -> None:
    for name in sorted(set(fields) - known):
        if any(word in name for word in _ARITHMETIC) and fields[name] not in (None, False):
            raise ValueError(
                f"unknown config field {prefix}{name}={fields[name]!r}: its name says that it "
                "changes the arithmetic, and it is not implemented"
            )


def _expert_bits(quantization: Mapping[str, Any] | None) -> int | None:
    """4 for the compressed-tensors INT4 scheme of Kimi, None without quantisation."""
    if not quantization:
        return None
    method, layout = quantization.get("quant_method"), quantization.get("format")
    if (method, layout) != ("compressed-tensors", "pack-quantized"):
        raise ValueError(
            f"quantization_config: quant_method={method!r}, format={layout!r} is not supported: "
            "must be 'compressed-tensors', 'pack-quantized'"
        )
    groups = _section(quantization, "config_groups")
    if len(groups) != 1:
        raise ValueError(f"quantization_config.config_groups: {len(groups)} groups, must be one")
    group = _section(groups, *groups)
    weights = _section(group, "weights")
    _check_fixed(group, {"input_activations": (None,), "output_activations": (None,)})
    wanted = {
        "num_bits": (4,), "type": ("int",), "symmetric": (True,), "strategy": ("group",),
        "group_size": (32,), "dynamic": (False,), "actorder": (None,),
    }  # fmt: skip
    _check_fixed(weights, wanted)
    return 4


_ARITHMETIC = (
    "scal", "softcap", "norm", "bias", "rope", "rotary", "window", "expert", "group", "head",
    "rank", "multiplier", "quant", "clip", "act", "eps", "router", "topk", "layer", "sink", "mix",
    "conv", "index",
)  # fmt: skip
_KIMI_FIXED = {
    "hidden_act": ("silu",), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",),
    "n_group": (1, None), "topk_group": (1, None), "moe_layer_freq": (1,),
    "attention_bias": (False,), "tie_word_embeddings": (False,), "rope_interleave": (True,),
    "num_nextn_predict_layers": (0, None), "mlp_bias": (False,),
}  # fmt: skip
_KIMI_KNOWN = {
    "rope_scaling", "rope_parameters", "quantization_config", "num_key_value_heads", "qk_head_dim",
    "head_dim", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "initializer_range",
    "attention_dropout", "architectures", "use_cache", "vision_config", "ignore_index",
    "problem_type", "num_local_experts", "mlp_layer_types", "layer_types",
    "output_router_logits", "router_aux_loss_coef", "use_unified_vision_chunk",
    "chunk_size_feed_forward", "encoder_no_repeat_ngram_size", "no_repeat_ngram_size",
    "num_beam_groups", "output_attentions", "output_scores", "exponential_decay_length_penalty",
    "diversity_penalty", "length_penalty", "repetition_penalty", "is_encoder_decoder",
    "tf_legacy_loss", "tie_encoder_decoder", "pruned_heads", "cross_attention_hidden_size",
    "max_window_layers", "use_sliding_window",
}  # fmt: skip
_DFLASH_FIXED = {
    "hidden_act": ("silu",), "attention_bias": (False,), "tie_word_embeddings": (False,),
    "mlp_bias": (False,),
}  # fmt: skip
_DFLASH_KNOWN = _KIMI_KNOWN | {"dflash_config", "max_position_embeddings", "is_causal"}
_DFLASH_OWN = {"mask_token_id", "mask_token", "target_layer_ids", "block_size", "is_causal"}
_DFLASH_NEUTRAL = {
    "input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None,
    "attention_sink_bias": False, "attention_value_scale": 1.0, "causal_head": False,
    "projector_type": None, "conv_kernel_size": None, "conv_group_size": None,
    "selector_rank": None, "selector_top_k": None,
}  # fmt: skip
