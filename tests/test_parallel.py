"""Many devices write the tokens one device writes: float64, a tiny model, eight virtual CPUs.

Two key heads of the drafter, and the vocabulary of 12, do not divide by most of the device counts.
"""

import functools
import itertools
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from lossless import FOREVER, NEW, TREE, decode, prompts_of, tokens, use_knowing_drafter
from tiny import tiny_model

import ddtree_jax as dd
from ddtree_jax.checkpoint import leaves_by_path
from ddtree_jax.decide import best_candidates, coupled_tokens
from ddtree_jax.generate import Method
from ddtree_jax.generate import decode as run
from ddtree_jax.parallel import AXIS
from ddtree_jax.sampling import Law
from ddtree_jax.sharding import check_plan, make_plan, on_mesh, place_weights
from ddtree_jax.step import draft

COUNTS = (1, 2, 4, 8)
PLANS = ("expert", "tensor", "data")
METHODS = ("autoregressive", "dflash", "ddtree")
REQUESTS = range(1, 10)
PROMPTS = prompts_of((5, 64, 1, 2, 63, 33, 3, 48, 17))  # ragged; prefill is compiled once
GREEDY = [dd.Sampling()] * 9
SAMPLED = [
    dd.Sampling(*law, seed=i)
    for i, law in enumerate([(1.0,), (0.7,), (0.8, 0, 0.9), (1.0, 3), (1.0, 0, 1.0, 0.1)] * 2)
]
MIXED = [dd.Sampling(), *SAMPLED[:8]]
LEAST = 9  # tokens before a stop, of requests that have one


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def wide_model(**changes):
    changes = dict(num_attention_heads=8, n_routed_experts=16, num_experts_per_tok=3) | changes
    return tiny_model("float64", **changes)


@functools.cache
def placed(plan, count):
    return on_devices(wide_model(), plan, count)


def mesh_of(count):
    return Mesh(np.array(jax.devices()[:count]), ("devices",))


def on_devices(model, plan, count):
    return replace(model, weights=place_weights(model.weights, make_plan(plan, mesh_of(count))))


@functools.cache
def with_stops(law):
    """The nine requests of a law; two of three may not say at first what then ends them."""
    laws = {"greedy": GREEDY, "sampled": SAMPLED[:9], "mixed": MIXED}[law]
    said = tokens(decode(wide_model(), PROMPTS, "autoregressive", sampling=laws))
    return [
        s if i % 3 == 1 else replace(s, stop_ids=(said[i][3],), min_new_tokens=LEAST)
        for i, s in enumerate(laws)
    ]


@functools.cache
def plainly(law):
    """What one device says with plain decoding; a request says the same in any batch."""
    laws = with_stops(law)
    said = tokens(decode(wide_model(), PROMPTS, "autoregressive", sampling=laws))
    for one, tokens_ in zip(laws, said, strict=True):
        stops = [i for i, token in enumerate(tokens_) if token in one.stop_ids]
        assert stops in ([], [len(tokens_) - 1]) and min(stops, default=LEAST) >= LEAST
    assert min(map(len, said)) < NEW  # a stop was said where it may be
    return said


def compare(monkeypatch, plan, count, method, requests):
    """Both laws, through one program, with a drafter that often knows what comes, and some
    requests that may not stop yet."""
    prompts = PROMPTS[:requests]
    for law in ("greedy", "sampled"):
        plain, samplings = plainly(law)[:requests], with_stops(law)[:requests]
        with monkeypatch.context() as patch:
            model = placed(plan, count)
            if method != "autoregressive":
                model = use_knowing_drafter(patch, model, prompts, plain)
            state = decode(model, prompts, method, sampling=samplings)
        assert tokens(state)[:requests] == plain, law
        assert method == "autoregressive" or int(np.asarray(state.depth).max()) >= 2


# Any two of plan, devices and method meet, and every number of requests comes.
PAIRS = [
    (plan, count, METHODS[(i + j) % 3], REQUESTS[(3 * j + 2 * i + 4) % 9])
    for i, plan in enumerate(PLANS)
    for j, count in enumerate(COUNTS)
]


def test_the_cases_cover_all_pairs():
    columns = (PLANS, COUNTS, METHODS)
    for a, b in itertools.combinations(range(3), 2):
        met = {(case[a], case[b]) for case in PAIRS}
        assert met == set(itertools.product(columns[a], columns[b])), (a, b)
    assert {case[3] for case in PAIRS} == set(REQUESTS)
    # More requests than devices, three devices with none, and that with speculation.
    assert ("data", 8, "ddtree", 9) in PAIRS


@pytest.mark.parametrize("plan,count,method,requests", PAIRS)
def test_pairwise(monkeypatch, plan, count, method, requests):
    compare(monkeypatch, plan, count, method, requests)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("method", METHODS)
def test_full_product(monkeypatch, plan, count, method):
    """Every plan, number of devices, method and number of requests, greedy and sampled."""
    for requests in REQUESTS:
        compare(monkeypatch, plan, count, method, requests)


def check(plan, count, method, model, **how):
    prompts, laws = PROMPTS[:3], MIXED[:3]
    plain = tokens(decode(model, prompts, "autoregressive", sampling=laws))
    state = decode(on_devices(model, plan, count), prompts, method, sampling=laws, **how)
    assert tokens(state)[:3] == plain
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan,count,method",
    [
        ("expert", 4, "ddtree"),
        ("expert", 4, "dflash"),
        ("data", 2, "ddtree"),
        ("data", 2, "dflash"),
    ],
)
def test_rejection_is_the_same(plan, count, method):
    """Its text depends on the drafts, so one device is asked with the same method."""
    laws = with_stops("mixed")[:3]
    how = dict(speculation=dd.Speculation(acceptance="rejection"), sampling=laws)
    alone = decode(wide_model(), PROMPTS[:3], method, **how)
    many = decode(placed(plan, count), PROMPTS[:3], method, **how)
    assert tokens(many)[:3] == tokens(alone)
    assert int(alone.hits(1).sum()) > 0
    said = tokens(alone)
    assert not any(t in s.stop_ids for s, one in zip(laws, said, strict=True) for t in one[:LEAST])


@pytest.mark.parametrize("count", (2, 8))
def test_ties_go_to_the_lowest_id(count):
    """Also between columns of the vocabulary that lie on different devices."""
    plan, r, n, vocab = make_plan("expert", mesh_of(count)), 3, 2, 12
    best = [[(0, 1, 2, 3, 4), (1, 6, 7, 10, 11)], [(5, 6, 9, 11), (2, 3, 4, 8)]]
    best.append([tuple(range(12)), (0, 11, 5, 6)])
    logits = np.zeros((r, n, vocab))
    for row, column in np.ndindex(r, n):
        logits[row, column, list(best[row][column])] = 1.0
    padding = np.full((r, n, -vocab % count), 9.0)  # no token
    law, at = Law.of([dd.Sampling()] * r), np.zeros((r, n), np.int32)
    stops, barred = np.full((r, 1), -1, np.int32), np.zeros((r, n), bool)

    def decide(logits):
        own = plan.within()
        chosen = coupled_tokens(own, logits, law, at, None, stops, barred, vocab)
        _, drafts = best_candidates(own, logits, law, at, None, 4, vocab, True)
        return chosen, drafts

    columns, everywhere = PartitionSpec(None, None, AXIS), PartitionSpec()
    run = jax.shard_map(
        decide, mesh=plan.mesh, in_specs=columns, out_specs=everywhere, check_vma=False
    )
    chosen, drafts = run(np.concatenate([logits, padding], axis=-1))
    wanted = np.array([[sorted(ids)[:4] for ids in row] for row in best])
    np.testing.assert_array_equal(chosen, wanted[..., 0])
    np.testing.assert_array_equal(drafts, wanted)


def test_own_rows_are_those_that_were_given():
    """Where all devices route the rows of all, each finds its own again."""
    plan = make_plan("data", mesh_of(4))
    own, spec = plan.within(), PartitionSpec(AXIS)
    x = np.arange(24).reshape(12, 2)
    there_and_back = jax.shard_map(
        lambda x: own.own_rows(own.all_rows(x)), mesh=plan.mesh, in_specs=spec, out_specs=spec
    )
    np.testing.assert_array_equal(there_and_back(x), x)


@pytest.mark.slow
@pytest.mark.parametrize("plan,count", [("data", 2), ("expert", 2)])
def test_experts_touched(plan, count):
    """Where rows of all devices are routed together, each counts those of its own requests."""
    how = dict(method="dflash", max_new_tokens=9, count_experts=True)
    alone = dd.generate(wide_model(), PROMPTS[:3], **how)
    for a, b in zip(alone, dd.generate(placed(plan, count), PROMPTS[:3], **how), strict=True):
        assert a.tokens == b.tokens and a.experts_touched == b.experts_touched
    assert len({tuple(a.experts_touched) for a in alone}) == 3  # a mix-up would show


def drafted(model):
    """The drafter's logits after prefill, gathered from all devices: [requests, horizon, vocab]."""
    plan, vocab = model.weights.plan, model.config.vocab_size
    state = dd.prefill(model, PROMPTS[:3], MIXED[:3], NEW)

    def run(weights, state):
        block = weights.drafter_config.block_size
        logits = draft(weights.target_module(), weights.drafter_module(), state, block)
        if plan.mesh is not None:
            axis = 0 if plan.splits("requests") else 2
            logits = jax.lax.all_gather(logits, AXIS, axis=axis, tiled=True)
        return state, logits

    return jax.jit(partial(on_mesh, run, flag=True))(model.weights, state)[1][:3, :, :vocab]


@pytest.mark.parametrize("plan,count", [("expert", 2), ("expert", 8), ("data", 2)])
def test_drafters_agree(plan, count):
    """A wrong draft costs passes, never a token: nothing else here would see it."""
    wanted, found = drafted(wide_model()), drafted(placed(plan, count))
    assert wanted.dtype == found.dtype == np.float64
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_trees_are_the_same():
    """Depths and ranks too: every device builds the tree that one device builds."""
    alone = decode(wide_model(), PROMPTS[:3], "ddtree", sampling=MIXED[:3])
    assert int(np.asarray(alone.depth).max()) >= 1  # something was accepted
    for plan, count in (("expert", 2), ("tensor", 8), ("data", 4)):
        many = decode(placed(plan, count), PROMPTS[:3], "ddtree", sampling=MIXED[:3])
        for name in ("tokens", "depth", "rank", "nodes", "count", "reason"):
            got = np.asarray(getattr(many, name))[:3]
            np.testing.assert_array_equal(got, getattr(alone, name), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan,count,changes",
    [
        ("expert", 4, dict(n_routed_experts=6)),  # two of eight places hold no expert
        ("expert", 3, dict(num_attention_heads=4, intermediate_size=50, vocab_size=12)),
        ("tensor", 3, dict(moe_intermediate_size=32, n_shared_experts=0)),
        ("tensor", 2, dict(moe_intermediate_size=96, expert_bits=4)),  # three groups of 32
        ("data", 4, dict(n_routed_experts=6)),
        ("expert", 2, dict(first_k_dense_replace=2)),  # no experts at all
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
        ("expert", 8, dict(vocab_size=7), "vocab_size=7 gives 7 parts"),
        ("tensor", 8, dict(vocab_size=7), "vocab_size=7 gives 7 parts"),
    ],
)
def test_too_many_devices_are_refused(plan, count, changes, said):
    config = replace(wide_model().config, **changes)
    with pytest.raises(ValueError, match=f"plan='{plan}' on {count} devices: {said}"):
        check_plan(make_plan(plan, mesh_of(count)), config)


@pytest.mark.parametrize("plan", ("expert", slow("tensor"), slow("data")))
@pytest.mark.parametrize("favoured", ([0], slow([15]), slow(range(4, 8))), ids=str)
def test_uneven_routing(plan, favoured):
    """All rows at one expert, or at one device's experts, and so none at a device's."""
    k = min(3, len(favoured))
    model = wide_model(num_experts_per_tok=k)
    bias = np.full(16, -10.0, np.float32)
    bias[list(favoured)] = 10.0
    model = replace(model, weights=with_leaf(model, "e_score_correction_bias", lambda _: bias))
    state = check(plan, 4, "ddtree", model)
    assert not bool(state.error.any())


@pytest.mark.parametrize("plan", (slow("expert"), "data"))
def test_a_broken_request_ends_alone(plan):
    """NaN in one request's cache, or in a device's share of the rows, is no other request's."""
    plain, many = plainly("mixed"), placed(plan, 2)
    step = Method("ddtree", TREE, many.weights)
    state = dd.prefill(many, PROMPTS[:3], with_stops("mixed")[:3], NEW)
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
