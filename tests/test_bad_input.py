"""Input that cannot be honoured is refused: an error that names the field and shows the value."""

import math
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint import SMALL_DRAFTER, SMALL_TARGET, VOCAB, write_checkpoint
from tiny import DRAFTER, TARGET, tiny_model

import ddtree_jax as dd
from ddtree_jax.generate import METHODS, Method
from ddtree_jax.read_config import read_drafter_config, read_target_config
from ddtree_jax.tokenizer import RANKS
from ddtree_jax.write_config import published_config, published_drafter_config

LENGTH = TARGET.max_position_embeddings


class Letters:
    """A tokenizer of single characters, the vocabulary `tiny` has."""

    eos_ids = ()

    def encode(self, text):
        return [ord(c) - ord("a") for c in text]


def refused(said, function, *arguments, kind=ValueError, **options):
    """Assert that the call raises `kind` with this in its message, on one line."""
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert said in message
    assert "\n" not in message


@pytest.fixture
def drafterless():
    model = tiny_model()
    return replace(model, weights=replace(model.weights, drafter=None, drafter_config=None))


REQUESTS = {
    "no prompts": ([], {}, "prompts=[]"),
    "an empty prompt": ([[1, 2], []], {}, "prompts[1]=[]"),
    "an empty text": (["ab", ""], {}, "prompts[1]=''"),
    "a negative id": ([[1], [2, -3]], {}, "prompts[1] holds token id -3"),
    "an id beyond the vocabulary": ([[1, 12]], {}, "prompts[0] holds token id 12"),
    "half a token": ([[1.5, 2]], {}, "[1.5, 2]: a prompt is a text or a list of token ids"),
    "half a token, alone": ([1.5, 2], {}, "[1.5, 2]: a prompt is a text or a list of token ids"),
    "text among ids": ([[1, "b"]], {}, "[1, 'b']: a prompt is a text or a list of token ids"),
    "a text and a number": (["ab", 3], {}, "3: a prompt is a text or a list of token ids"),
    "too long a prompt": (
        [[1] * LENGTH],
        {},
        f"prompts[0] of {LENGTH} tokens with max_new_tokens=128",
    ),
    "too many new tokens": (
        [[1]],
        {"max_new_tokens": LENGTH},
        f"max_new_tokens={LENGTH}: together at most max_position_embeddings={LENGTH}",
    ),
    "no new tokens": ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
    "true new tokens": ([[1]], {"max_new_tokens": True}, "max_new_tokens=True"),
    "half a new token": ([[1]], {"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
    "two samplings for one prompt": (
        [[1]],
        {"sampling": [dd.Sampling(), dd.Sampling(1.0)]},
        "sampling has 2 entries: must be one, or 1",
    ),
    "no sampling": ([[1]], {"sampling": []}, "sampling has 0 entries"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(name):
    prompts, options, said = REQUESTS[name]
    model = replace(tiny_model(), tokenizer=Letters())
    refused(said, dd.generate, model, prompts, **options)
    refused(said, dd.prefill, model, prompts, **options)
    if len(prompts) == 1 and isinstance(prompts[0], list) and "sampling" not in options:
        refused(said, dd.stream, model, prompts[0], **options)  # before the first piece


def test_the_longest_request_fits():
    """The limits themselves are honoured."""
    model = replace(tiny_model(), tokenizer=Letters())
    assert dd.prefill(model, [[1] * (LENGTH - 1)], max_new_tokens=1).count.tolist() == [1]
    assert dd.prefill(model, "l" * 3, max_new_tokens=LENGTH - 3).count.tolist() == [1]


def test_one_prompt_in_many_forms():
    model = replace(tiny_model(), tokenizer=Letters())
    wanted = dd.prefill(model, [[1, 2, 11]], max_new_tokens=4)
    ids = [1, 2, 11]
    for form in ("bcl", ["bcl"], ids, tuple(ids), np.array(ids), [jnp.array(ids)]):
        state = dd.prefill(model, form, max_new_tokens=4)
        assert state.lengths.tolist() == [3]
        assert state.root.tolist() == wanted.root.tolist()


def test_text_needs_a_tokenizer():
    refused("this model has no tokenizer", dd.generate, tiny_model(), "abc")
    refused("this model has no tokenizer", dd.stream, tiny_model(), [1, 2])


def test_methods():
    model = tiny_model()
    for function in (dd.generate, dd.stream):
        model = replace(model, tokenizer=Letters())
        refused("method='magic': must be one of ddtree, dflash", function, model, "ab", "magic")
        refused(
            "top_k=13: must be at most", function, model, "ab", speculation=dd.Speculation(8, 13)
        )
        refused(
            "block_size=9: must be from 2 to the drafter's 8",
            function,
            model,
            "ab",
            speculation=dd.Speculation(block_size=9),
        )


@pytest.mark.parametrize("method", ["ddtree", "dflash"])
def test_block_sizes(method):
    """None is the drafter's own, 2 the least, the trained one the most."""
    weights = tiny_model().weights
    for size, block in ((None, 8), (2, 2), (7, 7), (8, 8)):
        step = Method(method, dd.Speculation(5, 2, size), weights)
        assert step.speculation.block_size == block
        assert step.horizon == block - 1
        assert step.budget == (5 if method == "ddtree" else block - 1)
    refused("block_size=9", Method, method, dd.Speculation(5, 2, 9), weights)


def test_steps():
    model = tiny_model()
    state = dd.prefill(model, [[1]], max_new_tokens=4)
    refused("block_size=9", dd.dflash_step, model.weights, state, block_size=9)
    refused("block_size=1", dd.dflash_step, model.weights, state, block_size=1)
    wide = dd.Speculation(8, 13)
    refused("top_k=13", dd.ddtree_step, model.weights, state, speculation=wide)


def test_a_model_without_a_drafter(drafterless):
    """Plain decoding works; what needs a drafter says so."""
    prompts = [[1, 2, 3]]
    (plain,) = dd.generate(drafterless, prompts, "autoregressive", max_new_tokens=6)
    assert plain.tokens == dd.generate(tiny_model(), prompts, max_new_tokens=6)[0].tokens
    for method in set(METHODS) - {"autoregressive"}:
        refused("this model has no drafter", dd.generate, drafterless, prompts, method)
    state = dd.prefill(drafterless, prompts, max_new_tokens=6)
    refused("this model has no drafter", dd.ddtree_step, drafterless.weights, state)
    refused("this model has no drafter", dd.dflash_step, drafterless.weights, state)


@pytest.mark.parametrize("value", [-1, -0.001, math.nan, math.inf, -math.inf, "1", None, True, 1j])
def test_temperature(value):
    refused(f"temperature={value!r}: must be finite", dd.Sampling, value)


@pytest.mark.parametrize("value", [-1, 2**32, 1.0, "3", None, True])
def test_seed(value):
    refused(f"seed={value!r}: must be an integer from 0", dd.Sampling, seed=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("top_k", value) for value in (-1, 2.0, "3", None, True)),
        *(("min_new_tokens", value) for value in (-1, 2.0, None)),
        *(("top_p", value) for value in (-0.1, 1.1, math.nan, "1", None)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
        ("repetition_penalty", 1.2),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("logit_bias", {1: 2.0}),
        ("grammar", "root ::= x"),
        ("logprobs", 5),
        ("stop", "text"),
        ("stop_ids", 7),
    ],
)
def test_sampling_fields(field, value):
    refused(f"{field}={value!r}", dd.Sampling, **{field: value})


def test_stops_that_cannot_be_honoured():
    model, run = tiny_model(), dd.generate
    for sampling, said in (
        (dd.Sampling(stop_ids=[12]), "stop_ids=12: must be below vocab_size=12"),
        (dd.Sampling(stop=["x"]), "stop='x': this model has no tokenizer"),
        (dd.Sampling(min_new_tokens=9), "min_new_tokens=9: must be at most max_new_tokens=8"),
        (dd.Sampling(stop_ids=list(range(12)), min_new_tokens=1), "bars all 12 tokens"),
    ):
        refused(said, run, model, [1, 2], sampling=sampling, max_new_tokens=8)
    refused("acceptance='greedy'", dd.Speculation, acceptance="greedy")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("budget", value) for value in (-1, 1.0, "8", None, True)),
        *(("top_k", value) for value in (0, -4, 2.0, None, False)),
        *(("block_size", value) for value in (1, 0, -2, 8.0, "8", True)),
    ],
)
def test_speculation(field, value):
    refused(f"{field}={value!r}: must be", dd.Speculation, **{field: value})


def test_settings_at_their_limits():
    assert dd.Sampling(0, seed=2**32 - 1).temperature == 0
    assert dd.Speculation(0, 1, 2).block_size == 2
    assert dd.Speculation().block_size is None


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 64}, "hidden_size=32 (target: 64)"),
        ({"vocab_size": 13}, "vocab_size=12 (target: 13)"),
        ({"num_hidden_layers": 4}, "num_target_layers=3 (target: 4)"),
    ],
)
def test_check_target(change, said):
    DRAFTER.check_target(TARGET)
    refused(said, DRAFTER.check_target, replace(TARGET, **change))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_load(folder, tmp_path):
    missing = {"kind": FileNotFoundError}
    refused("no model 'kimi-giga'", dd.load, "kimi-giga", **missing)
    refused("config.json", dd.load, tmp_path, **missing)
    refused("dtype='int8'", dd.load, folder, dtype="int8")
    refused("mesh='all'", dd.load, folder, mesh="all")
    refused("plan='tensor'", dd.load, folder, plan="tensor")
    refused("nowhere", dd.load, folder, drafter=tmp_path / "nowhere", **missing)
    refused("hidden_size is missing", dd.load, folder, drafter=folder)  # the target is no drafter
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copy / "dflash")
    assert dd.load(copy).drafter_config is None
    assert dd.load(copy, drafter=folder / "dflash").drafter_config == SMALL_DRAFTER
    ranks = (copy / RANKS).read_bytes().splitlines(keepends=True)
    (copy / RANKS).write_bytes(b"".join(ranks[:-1]))
    refused(f"{RANKS}: ranks and special tokens are {VOCAB - 1}, must be", dd.load, copy)
