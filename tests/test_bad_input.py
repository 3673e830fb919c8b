"""Input that cannot be honoured is refused: an error that names the field and shows the value."""

import math
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint import SMALL_DRAFTER, VOCAB, write_checkpoint
from refusal import refused
from tiny import DRAFTER, TARGET, tiny_model

import ddtree_jax as dd
from ddtree_jax.checks import plain, show
from ddtree_jax.generate import METHODS, Method
from ddtree_jax.sampling import Law, log_law
from ddtree_jax.tokenizer import RANKS

LENGTH = TARGET.max_position_embeddings


class Letters:
    """A tokenizer of single characters, the vocabulary `tiny` has."""

    eos_ids = ()

    def encode(self, text):
        return [ord(c) - ord("a") for c in text]


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
    "sampling of nothing": ([[1]], {"sampling": None}, "sampling=None: must be a Sampling"),
    "sampling of a number": ([[1]], {"sampling": 0.7}, "sampling=0.7: must be a Sampling"),
    "sampling of words": (
        [[1]],
        {"sampling": {"temperature": 1.0}},
        "sampling={'temperature': 1.0}: must be a Sampling or a list of them",
    ),
    "samplings of words": ([[1]], {"sampling": [{}]}, "sampling=[{}]: must be a Sampling or"),
    "prompts of nothing": (None, {}, "prompts=None: must be a text, a list of token ids"),
    "a number": (3, {}, "prompts=3: must be a text"),
    "an array of no axes": (np.array(3), {}, "prompts=array(3): must be a text"),
    "a generator": ((i for i in [1, 2]), {}, "prompts=<generator object"),
    "a dictionary": ({1: 2}, {}, "prompts={1: 2}: must be a text"),
    "a set": ({1, 2}, {}, "prompts={1, 2}: must be a text"),
    "bytes": (b"abc", {}, "prompts=b'abc': must be a text"),
    "bytes inside": ([b"abc"], {}, "[b'abc']: a prompt is a text or a list of token ids"),
    "bytes beside a list": ([[1], b"abc"], {}, "b'abc': a prompt is a text or"),
    "a dictionary inside": ([[1], {1: 2}], {}, "{1: 2}: a prompt is a text or"),
    "a generator inside": ([[1], iter([2])], {}, "iterator object"),
    "none inside": ([[1], None], {}, "None: a prompt is a text or a list of token ids"),
    "truths": ([True, False], {}, "[True, False]: a prompt is a text or a list of token ids"),
    "truths among ids": ([[1, True]], {}, "[1, True]: a prompt is a text or"),
    "an array of truths": ([np.array([True])], {}, "array([ True]): a prompt is a text or"),
    "an array of halves": (np.array([0.5]), {}, "[0.5]: a prompt is a text or"),
    "lists in lists": ([[[1]]], {}, "[[1]]: a prompt is a text or a list of token ids"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(name):
    prompts, options, said = REQUESTS[name]
    model = replace(tiny_model(), tokenizer=Letters())
    refused(said, dd.generate, model, prompts, **options)
    refused(said, dd.prefill, model, prompts, **options)
    alone = isinstance(prompts, list) and len(prompts) == 1 and isinstance(prompts[0], list)
    if alone and "sampling" not in options:
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
    scalars = [np.int64(1), jnp.int32(2), 11]
    for form in (
        *("bcl", ["bcl"], ids, tuple(ids), (ids,), scalars),
        *(np.array(ids), jnp.array(ids), [jnp.array(ids)], np.array([ids])),
    ):
        state = dd.prefill(model, form, max_new_tokens=np.int64(4))
        assert state.lengths.tolist() == [3]
        assert state.root.tolist() == wanted.root.tolist()


def test_a_stream_has_one_prompt_and_one_sampling():
    model = replace(tiny_model(), tokenizer=Letters())
    for bad, said in ((None, "None"), ([dd.Sampling()], "[Sampling("), ({"seed": 1}, "{'seed'")):
        refused(f"sampling={said}", dd.stream, model, [1], sampling=bad)
    for bad in (None, 3, b"abc", {1: 2}):
        refused(f"prompt={bad!r}: must be a text or a list", dd.stream, model, bad)
    refused("[[1]]: a prompt is a text or a list of token ids", dd.stream, model, [[1]])


def test_bytes_that_are_not_utf_8():
    """They come from the command line as lone surrogates, and would be read as U+FFFD."""
    model = replace(tiny_model(), tokenizer=Letters())
    for function in (dd.generate, dd.stream):
        said = "prompt 'a\\udce9b': '\\udce9' is no character"
        refused(said, function, model, "a\udce9b")


def test_text_needs_a_tokenizer():
    refused("this model has no tokenizer", dd.generate, tiny_model(), "abc")
    refused("this model has no tokenizer", dd.stream, tiny_model(), [1, 2])


def test_methods():
    model = tiny_model()
    for function in (dd.generate, dd.stream):
        model = replace(model, tokenizer=Letters())
        refused("method='magic': must be one of ddtree, dflash", function, model, "ab", "magic")
        refused("method=['ddtree']: must be one", function, model, "ab", ["ddtree"])
        for bad in (None, 8, {"budget": 8}):
            said = f"speculation={bad!r}: must be a Speculation"
            refused(said, function, model, "ab", speculation=bad)
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
    for any_method in (method, "autoregressive"):
        refused("block_size=9", Method, any_method, dd.Speculation(5, 2, 9), weights)


def test_steps():
    model = tiny_model()
    state = dd.prefill(model, [[1]], max_new_tokens=4)
    refused("block_size=9", dd.dflash_step, model.weights, state, block_size=9)
    for bad in (1, True, 2.5, "4"):
        refused(f"block_size={bad!r}", dd.dflash_step, model.weights, state, block_size=bad)
    refused("speculation=None", dd.ddtree_step, model.weights, state, speculation=None)
    rootless = dd.Speculation(0, 1, 9)
    refused("block_size=9", dd.ddtree_step, model.weights, state, speculation=rootless)
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


BAD_TEMPERATURES = [
    *(-1, -0.001, math.nan, math.inf, -math.inf, "1", None, True, 1j, np.bool_(True)),
    *(5e-324, 1e-38, 9e-31, 1.1e30, 1e39, 10**400),
]


@pytest.mark.parametrize("value", BAD_TEMPERATURES, ids=lambda value: repr(value)[:9])
def test_temperature(value):
    said = f"temperature={show(plain(value))}: must be finite, 0 or from 1e-30 to 1e30"
    refused(said, dd.Sampling, value)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_are_honoured(temperature):
    """The coldest law is greedy, the hottest uniform; neither is NaN, stops barred or not."""
    law = Law.of([dd.Sampling(temperature, min_new_tokens=1)])
    logits = jnp.array([[-jnp.inf, 1e7, -3e7, 2e7]], jnp.float32)
    law_of_one = jnp.exp(log_law(logits, law) - log_law(logits, law).max())
    wanted = [0, 0, 0, 1] if temperature < 1 else [0, 1, 1, 1]
    assert law_of_one.tolist() == [wanted]


@pytest.mark.parametrize("value", [-1, 2**32, 1.0, "3", None, True])
def test_seed(value):
    refused(f"seed={value!r}: must be an integer from 0", dd.Sampling, seed=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("top_k", value) for value in (-1, 2.0, "3", None, True, 2**31)),
        *(("min_new_tokens", value) for value in (-1, 2.0, None, 2**31)),
        *(("top_p", value) for value in (-0.1, 1.1, math.nan, "1", None)),
        *(("top_p", value) for value in (math.inf, True)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan, "1", None, True)),
        ("repetition_penalty", 1.2),
        ("repetition_penalty", True),
        ("repetition_penalty", [1.0, 1.0]),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("logit_bias", {1: 2.0}),
        ("grammar", "root ::= x"),
        ("logprobs", 5),
        ("stop", "text"),
        ("stop", None),
        ("stop_ids", 7),
        ("stop_ids", {7}),
    ],
)
def test_sampling_fields(field, value):
    refused(f"{field}={value!r}", dd.Sampling, **{field: value})


@pytest.mark.parametrize("value", [-1, 1.0, "3", None, True])
def test_entries_of_stop_ids(value):
    refused(f"stop_ids={value!r}: must be token ids", dd.Sampling, stop_ids=[3, value])


@pytest.mark.parametrize("value", ["", 3, None, b"x", "a\udce9"])
def test_entries_of_stop(value):
    refused(f"stop={value!r}: must be", dd.Sampling, stop=["fine", value])


def test_stops_that_cannot_be_honoured():
    model, run = tiny_model(), dd.generate
    for sampling, said in (
        (dd.Sampling(stop_ids=[12]), "stop_ids=12: must be below vocab_size=12"),
        (dd.Sampling(stop=["x"]), "stop='x': this model has no tokenizer"),
        (dd.Sampling(min_new_tokens=9), "min_new_tokens=9: must be at most max_new_tokens=8"),
        (dd.Sampling(stop_ids=list(range(12)), min_new_tokens=1), "bars all 12 tokens"),
    ):
        refused(said, run, model, [1, 2], sampling=sampling, max_new_tokens=8)
    model = replace(model, tokenizer=Letters())
    fits, long = dd.Sampling(stop=["b" * LENGTH]), dd.Sampling(stop=["c", "a" * (LENGTH + 1)])
    said = f"stop='{'a' * 99}...{'a' * 19}' of {LENGTH + 1} tokens: must be at most "
    said += f"max_position_embeddings={LENGTH}"
    for function in (run, dd.prefill, dd.stream):
        refused(said, function, model, [1, 2], sampling=long, max_new_tokens=8)
    assert dd.prefill(model, [1, 2], fits, 8).count.tolist() == [1]
    refused("acceptance='greedy'", dd.Speculation, acceptance="greedy")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("budget", value) for value in (-1, 1.0, "8", None, True, 1024, 10**11)),
        *(("top_k", value) for value in (0, -4, 2.0, None, False)),
        *(("block_size", value) for value in (1, 0, -2, 8.0, "8", True)),
    ],
)
def test_speculation(field, value):
    refused(f"{field}={value!r}: must be", dd.Speculation, **{field: value})


def test_numbers_of_numpy():
    """They become Python's, so that equal settings are one compiled program."""
    odd = dd.Speculation(np.int64(3), np.uint8(2), np.int32(4))
    assert (odd, hash(odd)) == (dd.Speculation(3, 2, 4), hash(dd.Speculation(3, 2, 4)))
    assert [type(v) for v in (odd.budget, odd.top_k, odd.block_size)] == [int] * 3
    odd = dd.Sampling(np.float32(0.5), np.int64(3), np.float64(0.5), stop_ids=[np.int64(7)])
    assert odd == dd.Sampling(0.5, 3, 0.5, stop_ids=[7])
    assert [type(v) for v in (odd.temperature, odd.top_k, *odd.stop_ids)] == [float, int, int]
    assert type(replace(TARGET, hidden_size=np.int64(64)).hidden_size) is int
    refused("budget=True", dd.Speculation, np.bool_(True))


def test_settings_at_their_limits():
    assert dd.Sampling(0, seed=2**32 - 1).temperature == 0
    assert dd.Speculation(0, 1, 2).block_size == 2
    assert dd.Speculation().block_size is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 64}, "hidden_size=32 (target: 64)"),
        ({"vocab_size": 13}, "vocab_size=12 (target: 13)"),
        ({"num_hidden_layers": 4}, "num_target_layers=2 (target: 4)"),
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
    said = "config.json: model_type='kimi_k25' is not supported: must be 'qwen3'"
    refused(said, dd.load, folder, drafter=folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copy / "dflash")
    assert dd.load(copy).drafter_config is None
    assert dd.load(copy, drafter=folder / "dflash").drafter_config == SMALL_DRAFTER
    ranks = (copy / RANKS).read_bytes().splitlines(keepends=True)
    (copy / RANKS).write_bytes(b"".join(ranks[:-1]))
    refused(f"{RANKS}: ranks and special tokens are {VOCAB - 1}, must be", dd.load, copy)
