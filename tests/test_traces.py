"""Replayed acceptance equals that of real decoding, pass for pass."""

import jax
import pytest
from lossless import decode, prompts_of, tokens
from tiny import tiny_model

import ddtree_jax as dd
from benchmarks.traces import record, replay


@pytest.mark.parametrize("temperature", (0.0, pytest.param(1.0, marks=pytest.mark.slow)))
def test_replay_equals_decoding(temperature):
    with jax.enable_x64(True):
        model, prompts = tiny_model("float64"), prompts_of((5, 63, 2))
        sampling = [dd.Sampling(temperature, seed=seed) for seed in range(3)]
        trace = record(model, prompts, sampling, 24, top_k=8, batch=3)
        for method, budget, top_k in (("dflash", 7, 1), ("ddtree", 8, 4), ("ddtree", 33, 8)):
            state = decode(model, prompts, method, dd.Speculation(budget, top_k), sampling)
            found = replay(trace, budget, top_k)
            assert tokens(state) == [
                row[:n].tolist() for row, n in zip(trace.said, trace.count, strict=True)
            ]
            assert found.passes.tolist() == state.passes.tolist()
            assert found.hits.tolist() == state.hits(7).tolist()
