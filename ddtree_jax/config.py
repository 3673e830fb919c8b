"""Configurations: frozen, and validated when built.

Field names are the published ones, so that a config can be compared with its file line by line;
`read_config` reads the files.
"""

import math
from dataclasses import dataclass

from ddtree_jax.checks import check_types, is_int, is_number, make_plain, plain, require, show

PAGE_SIZE = 64  # tokens of one cache page
MOST_LAYERS = 1024  # of a model that is no slip of the pen


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
        prefix = "rope_scaling."
        check_types(self, prefix)
        require(self.factor >= 1, prefix + "factor", self.factor, "at least 1")
        for name in ("original_max_position_embeddings", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            require(value > 0, prefix + name, value, "positive")
        ok = self.beta_fast >= self.beta_slow
        require(ok, prefix + "beta_fast", self.beta_fast, f"at least beta_slow={self.beta_slow}")
        ok = self.mscale_all_dim >= 0
        require(ok, prefix + "mscale_all_dim", self.mscale_all_dim, "0 or greater")


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
    # Not published: INT4 experts are kept in the records of the Hopper kernel (pallas/).
    expert_records: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        check_types(self)
        positive = [
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
            "intermediate_size", "max_position_embeddings", "rms_norm_eps", "latent_norm_eps",
        ]  # fmt: skip
        if self.num_moe_layers:
            positive += ["moe_intermediate_size", "n_routed_experts"]
        for name in positive:
            require(getattr(self, name) > 0, name, getattr(self, name), "positive")
        _check_stack(self)
        ok = self.q_lora_rank is None or (is_int(self.q_lora_rank) and self.q_lora_rank > 0)
        require(ok, "q_lora_rank", self.q_lora_rank, "None or positive")
        require(self.n_shared_experts >= 0, "n_shared_experts", self.n_shared_experts, "0 or more")
        for token in self.eos_token_ids:
            ok = is_int(token) and 0 <= token < self.vocab_size
            require(ok, "eos_token_id", token, f"a token id below vocab_size={self.vocab_size}")
        require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "even")
        require(
            0 <= self.first_k_dense_replace <= self.num_hidden_layers,
            "first_k_dense_replace",
            self.first_k_dense_replace,
            f"between 0 and num_hidden_layers={self.num_hidden_layers}",
        )
        if self.num_moe_layers:
            require(
                0 < self.num_experts_per_tok <= self.n_routed_experts,
                "num_experts_per_tok",
                self.num_experts_per_tok,
                f"between 1 and n_routed_experts={self.n_routed_experts}",
            )
        require(self.expert_bits in (None, 4), "expert_bits", self.expert_bits, "None or 4")
        for name in ("hidden_size", "moe_intermediate_size") if self.expert_bits else ():
            size = getattr(self, name)
            require(size % 32 == 0, name, size, "a multiple of 32, the INT4 group size")
        fits = not self.expert_records or self.fits_records
        require(fits, "expert_records", self.expert_records, "False for these experts")

    @property
    def fits_records(self) -> bool:
        """Whether the kernel's records can hold the experts: whole tiles of INT4."""
        sizes = self.hidden_size % 256 == 0 and self.moe_intermediate_size % 128 == 0
        return self.expert_bits == 4 and self.num_moe_layers > 0 and sizes

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
        check_types(self)
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size", "num_target_layers",
        ):  # fmt: skip
            require(getattr(self, name) > 0, name, getattr(self, name), "positive")
        _check_stack(self)
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")
        require(self.block_size >= 2, "block_size", self.block_size, "at least 2")
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            self.num_key_value_heads,
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        require(
            len(self.layer_types) == self.num_hidden_layers,
            "layer_types",
            self.layer_types,
            f"one entry for each of num_hidden_layers={self.num_hidden_layers}",
        )
        for kind in self.layer_types:
            require(kind in _LAYER_TYPES, "layer_types", kind, f"one of {_LAYER_TYPES}")
        window, needed = self.sliding_window, "sliding_attention" in self.layer_types
        ok = not needed if window is None else is_int(window) and window > 0
        require(ok, "sliding_window", window, "positive" if needed else "None or positive")
        require(
            bool(self.target_layer_ids)
            and all(is_int(i) and 0 <= i < self.num_target_layers for i in self.target_layer_ids),
            "target_layer_ids",
            self.target_layer_ids,
            f"layers below num_target_layers={self.num_target_layers}",
        )
        require(
            0 <= self.mask_token_id < self.vocab_size,
            "dflash_config.mask_token_id",
            self.mask_token_id,
            f"a token id below vocab_size={self.vocab_size}",
        )

    @property
    def horizon(self) -> int:
        """Positions the drafter predicts: the block without its root."""
        return self.block_size - 1

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
    """How the target is sampled, and when a request stops.

    The law: logits over `temperature` (0: greedy; else from 1e-30 to 1e30, beyond which float32
    overflows, and ValueError is raised), then the `top_k` largest (0: all), then the
    smallest set of them with mass `top_p` (1: all), then those at least `min_p` times as likely as
    the likeliest (0: all); ties at an edge are kept whole. `seed` keys the noise.

    `stop_ids` and `stop` (strings) end a request besides the model's own stop ids, none of them
    within the first `min_new_tokens` tokens (strings: if they end later).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    # Not supported: named here so that asking for one is refused by name, never ignored.
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: None = None
    grammar: None = None
    logprobs: None = None

    def __post_init__(self):
        for name in ("stop_ids", "stop"):  # lists are welcome
            value = getattr(self, name)
            ok = isinstance(value, (list, tuple))
            require(ok, name, value, "a list")
            object.__setattr__(self, name, tuple(map(plain, value)))
        make_plain(self)
        t = self.temperature
        ok = is_number(t) and (t == 0 or 1e-30 <= t <= 1e30)
        require(ok, "temperature", t, "finite, 0 or from 1e-30 to 1e30")
        ok = is_int(self.seed) and 0 <= self.seed < 2**32
        require(ok, "seed", self.seed, "an integer from 0 to 2**32-1")
        for name in ("top_k", "min_new_tokens"):
            value = getattr(self, name)
            ok = is_int(value) and 0 <= value < 2**31
            require(ok, name, value, "an integer, 0 or greater, below 2**31")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            require(is_number(value) and 0 <= value <= 1, name, value, "from 0 to 1")
        for token in self.stop_ids:
            require(is_int(token) and token >= 0, "stop_ids", token, "token ids")
        for text in self.stop:
            require(isinstance(text, str) and text != "", "stop", text, "strings, not empty")
            odd = any("\ud800" <= c <= "\udfff" for c in text)  # what bytes not UTF-8 become
            require(not odd, "stop", text, "UTF-8")
        for name in _UNSUPPORTED:
            value, neutral = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value is not neutral and not (is_number(value) and value == neutral):
                raise ValueError(f"{name}={show(value)} is not supported: must be {neutral!r}")


ACCEPTANCE = ("coupled", "rejection")
MOST_NODES = 1023  # of a tree: far beyond what pays, and short of what no memory holds


@dataclass(frozen=True)
class Speculation:
    """What is drafted and how it is accepted.

    `budget` tree nodes besides the root, `top_k` candidates a position, `block_size` drafter rows
    a pass (None: the drafter's own); budget and block size are independent of each other.
    `acceptance`: `coupled` writes what plain decoding with the same seed writes; `rejection` keeps
    the distribution alone, with coins of its own (docs/sampling.md). Where nothing is drafted
    (plain decoding, a budget of 0) there is nothing to accept, and both are the same.
    """

    budget: int = 8
    top_k: int = 4
    block_size: int | None = None
    acceptance: str = "coupled"

    def __post_init__(self):
        make_plain(self)
        ok = is_int(self.budget) and 0 <= self.budget <= MOST_NODES
        require(ok, "budget", self.budget, f"an integer from 0 to {MOST_NODES}")
        require(is_int(self.top_k) and self.top_k >= 1, "top_k", self.top_k, "1 or greater")
        ok = self.block_size is None or (is_int(self.block_size) and self.block_size >= 2)
        require(ok, "block_size", self.block_size, "None, or 2 or greater")
        ok = self.acceptance in ACCEPTANCE
        require(ok, "acceptance", self.acceptance, "one of " + ", ".join(ACCEPTANCE))


def _check_stack(config) -> None:
    """What both models ask of their layers."""
    layers, theta = config.num_hidden_layers, config.rope_theta
    require(layers <= MOST_LAYERS, "num_hidden_layers", layers, f"at most {MOST_LAYERS}")
    require(theta > 1, "rope_theta", theta, "greater than 1")


_LAYER_TYPES = ("full_attention", "sliding_attention")
_UNSUPPORTED = (
    "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "grammar",
    "logprobs",
)  # fmt: skip
