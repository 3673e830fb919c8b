"""Replayed acceptance equals real decoding's, pass for pass; replays are compared by prompt."""

import jax
import numpy as np
import pytest
from lossless import decode, prompts_of, tokens
from tiny import tiny_model

import ddtree_jax as dd
from benchmarks.calibration import paired_p
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


def test_paired_p_is_that_of_all_signs():
    """Ten prompts that all gained one pass: 2 of 1,024 choices of signs are as extreme."""
    rng = np.random.default_rng(1)
    passes = rng.integers(20, 60, 10)
    assert paired_p(passes, passes) == 1
    assert np.isclose(paired_p(passes + 1, passes), 2 / 1024, atol=0.0006)
    assert paired_p(passes + 1, passes) == paired_p(passes, passes + 1)
    # Large differences that cancel are no effect; small ones that agree are.
    many = rng.integers(20, 60, 100)
    assert paired_p(many + np.resize([9, -9], 100), many) > 0.9
    assert paired_p(many + np.resize([1, 0], 100), many) < 0.001
    by_chance = [paired_p(many + rng.integers(-2, 3, 100), many, 1000) for _ in range(100)]
    assert 0.3 < np.mean(by_chance) < 0.7
