"""The compiled programs: none is made after warm-up, none leaves the device, none copies a cache.

The model's sizes are such that no activation has the shape of a weight or of a cache pool, in
whatever order of axes.
"""

import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from lossless import FOREVER, prompts_of
from tiny import DRAFTER, TARGET, tiny_model

import ddtree_jax as dd
from ddtree_jax.generate import METHODS, Method, decode
from ddtree_jax.loading import Model
from ddtree_jax.model.dflash import DFlash
from ddtree_jax.model.kimi import Kimi

TREE = dd.Speculation(budget=10, top_k=3, block_size=6)
STEPS = {
    "ddtree": lambda weights, state: dd.ddtree_step(weights, state, speculation=TREE),
    "dflash": lambda weights, state: dd.dflash_step(weights, state, block_size=6),
    "autoregressive": dd.autoregressive_step,
}
FORMS = [*((m, "loop") for m in METHODS), ("ddtree", "step")]
SLOW_FORMS = [("dflash", "step"), ("autoregressive", "step")]  # their loops hold them
FORMS += [pytest.param(form, marks=pytest.mark.slow) for form in SLOW_FORMS]


class Letters:
    """A tokenizer of single characters."""

    eos_ids = ()
    encode = staticmethod(lambda text: [ord(c) - ord("a") for c in text])
    decode_bytes = staticmethod(lambda ids: bytes(ord("a") + i for i in ids))

    def decode(self, ids):
        return self.decode_bytes(ids).decode()


@pytest.fixture(scope="module")
def compilations():
    """Durations of all backend compilations so far."""
    seen = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_the_counter_counts(compilations):
    before = len(compilations)
    jax.jit(lambda x: x * 3 + 1)(jnp.zeros(7))
    assert len(compilations) > before


@pytest.mark.parametrize("method", METHODS)
def test_a_second_generation_compiles_nothing(compilations, method):
    """200 tokens, other prompts, other seeds and temperatures: the programs of the first."""
    model = tiny_model()
    first, second = prompts_of((5, 40)), prompts_of((9, 33))
    dd.generate(model, first, method, TREE, max_new_tokens=200)
    before, programs = len(compilations), decode._cache_size()
    for temperature in (0.0, 0.7):
        sampling = [dd.Sampling(temperature, seed=5), dd.Sampling(1.0, seed=2**32 - 1)]
        done = dd.generate(model, second, method, TREE, sampling, max_new_tokens=200)
        assert [len(d.tokens) for d in done] == [200, 200]
    assert len(compilations) == before
    assert decode._cache_size() == programs


@pytest.mark.parametrize("method", METHODS)
def test_streaming_compiles_nothing(compilations, method):
    """Neither the later passes of the first stream, nor a second stream."""
    model = replace(tiny_model(), tokenizer=Letters())
    pieces, seen = dd.stream(model, "abcabc", method, TREE, max_new_tokens=200), ""
    while len(seen) < 20:
        seen += next(pieces)
    before, programs = len(compilations), decode._cache_size()
    seen += "".join(pieces)
    done = []
    sampling = dd.Sampling(0.7, seed=2**32 - 1)
    text = "".join(dd.stream(model, "cab", method, TREE, sampling, 200, done=done))
    assert len(seen) == len(text) == len(done[0].tokens) == 200
    assert text == done[0].text
    assert len(compilations) == before
    assert decode._cache_size() == programs


def test_short_requests_share_a_program(compilations):
    """Whatever their limit up to 64 tokens, which fill the buffer, and with up to four stop ids;
    the prompt is such that all take four pages."""
    model, prompts = tiny_model(), prompts_of((130, 3))
    done = dd.generate(model, prompts, "ddtree", TREE, max_new_tokens=64)
    before = len(compilations)
    for limit, stops in ((1, []), (33, [8]), (64, [7, 8, 9, 10])):
        sampling = dd.Sampling(stop_ids=stops)
        cut = dd.generate(model, prompts, "ddtree", TREE, sampling, limit)
        assert all(c.tokens == d.tokens[: len(c.tokens)] for c, d in zip(cut, done, strict=True))
    assert len(compilations) == before and [len(d.tokens) for d in done] == [64, 64]


@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_traced_once(compilations, method):
    chex.clear_trace_counter()
    model = tiny_model()
    traced = chex.assert_max_traces(STEPS[method], n=1)
    step = jax.jit(traced, donate_argnums=1)
    state = dd.prefill(model, prompts_of((5, 40)), dd.Sampling(0.7, seed=1), max_new_tokens=200)
    state = step(model.weights, state)
    before = len(compilations)
    for _ in range(199):
        state = step(model.weights, state)
    assert len(compilations) == before
    assert state.count.tolist() == [200, 200]


def test_one_verify_program_for_all_temperatures():
    """Temperature is an array: the lowered text does not depend on it."""
    model, prompts = tiny_model(), prompts_of((5, 40))
    texts = set()
    for temperatures in ((0.0, 0.0), (0.7, 0.7), (0.0, 1.0)):
        samplings = [dd.Sampling(t, seed=3) for t in temperatures]
        state = dd.prefill(model, prompts, samplings, 30)
        step = Method("ddtree", TREE, model.weights)
        texts.add(decode.lower(model.weights, state, step, FOREVER).as_text())
    assert len(texts) == 1


@lru_cache
def distinct_model() -> Model:
    """INT4 experts, and sizes that meet in no activation."""
    target = replace(
        TARGET, vocab_size=19, hidden_size=96, num_attention_heads=3, q_lora_rank=28,
        kv_lora_rank=46, qk_nope_head_dim=14, qk_rope_head_dim=12, v_head_dim=10,
        intermediate_size=52, moe_intermediate_size=32, n_routed_experts=7, expert_bits=4,
    )  # fmt: skip
    drafter = replace(
        DRAFTER, hidden_size=96, intermediate_size=68, head_dim=22, vocab_size=19, sliding_window=70
    )
    target_module = Kimi(target, rngs=nnx.Rngs(0), dtype=jnp.float32)
    drafter_module = DFlash(drafter, rngs=nnx.Rngs(1), dtype=jnp.float32)
    leaves = [tuple(jax.tree.leaves(nnx.state(m))) for m in (target_module, drafter_module)]
    return Model(dd.Weights(*leaves, target, drafter, "float32"), None, "distinct")


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def program(request, optimized):
    """(model, state, optimised HLO text) of a method's loop, or of its step alone."""
    method, form = request.param
    model = distinct_model()
    state = dd.prefill(model, prompts_of((5, 40, 33)), max_new_tokens=40)
    if form == "loop":
        lowered = decode.lower(model.weights, state, Method(method, TREE, model.weights), 1)
    else:
        lowered = jax.jit(STEPS[method], donate_argnums=1).lower(model.weights, state)
    return model, state, lowered.compile().as_text()


def sizes(shape) -> tuple[int, ...]:
    """A shape whatever the order of its axes: transposed copies count as well."""
    return tuple(sorted(n for n in shape if n > 1))


def large(model, state) -> dict[tuple[int, ...], str]:
    """Sizes of every weight matrix and cache pool."""
    arrays = {"weight": model.weights, "pool": state.cache}
    return {
        sizes(leaf.shape): kind
        for kind, tree in arrays.items()
        for leaf in jax.tree.leaves(tree)
        if leaf.ndim > 1
    }


def copies(text) -> Counter:
    found = re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|copy-start|transpose)\(", text)
    return Counter(sizes(map(int, filter(None, dims.split(",")))) for dims in found)


def test_the_search_finds_copies():
    @jax.jit
    def double(x):
        return x.T.reshape(-1), x.at[0].set(2.0)

    assert (6, 11) in copies(double.lower(jnp.ones((11, 6))).compile().as_text())


def test_no_weight_or_cache_is_copied(program):
    model, state, text = program
    wanted = large(model, state)
    assert not {shape: wanted[shape] for shape in copies(text) if shape in wanted}


def test_nothing_leaves_the_device(program):
    _, _, text = program
    instructions = set(re.findall(r"= .*? ([a-z][a-z0-9-]*)\(", text))
    assert {"dot", "while"} & instructions
    forbidden = {"outfeed", "infeed", "send", "send-done", "recv", "recv-done"}
    assert not forbidden & instructions
    assert set(re.findall(r'custom_call_target="([^"]*)"', text)) <= {"TopK"}
    assert not re.search("callback|MoveToHost|MoveToDevice|S\\(5\\)", text)


def test_the_state_is_updated_in_place(program):
    """Every pool that goes in is the one that comes out."""
    _, state, text = program
    header = text.splitlines()[0]
    parameters = re.search(r"entry_computation_layout=\{\((.*?)\)->", header)[1]
    shapes = re.findall(r"\w+\[([\d,]*)\]", parameters)
    aliased = re.findall(r"\{\d+\}: \((\d+), \{\}, m\w+-alias\)", header)
    found = [shapes[int(i)] for i in aliased]
    pools = [",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(state.cache)]
    assert len(pools) == 3
    assert not Counter(pools) - Counter(found)
