"""Configurations: frozen, validated when built, read from the published `config.json` files.

Field names are the published ones, so that a config can be compared with its file line by line.
A field that changes the arithmetic and that this code does not implement is refused by name;
generation defaults and other boilerplate are ignored.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

PAGE_SIZE = 64  # tokens of one cache page


@dataclass(frozen=True)
class Yarn:
    """YaRN rope scaling (Peng et al. 2023, arXiv 2309.00071).

    `attention_factor` multiplies cos and sin; explicit because published drafters differ in it.
    `mscale_all_dim` enters the softmax scale of MLA only (`KimiConfig.softmax_scale`).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self):
        _check_types(self, "rope_scaling.")
        _require(self.factor >= 1, "rope_scaling.factor", self.factor, "at least 1")
        _require(
            self.original_max_position_embeddings > 0,
            "rope_scaling.original_max_position_embeddings",
            self.original_max_position_embeddings,
            "positive",
        )

    @classmethod
    def from_published(cls, fields: Mapping[str, Any] | None) -> "Yarn | None":
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
        _require(kind in known, "rope_scaling.type", kind, "'yarn' or 'default'")
        known = {
            "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
            "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate",
        }  # fmt: skip
        for name in sorted(set(fields) - known):
            raise ValueError(f"rope_scaling.{name}={fields[name]!r} is not supported")
        _require(fields.get("truncate", True) is True, "rope_scaling.truncate", False, "true")
        _require_present(fields, ("factor", "original_max_position_embeddings"), "rope_scaling.")
        for name in sorted(known - {"rope_type", "type", "truncate"}):
            value = fields.get(name)
            ok = value is None or _is_number(value)
            _require(ok, f"rope_scaling.{name}", value, "a finite number")
        factor = float(fields["factor"])
        mscale, all_dim = fields.get("mscale"), fields.get("mscale_all_dim")
        amplitude = fields.get("attention_factor")
        if amplitude is None and mscale and all_dim:
            amplitude = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
        elif amplitude is None:
            amplitude = yarn_mscale(factor, 1.0)
        return cls(
            factor=factor,
            original_max_position_embeddings=int(fields["original_max_position_embeddings"]),
            beta_fast=float(fields.get("beta_fast") or 32),
            beta_slow=float(fields.get("beta_slow") or 1),
            attention_factor=float(amplitude),
            mscale_all_dim=float(all_dim or 0.0),
        )


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, the amplitude term of YaRN (eq. 22); 1 without scaling."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class KimiConfig:
    """The text tower of Kimi K2 / K2.5 / K2.6 and of its small relatives (DeepSeek-V3 family)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    yarn: Yarn | None = None
    # The class default of the published modelling file, not rms_norm_eps; engines differ here.
    latent_norm_eps: float = 1e-6
    expert_bits: int | None = None  # 4: INT4 routed experts, groups of 32; None: dense
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        _check_types(self)
        positive = [
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
            "intermediate_size", "max_position_embeddings", "rms_norm_eps", "latent_norm_eps",
            "rope_theta",
        ]  # fmt: skip
        if self.num_moe_layers:
            positive += ["moe_intermediate_size", "n_routed_experts"]
        for name in positive:
            _require(getattr(self, name) > 0, name, getattr(self, name), "positive")
        ok = self.q_lora_rank is None or (is_int(self.q_lora_rank) and self.q_lora_rank > 0)
        _require(ok, "q_lora_rank", self.q_lora_rank, "None or positive")
        _require(self.n_shared_experts >= 0, "n_shared_experts", self.n_shared_experts, "0 or more")
        for token in self.eos_token_ids:
            ok = is_int(token) and 0 <= token < self.vocab_size
            _require(ok, "eos_token_id", token, f"a token id below vocab_size={self.vocab_size}")
        _require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "even")
        _require(
            0 <= self.first_k_dense_replace <= self.num_hidden_layers,
            "first_k_dense_replace",
            self.first_k_dense_replace,
            f"between 0 and num_hidden_layers={self.num_hidden_layers}",
        )
        if self.num_moe_layers:
            _require(
                0 < self.num_experts_per_tok <= self.n_routed_experts,
                "num_experts_per_tok",
                self.num_experts_per_tok,
                f"between 1 and n_routed_experts={self.n_routed_experts}",
            )
        _require(self.expert_bits in (None, 4), "expert_bits", self.expert_bits, "None or 4")
        for name in ("hidden_size", "moe_intermediate_size") if self.expert_bits else ():
            size = getattr(self, name)
            _require(size % 32 == 0, name, size, "a multiple of 32, the INT4 group size")

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def latent_size(self) -> int:
        """Elements of one cache row: the normed latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(qk head size), times the squared YaRN amplitude of all dimensions."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim) ** 2
        return scale

    @classmethod
    def from_published(cls, published: Mapping[str, Any]) -> "KimiConfig":
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
        _refuse_unknown(fields, set(_KIMI_FIXED) | set(cls.__dataclass_fields__) | _KIMI_KNOWN)
        made = {"yarn", "expert_bits", "eos_token_ids"}
        optional = {"q_lora_rank": None, "latent_norm_eps": cls.latent_norm_eps}
        names = [name for name in cls.__dataclass_fields__ if name not in made]
        _require_present(fields, [name for name in names if name not in optional])
        values = {name: fields.get(name, optional.get(name)) for name in names}
        eos = [published.get("eos_token_id"), fields.get("eos_token_id")]
        ids = [i for e in eos if e is not None for i in (e if isinstance(e, list) else [e])]
        return cls(
            **values,
            yarn=Yarn.from_published(rope),
            expert_bits=_expert_bits(quantization),
            eos_token_ids=tuple(dict.fromkeys(ids)),
        )


@dataclass(frozen=True)
class DFlashConfig:
    """The DFlash drafter (arXiv 2602.06036): a small decoder stack reading taps of the target."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    # Whether rows of sliding layers see only earlier rows of their block. Sources disagree
    # (reference: the Kimi drafter's own modelling file is bidirectional), hence explicit.
    causal_sliding: bool = False
    yarn: Yarn | None = None

    def __post_init__(self):
        _check_types(self)
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "vocab_size",
            "num_target_layers",
        ):  # fmt: skip
            _require(getattr(self, name) > 0, name, getattr(self, name), "positive")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")
        _require(self.block_size >= 2, "block_size", self.block_size, "at least 2")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            self.num_key_value_heads,
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        _require(
            len(self.layer_types) == self.num_hidden_layers,
            "layer_types",
            self.layer_types,
            f"one entry for each of num_hidden_layers={self.num_hidden_layers}",
        )
        for kind in self.layer_types:
            _require(kind in _LAYER_TYPES, "layer_types", kind, f"one of {_LAYER_TYPES}")
        if "sliding_attention" in self.layer_types:
            ok = is_int(self.sliding_window) and self.sliding_window > 0
            _require(ok, "sliding_window", self.sliding_window, "positive")
        _require(
            bool(self.target_layer_ids)
            and all(is_int(i) and 0 <= i < self.num_target_layers for i in self.target_layer_ids),
            "target_layer_ids",
            self.target_layer_ids,
            f"layers below num_target_layers={self.num_target_layers}",
        )
        _require(
            0 <= self.mask_token_id < self.vocab_size,
            "dflash_config.mask_token_id",
            self.mask_token_id,
            f"a token id below vocab_size={self.vocab_size}",
        )

    @property
    def horizon(self) -> int:
        """Positions the drafter predicts: the block without its root."""
        return self.block_size - 1

    @classmethod
    def from_published(cls, published: Mapping[str, Any]) -> "DFlashConfig":
        """Read a drafter's `config.json`; raises ValueError as `KimiConfig.from_published`."""
        fields, own = dict(published), _section(published, "dflash_config")
        _check_fixed(fields, _DFLASH_FIXED)
        _refuse_unknown(fields, set(_DFLASH_FIXED) | set(cls.__dataclass_fields__) | _DFLASH_KNOWN)
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
            _require(value is None or isinstance(value, list), name, value, "a list")
        layers = fields["num_hidden_layers"]
        kinds = fields.get("layer_types")
        if not kinds and is_int(layers):  # another type is refused below, by name
            kinds = ["full_attention"] * layers
        return cls(
            **{name: fields[name] for name in copied},
            target_layer_ids=tuple(own["target_layer_ids"]),
            mask_token_id=own["mask_token_id"],
            block_size=own["block_size"],
            layer_types=tuple(kinds or ()),
            sliding_window=fields.get("sliding_window"),
            causal_sliding=bool(own.get("is_causal", fields.get("is_causal", False))),
            yarn=Yarn.from_published(rope),
        )

    def check_target(self, target: KimiConfig) -> None:
        """Raise ValueError naming every field in which the drafter does not fit the target."""
        wrong = [
            f"{name}={mine} (target: {theirs})"
            for name, mine, theirs in (
                ("hidden_size", self.hidden_size, target.hidden_size),
                ("vocab_size", self.vocab_size, target.vocab_size),
                ("num_target_layers", self.num_target_layers, target.num_hidden_layers),
            )
            if mine != theirs
        ]
        if wrong:
            raise ValueError("the drafter does not fit the target: " + ", ".join(wrong))


@dataclass(frozen=True)
class Sampling:
    """How the target is sampled: `temperature` 0 is greedy, `seed` keys the noise."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self):
        ok = _is_number(self.temperature) and self.temperature >= 0
        _require(ok, "temperature", self.temperature, "finite, 0 or greater")
        _require(
            is_int(self.seed) and 0 <= self.seed < 2**32,
            "seed",
            self.seed,
            "an integer from 0 to 2**32-1",
        )


@dataclass(frozen=True)
class Speculation:
    """What is drafted: tree nodes besides the root, candidates a position, drafter rows a pass.

    `block_size` None is the drafter's own. Budget and block size are independent of each other.
    """

    budget: int = 8
    top_k: int = 4
    block_size: int | None = None

    def __post_init__(self):
        _require(is_int(self.budget) and self.budget >= 0, "budget", self.budget, "0 or greater")
        _require(is_int(self.top_k) and self.top_k >= 1, "top_k", self.top_k, "1 or greater")
        _require(
            self.block_size is None or (is_int(self.block_size) and self.block_size >= 2),
            "block_size",
            self.block_size,
            "None, or 2 or greater",
        )


def is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and math.isfinite(value)


def _check_types(config, prefix: str = "") -> None:
    """Raise ValueError for a field declared int, float or bool that holds something else."""
    kinds = {
        int: (is_int, "an integer"),
        float: (_is_number, "a finite number"),
        bool: (lambda value: isinstance(value, bool), "true or false"),
    }
    for entry in fields(config):
        if entry.type in kinds:
            fits, wanted = kinds[entry.type]
            value = getattr(config, entry.name)
            _require(fits(value), prefix + entry.name, value, wanted)


def _section(published: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object under this name, empty if there is none."""
    value = published.get(name)
    _require(value is None or isinstance(value, Mapping), name, value, "an object or null")
    return dict(value or {})


def _require_present(found: Mapping[str, Any], names: Iterable[str], prefix: str = "") -> None:
    for name in names:
        if found.get(name) is None:
            raise ValueError(f"config field {prefix}{name} is missing")


def _require(ok: bool, name: str, value: Any, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: must be {wanted}")


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


_LAYER_TYPES = ("full_attention", "sliding_attention")
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
