"""What benchmarks/acceptance.py makes of its recordings, and the figures that are committed."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_model

from benchmarks import acceptance, results_file
from benchmarks.traces import Trace
from ddtree_jax.loading import BUNDLED
from ddtree_jax.model.attention import expanded_attention
from ddtree_jax.tokenizer import Tokenizer


def test_repeats_are_counted_three_times():
    phrase = list(range(8))
    assert acceptance.repeating([*phrase, 9, *phrase, 8, *phrase])
    assert not acceptance.repeating([*phrase, 9, *phrase, 8, *phrase[:7]])
    assert acceptance.repeating([1] * 10) and not acceptance.repeating([1] * 9)
    assert not acceptance.repeating([])


def test_paired_p_is_small_where_the_tree_is_better():
    rng = np.random.default_rng(0)
    chain = SimpleNamespace(by_prompt=rng.uniform(2, 4, 64))
    tree = SimpleNamespace(by_prompt=chain.by_prompt + rng.normal(0.3, 0.2, 64))
    assert acceptance.paired_p(tree, chain) < 1e-6 < 0.99 < acceptance.paired_p(chain, tree)


def test_nats_and_bits_per_byte(monkeypatch):
    model = tiny_model()
    ids = np.array([3, 1, 4, 1, 5, 9, 2, 6, 0, 0, 0, 0], np.int32)
    target, positions = model.weights.target_module(), jnp.arange(8, dtype=jnp.int32)
    rows = target(jnp.asarray(ids[:8]), positions, positions >= 0, expanded_attention)
    logits = np.asarray(target.lm_head(rows.hidden), np.float64)[:-1]
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wanted = -np.log(chances[np.arange(7), ids[1:8]]).sum()
    assert float(acceptance._nats(model.weights, ids, 8)) == pytest.approx(wanted, rel=1e-5)

    monkeypatch.setattr(acceptance, "_nats", lambda weights, tokens, n: (n - 1) * np.log(2) * 3)
    told = Tokenizer(BUNDLED / "kimi-nano")
    texts = ["def encode(text):\n    return", "Überall sonst."]
    tokens = [told.encode(text) for text in texts]
    size = sum(len(told.decode_bytes(t[1:])) for t in tokens)
    bits = 3 * sum(len(t) - 1 for t in tokens)  # three a token
    made = SimpleNamespace(weights=None, tokenizer=told)
    assert acceptance.bits_per_byte(made, texts) == pytest.approx(bits / size)


def test_summary(monkeypatch):
    """Ratios are the tree's over the chain's, of the budgets named; loops and ends are counted."""
    said = np.array([[1] * 10, [1] * 10, list(range(10)), list(range(10))])
    names = [(f"{kind}_{size}", t) for kind in ("code", "prose") for size in ("short", "long")
             for t in ("greedy", "t1")]  # fmt: skip
    rows = {name: None for name in Trace.__dataclass_fields__}
    rows |= {name: np.zeros(4) for name in rows} | {"said": said, "count": np.array([10, 4, 10, 9])}
    traces = {name: Trace(**rows) for name in names}

    def replay(trace, budget, top_k):
        length = {(5, 1): 2.0, (7, 4): 2.2, (8, 4): 2.5, (16, 8): 3.0, (32, 8): 4.0}[budget, top_k]
        spread = np.linspace(0, 0.1, len(trace.count))
        return SimpleNamespace(accept_length=length, by_prompt=length + length * spread)

    monkeypatch.setattr(acceptance, "replay", replay)
    monkeypatch.setattr(acceptance, "load", lambda mix, prompts: [mix])
    monkeypatch.setattr(acceptance, "real_repeats", lambda *_: 0.25)
    monkeypatch.setattr(acceptance, "bits_per_byte", lambda model, texts: len(texts[0]))
    model = SimpleNamespace(drafter_config=SimpleNamespace(horizon=5))
    found = acceptance.summarise(model, traces, 4)
    assert found["chain_greedy_code"] == 2 and found["ddtree_b16_k8_t1_prose"] == 3
    assert found["ddtree_b16_over_chain_code"] == 1.5 and found["ddtree_b7_over_chain_code"] == 1.1
    assert found["ddtree_b32_over_chain_code_t1"] == 2
    assert found["paired_p_b16"] < 0.01 and found["paired_p_b32_t1_prose"] < 0.01
    assert found["repeat8_fraction"] == found["repeat8_fraction_t1"] == 0.25
    assert found["ended_early_fraction_greedy"] == 0.5
    assert found["bits_per_byte_prose"] == len("prose_long")


def test_committed_figures():
    """They are what the project asks of kimi-nano, and all of them are there."""
    found = json.loads((results_file.RESULTS / "acceptance.json").read_text())
    summary, points = found["summary"], found["points"]
    assert summary["chain_greedy_code"] >= 3.0 and summary["ddtree_b16_over_chain_code"] >= 1.04
    for row in ("b16", "b32"):
        for suffix in ("", "_prose", "_t1", "_t1_prose"):
            assert summary[f"paired_p_{row}{suffix}"] < 0.01
    assert summary["repeat8_fraction"] <= summary["repeat8_fraction_greedy"] <= 0.10
    assert summary["bits_per_byte_code"] <= 1.5 and summary["bits_per_byte_prose"] <= 2.2
    assert summary["real_decodings_differ"] == 0
    cases = {(p["mix"], p["temperature"], p["method"], p["budget"], p["top_k"]) for p in points}
    assert len(cases) == len(points) == 8 * (1 + 6 * 4) and {p["prompts"] for p in points} == {64}
