"""Many devices write the tokens one device writes: float64, a tiny model, eight virtual CPUs.

Two key heads of the drafter, and the vocabulary of 12, do not divide by most of the device counts.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from lossless import TREE, decode, prompts_of, tokens
from tiny import tiny_model

import ddtree_jax as dd
from ddtree_jax.sharding import make_plan, place_weights

PROMPTS = prompts_of((5, 64, 1))
SAMPLINGS = [dd.Sampling(), dd.Sampling(1.0, seed=7), dd.Sampling(0.8, top_p=0.9, seed=3)]


@pytest.fixture(autouse=True)
def float64(quick_compile):
    with jax.enable_x64(True):
        yield


def wide_model(**changes):
    changes = dict(num_attention_heads=8, n_routed_experts=16, num_experts_per_tok=3) | changes
    return tiny_model("float64", **changes)


def on_devices(model, plan, count):
    mesh = Mesh(np.array(jax.devices()[:count]), ("devices",))
    return replace(model, weights=place_weights(model.weights, make_plan(plan, mesh)))


def check(plan, count, method, model=None, **how):
    model = wide_model() if model is None else model
    plain = tokens(decode(model, PROMPTS, "autoregressive", sampling=SAMPLINGS))
    state = decode(on_devices(model, plan, count), PROMPTS, method, sampling=SAMPLINGS, **how)
    assert tokens(state)[: len(PROMPTS)] == plain
    return state


@pytest.mark.parametrize(
    "plan,count,method",
    [
        ("expert", 2, "autoregressive"),
        ("expert", 4, "dflash"),
        ("expert", 8, "ddtree"),
        ("tensor", 2, "ddtree"),
        ("tensor", 4, "autoregressive"),
        ("tensor", 8, "dflash"),
        ("data", 2, "dflash"),
        ("data", 4, "ddtree"),
        ("data", 8, "autoregressive"),
    ],
)
def test_same_tokens(plan, count, method):
    state = check(plan, count, method, speculation=TREE)
    if method != "autoregressive":
        assert int(state.hits(1).sum()) > 0
