"""Many devices write the tokens one device writes: float64, a tiny model, eight virtual CPUs.

Two key heads of the drafter, and the vocabulary of 12, do not divide by most of the device counts.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from lossless import FOREVER, NEW, TREE, decode, prompts_of, tokens
from tiny import tiny_model

import ddtree_jax as dd
from ddtree_jax.checkpoint import leaves_by_path
from ddtree_jax.generate import Method
from ddtree_jax.generate import decode as run
from ddtree_jax.sharding import check_plan, make_plan, place_weights

PROMPTS = prompts_of((5, 64, 1))
SAMPLINGS = [dd.Sampling(), dd.Sampling(1.0, seed=7), dd.Sampling(0.8, top_p=0.9, seed=3)]


@pytest.fixture(autouse=True)
def float64():
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


@pytest.mark.parametrize("plan,count", [("expert", 4), ("data", 2)])
@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_rejection_is_the_same(plan, count, method):
    """Its text depends on the drafts, so one device is asked with the same method."""
    model, speculation = wide_model(), dd.Speculation(acceptance="rejection")
    how = dict(speculation=speculation, sampling=SAMPLINGS)
    alone = decode(model, PROMPTS, method, **how)
    many = decode(on_devices(model, plan, count), PROMPTS, method, **how)
    assert tokens(many)[: len(PROMPTS)] == tokens(alone)
    assert int(alone.hits(1).sum()) > 0


def test_trees_are_the_same():
    """Depths and ranks too: every device builds the tree that one device builds."""
    model = wide_model()
    alone = decode(model, PROMPTS, "ddtree", sampling=SAMPLINGS)
    for plan, count in (("expert", 2), ("tensor", 8), ("data", 4)):
        many = decode(on_devices(model, plan, count), PROMPTS, "ddtree", sampling=SAMPLINGS)
        for name in ("tokens", "depth", "rank", "nodes", "count", "reason"):
            got = np.asarray(getattr(many, name))[: len(PROMPTS)]
            np.testing.assert_array_equal(got, getattr(alone, name), err_msg=name)


@pytest.mark.parametrize(
    "plan,count,changes",
    [
        ("expert", 4, dict(n_routed_experts=6)),  # two of eight places hold no expert
        ("expert", 3, dict(num_attention_heads=4, intermediate_size=50, vocab_size=12)),
        ("tensor", 3, dict(moe_intermediate_size=32, n_shared_experts=0)),
        ("data", 4, dict(n_routed_experts=6)),
        ("expert", 2, dict(first_k_dense_replace=3)),  # no experts at all
    ],
)
def test_what_does_not_divide_is_padded(plan, count, changes):
    check(plan, count, "ddtree", wide_model(**changes))


@pytest.mark.parametrize(
    "plan,count,changes,said",
    [
        ("expert", 8, dict(num_attention_heads=4), "num_attention_heads=4 gives 4 parts"),
        ("expert", 8, dict(n_routed_experts=6), "n_routed_experts=6 gives 6 parts"),
        ("data", 8, dict(n_routed_experts=6), "n_routed_experts=6 gives 6 parts"),
        ("tensor", 2, dict(expert_bits=4), "moe_intermediate_size=32 gives 1 parts"),
    ],
)
def test_too_many_devices_are_refused(plan, count, changes, said):
    mesh = Mesh(np.array(jax.devices()[:count]), ("devices",))
    config = replace(wide_model().config, **changes)
    with pytest.raises(ValueError, match=f"plan='{plan}' on {count} devices: {said}"):
        check_plan(make_plan(plan, mesh), config)


@pytest.mark.parametrize("plan", ("expert", "tensor", "data"))
@pytest.mark.parametrize("favoured", ([0], [15], range(4, 8)), ids=str)
def test_uneven_routing(plan, favoured):
    """All rows at one expert, or at one device's experts, and so none at a device's."""
    k = min(3, len(favoured))
    model = wide_model(num_experts_per_tok=k)
    bias = np.full(16, -10.0, np.float32)
    bias[list(favoured)] = 10.0
    model = replace(model, weights=with_leaf(model, "e_score_correction_bias", lambda _: bias))
    state = check(plan, 4, "ddtree", model)
    assert not bool(state.error.any())


@pytest.mark.parametrize("plan", ("expert", "data"))
def test_a_broken_request_ends_alone(plan):
    """NaN in one request's cache, or in a device's share of the rows, is no other request's."""
    model = wide_model()
    plain = tokens(decode(model, PROMPTS, "autoregressive", sampling=SAMPLINGS))
    many = on_devices(model, plan, 2)
    step = Method("ddtree", TREE, many.weights)
    state = dd.prefill(many, PROMPTS, SAMPLINGS, NEW)
    page = 1 * state.block_tables.shape[1]  # of the second request, the first device's
    latents = state.cache.latents.at[:, page, 3].set(np.nan)
    state = replace(state, cache=replace(state.cache, latents=latents))
    state, running = run(many.weights, state, step, FOREVER)
    assert state.error.tolist()[:3] == [False, True, False] and not bool(running)
    got = tokens(state)
    assert got[0] == plain[0] and got[1] == plain[1][:1] and got[2] == plain[2]


def with_leaf(model, name, change):
    """The weights with every leaf of this name changed."""
    paths = leaves_by_path(model.config, model.weights.dtype)
    leaves = zip(paths, model.weights.target, strict=True)
    target = tuple(
        jax.numpy.asarray(change(leaf), leaf.dtype) if path.endswith(name) else leaf
        for path, leaf in leaves
    )
    return replace(model.weights, target=target)
