"""Published `config.json` files to our configs: refused by name, where one cannot be honoured.

`known_fields` says which fields may stand there at all; here their values are put together.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ddtree_jax.checks import is_int, require, show
from ddtree_jax.config import MOST_LAYERS, DFlashConfig, KimiConfig
from ddtree_jax.known_fields import (
    DFLASH,
    DFLASH_READ,
    DRAFTER,
    QUANTIZATION,
    QUANTIZATION_GROUP,
    QUANTIZATION_WEIGHTS,
    TARGET,
    TARGET_IMPLIED,
    WRAPPER,
    Known,
    check_fields,
    same,
)
from ddtree_jax.read_rope import read_rope, section


def read_target_config(published: Mapping[str, Any]) -> KimiConfig:
    """Read a published config: the K2.5/K2.6 wrapper (`text_config`) or the plain text form.

    A field of the text may stand beside `text_config` as well, or instead, as its
    `quantization_config` often does. Raises ValueError for a field that is missing, unknown, of a
    value this code cannot honour, or at odds with another.
    """
    require(isinstance(published, Mapping), "config", published, "an object")
    fields = dict(published)
    if published.get("text_config") is not None:
        text = section(published, "text_config")
        check_fields(published, WRAPPER)
        fields = _merged(text, published, TARGET.read - {"eos_token_id"}, "text_config.")
    check_fields(fields, TARGET)
    fields["rope_theta"], yarn = read_rope(fields)
    made = {"yarn", "expert_bits", "expert_records", "eos_token_ids"}
    optional = {"q_lora_rank": None, "latent_norm_eps": KimiConfig.latent_norm_eps}
    names = [name for name in KimiConfig.__dataclass_fields__ if name not in made]
    _require_present(fields, [name for name in names if name not in optional])
    given = {name: fields[name] for name in names if fields.get(name) is not None}
    config = KimiConfig(
        **optional | given,
        yarn=yarn,
        expert_bits=_expert_bits(section(fields, "quantization_config")),
        eos_token_ids=_eos_token_ids(published, fields),
    )
    _check_implied(fields, config)
    return config


def read_drafter_config(published: Mapping[str, Any]) -> DFlashConfig:
    """Read a drafter's `config.json`; raises ValueError as `read_target_config`."""
    require(isinstance(published, Mapping), "config", published, "an object")
    check_fields(published, DRAFTER)
    own = section(published, "dflash_config")
    check_fields(own, DFLASH, "dflash_config.")
    own = _merged(own, published, DFLASH_READ, "dflash_config.")
    fields = dict(published)
    fields["rope_theta"], yarn = read_rope(published)
    copied = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "vocab_size",
        "num_target_layers",
    )  # fmt: skip
    _require_present(fields, copied)
    _require_present(own, ("block_size", "mask_token_id", "target_layer_ids"), "dflash_config.")
    taps, causal = own["target_layer_ids"], own.get("is_causal")
    require(isinstance(taps, list), "dflash_config.target_layer_ids", taps, "a list")
    ok = causal is None or isinstance(causal, bool)
    require(ok, "dflash_config.is_causal", causal, "true or false")
    return DFlashConfig(
        **{name: fields[name] for name in copied},
        target_layer_ids=tuple(taps),
        mask_token_id=own["mask_token_id"],
        block_size=own["block_size"],
        layer_types=_drafter_layers(fields),
        sliding_window=fields.get("sliding_window"),
        causal_sliding=bool(causal),
        yarn=yarn,
    )


def _drafter_layers(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """`layer_types`; where the file lists none, all are full unless windows are asked for."""
    kinds, windows = fields.get("layer_types"), fields.get("use_sliding_window")
    ok = windows is None or isinstance(windows, bool)
    require(ok, "use_sliding_window", windows, "true or false")
    require(kinds is None or isinstance(kinds, list), "layer_types", kinds, "a list")
    if kinds is None and windows:
        raise ValueError("config field layer_types is missing, though use_sliding_window=True")
    if kinds and "sliding_attention" in kinds and windows is False:
        raise ValueError(f"use_sliding_window=False but layer_types={show(kinds)}")
    layers = fields["num_hidden_layers"]
    if kinds is None and is_int(layers) and layers <= MOST_LAYERS:  # else refused, by name
        kinds = ["full_attention"] * layers
    return tuple(kinds or ())


def _merged(
    inner: Mapping[str, Any], outer: Mapping[str, Any], names: Iterable[str], prefix: str
) -> dict[str, Any]:
    """`inner` with what `outer` has under these names; ValueError where the two disagree."""
    found = dict(inner)
    for name in sorted(names):
        value = outer.get(name)
        if value is not None and not same(found.setdefault(name, value), value):
            raise ValueError(
                f"{name}={show(value)} but {prefix}{name}={show(found[name])}: they must agree"
            )
    return found


def _check_implied(fields: Mapping[str, Any], config: KimiConfig) -> None:
    """Fields that say again what others have said must say the same."""
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    dense, moe = config.first_k_dense_replace, config.num_moe_layers
    implied = {
        "num_key_value_heads": (config.num_attention_heads,),  # latent attention groups no heads
        "qk_head_dim": (query,),
        "head_dim": (config.qk_rope_head_dim, query),  # transformers: of what is turned
        "num_local_experts": (config.n_routed_experts,),
        "layer_types": (["full_attention"] * config.num_hidden_layers,),
        "mlp_layer_types": (["dense"] * dense + ["sparse"] * moe,),
    }
    given = {name: fields.get(name) for name in TARGET_IMPLIED}
    check_fields(given, Known(frozenset(), frozenset(), implied))


def _eos_token_ids(*places: Mapping[str, Any]) -> tuple[int, ...]:
    """All that any place names: published files differ, and a request may stop at each."""
    ids = []
    for found in (place.get("eos_token_id") for place in places):
        ids += found if isinstance(found, list) else [] if found is None else [found]
    for token in ids:
        require(is_int(token), "eos_token_id", token, "a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _require_present(found: Mapping[str, Any], names: Iterable[str], prefix: str = "") -> None:
    for name in names:
        if found.get(name) is None:
            raise ValueError(f"config field {prefix}{name} is missing")


def _expert_bits(quantization: Mapping[str, Any]) -> int | None:
    """4 for the compressed-tensors INT4 scheme of Kimi, None without quantisation."""
    if not quantization:
        return None
    prefix = "quantization_config."
    method, layout = quantization.get("quant_method"), quantization.get("format")
    if (method, layout) != ("compressed-tensors", "pack-quantized"):
        raise ValueError(
            f"quantization_config: quant_method={show(method)}, format={show(layout)} is not "
            "supported: must be 'compressed-tensors', 'pack-quantized'"
        )
    check_fields(quantization, QUANTIZATION, prefix)
    groups = section(quantization, "config_groups")
    if len(groups) != 1:
        raise ValueError(f"{prefix}config_groups: {len(groups)} groups, must be one")
    group = section(groups, *groups)
    check_fields(group, QUANTIZATION_GROUP, prefix)
    weights = section(group, "weights")
    check_fields(weights, QUANTIZATION_WEIGHTS, prefix + "weights.")
    _require_present(weights, ("num_bits", "group_size"), prefix + "weights.")
    return 4
