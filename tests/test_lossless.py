"""Speculation changes no token: float64, a tiny model, every method against plain decoding.

The caches are poisoned with NaN wherever no committed token is, so a row that reads past its
prefix, or a tree row that sees padding, cannot go unnoticed.
"""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lossless import NEW, decode, poison, prompts_of, tokens, use_knowing_drafter
from tiny import tiny_model

import ddtree_jax as dd
from ddtree_jax import filters
from ddtree_jax import step as steps
from ddtree_jax.generate import Method
from ddtree_jax.generate import decode as run
from ddtree_jax.prefill import prefill
from ddtree_jax.state import DecodeState

BLOCKS = (2, 4, 8)
BUDGETS = (0, 1, 2, 3, 7, 8, 9, 20, 31, 33, 64)
LENGTHS = (1, 2, 63, 64, 65, 100)  # of prompts
COUNTS = (1, 2, 3, 4, 5)  # of requests
FILTERS = (dict(top_k=8, top_p=0.95, min_p=0.02), dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1))
hits = jax.jit(DecodeState.hits, static_argnames="horizon")  # op by op it takes longer than a case


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def samplings(requests):
    """Those of a batch: greedy, at two temperatures, and with filters, together and one by one."""
    for t in (0.0, 0.7, 1.0):
        yield [dd.Sampling(t, seed=7)] * requests
    mixed = [FILTERS[i % len(FILTERS)] for i in range(requests)]
    yield [dd.Sampling(0.8 + i / 10, seed=i, **one) for i, one in enumerate(mixed)]


@functools.cache
def plainly(lengths):
    """What plain decoding says with each of the samplings."""
    model, prompts = tiny_model("float64"), prompts_of(lengths)
    return [
        tokens(decode(model, prompts, "autoregressive", sampling=each))
        for each in samplings(len(lengths))
    ]


def check(monkeypatch, block, budget, lengths, knowing, method="ddtree"):
    model, prompts = tiny_model("float64"), prompts_of(lengths)
    speculation = dd.Speculation(budget, 4, block)
    deepest = 0
    for sampling, plain in zip(samplings(len(lengths)), plainly(lengths), strict=True):
        drafted = model
        if knowing:
            drafted = use_knowing_drafter(monkeypatch, model, prompts, plain)
        state = decode(drafted, prompts, method, speculation, sampling)
        assert tokens(state) == plain, (sampling, block, budget)
        deepest = max(deepest, int((np.asarray(hits(state, block)).sum(axis=0) > 0).sum()))
    if knowing and budget >= 7:
        assert deepest >= min(block - 1, 2)


# By number of requests, ragged: every length in a batch of every size.
BATCHES = {
    count: [
        tuple(LENGTHS[(start + i) % len(LENGTHS)] for i in range(count))
        for start in range(0, len(LENGTHS), count)
    ]
    for count in COUNTS
}


def batch(count, index):
    return BATCHES[count][index % len(BATCHES[count])]


# Every (budget, count) pair; blocks, lengths and drafters dealt out so that all others meet too.
PAIRS = [
    ("ddtree", BLOCKS[(i + j) % 3], budget, batch(count, i + j), (i + 2 * j) % 3 > 0)
    for i, budget in enumerate(BUDGETS)
    for j, count in enumerate(COUNTS)
]
CHAINS = [
    ("dflash", BLOCKS[j % 3], None, batch(count, j * (j + 1) // 2), j % 3 > 0)
    for j, count in enumerate(COUNTS)
]


def test_the_cases_cover_all_pairs():
    """Of method, block, budget, prompt length, requests and drafter; a chain has no budget."""
    wanted = set()
    methods, drafters = ("ddtree", "dflash"), (False, True)
    columns = methods, BLOCKS, (*BUDGETS, None), LENGTHS, COUNTS, drafters
    for (a, left), (b, right) in itertools.combinations(enumerate(columns), 2):
        wanted |= {(a, x, b, y) for x in left for y in right}
    chains = {(0, "ddtree", 2, None)} | {(0, "dflash", 2, b) for b in BUDGETS}
    # Five chains: of block, length and requests they meet each value, not each pair.
    chains |= {(a, x, b, y) for a, x, b, y in wanted if None in (x, y) and a != 0}
    met = set()
    for method, block, budget, lengths, knowing in (*PAIRS, *CHAINS):
        for length in lengths:
            case = enumerate((method, block, budget, length, len(lengths), knowing))
            met |= {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(case, 2)}
    assert wanted - met <= chains, wanted - met - chains


@pytest.mark.parametrize("method,block,budget,lengths,knowing", PAIRS + CHAINS)
def test_pairwise(monkeypatch, method, block, budget, lengths, knowing):
    check(monkeypatch, block, budget or 0, lengths, knowing, method)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("block", BLOCKS)
def test_full_product(monkeypatch, block, count):
    """Every prompt length in every number of requests; batches of a number share their programs."""
    for index, budget in enumerate((None, *BUDGETS)):
        for turn, lengths in enumerate(BATCHES[count]):
            knowing = (index + turn + block + count) % 2 == 0
            with monkeypatch.context() as patch:
                if budget is None:
                    check(patch, block, 0, lengths, knowing, method="dflash")
                else:
                    check(patch, block, budget, lengths, knowing)


def test_alone_or_in_any_batch():
    """A request's tokens do not depend on its neighbours, nor on its place among them."""
    model, prompts = tiny_model("float64"), prompts_of((1, 2, 63, 64, 65))
    cases = [
        [dd.Sampling(temperatures[i % 2], seed=i) for i in range(5)]
        for temperatures in ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0))
    ]
    *_, filtered = samplings(5)
    for each in (*cases, filtered):

        def run(order, each=each):
            batch = [prompts[i] for i in order]
            return tokens(decode(model, batch, "ddtree", sampling=[each[i] for i in order]))

        alone = [run([i])[0] for i in range(5)]
        for order in ((0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (3, 3)):
            assert run(order) == [alone[i] for i in order]


@pytest.mark.parametrize("method", (pytest.param("dflash", marks=pytest.mark.slow), "ddtree"))
def test_thresholds_below_the_head(monkeypatch, method):
    """top-k past the HEAD largest tokens, and a nucleus that is wider: found by counting."""
    counted, by_counting = [], filters._by_counting

    def spy(*arguments):
        jax.debug.callback(lambda: counted.append(1))
        return by_counting(*arguments)

    model, prompts = tiny_model("float64", vocab_size=300), prompts_of((5, 64), vocab=300)
    weights = replace(model.weights, drafter_config=replace(model.drafter_config, vocab_size=300))
    model = replace(model, weights=weights)
    jax.clear_caches()
    monkeypatch.setattr(filters, "_by_counting", spy)
    for wide in (dict(top_k=200), dict(top_p=0.98), dict(top_k=220, top_p=0.99, min_p=0.001)):
        sampling = [dd.Sampling(2.0, seed=1, **wide), dd.Sampling(3.0, seed=2, **wide)]
        plain = tokens(decode(model, prompts, "autoregressive", sampling=sampling))
        jax.effects_barrier()
        assert len(counted) >= NEW / 2
        with monkeypatch.context() as patch:
            drafted = use_knowing_drafter(patch, model, prompts, plain)
            state = decode(drafted, prompts, method, dd.Speculation(20, 4), sampling)
        assert tokens(state) == plain and int(hits(state, 7).sum()) > 5
        counted.clear()
    jax.clear_caches()


def test_committed_caches_equal_a_fresh_prefill():
    """After paths that skip rows, caches and lengths are as if the tokens had been the prompt."""
    model, prompts = tiny_model("float64"), prompts_of((5, 63))
    state = decode(model, prompts, "ddtree", dd.Speculation(20, 8), dd.Sampling(1.0, seed=7))
    assert int(state.hits(1).sum()) > 5
    compare_with_prefill(model, prompts, state)


def compare_with_prefill(model, prompts, state):
    said = [p + t for p, t in zip(prompts, tokens(state), strict=True)]
    # The last pass may commit rows behind the cut at the limit: compare what both hold.
    shared = [min(int(n), len(s)) for n, s in zip(state.lengths, said, strict=True)]
    fresh = prefill(model, [s[:n] for s, n in zip(said, shared, strict=True)], max_new_tokens=8)
    for r, n in enumerate(shared):
        for ours, theirs in zip(
            jax.tree.leaves(state.cache), jax.tree.leaves(fresh.cache), strict=True
        ):
            mine = ours[:, state.block_tables[r]].reshape(ours.shape[0], -1, *ours.shape[3:])
            other = theirs[:, fresh.block_tables[r]].reshape(ours.shape[0], -1, *ours.shape[3:])
            np.testing.assert_allclose(mine[:, :n], other[:, :n], rtol=0, atol=1e-9)


def wrong_rows(tree):
    """The original fault: the block size taken for the number of tree rows."""
    requests = tree.tokens.shape[0]
    return jnp.minimum(jnp.arange(requests + 1) * 8, tree.tokens.size).astype(jnp.int32)


def visible_siblings(original):
    """Every node sees its siblings (and cousins): all nodes of its own depth."""

    def verify(target, state, tree, taps):
        used = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None] < tree.size[:, None]
        level = (tree.depth[:, :, None] == tree.depth[:, None, :]) & used[:, None] & used[..., None]
        bits = 2 ** jnp.arange(used.shape[1], dtype=jnp.uint32)[None, None]
        words = jnp.where(level, bits, 0).sum(-1, dtype=jnp.uint32)[..., None]
        return original(target, state, replace(tree, ancestors=tree.ancestors | words), taps)

    return verify


MUTANTS = {
    "block size for rows": ("row_starts", lambda _: wrong_rows),
    "siblings are visible": ("verify", visible_siblings),
    "depth off by one": (
        "node_positions",
        lambda original: lambda s, t: original(s, t) + (t.depth > 0),
    ),
    "position by node instead of depth": (
        "node_positions",
        lambda _: (
            lambda s, t: s.lengths[:, None] + jnp.arange(t.depth.shape[1], dtype=jnp.int32)[None]
        ),
    ),
    "taps and latents by count": (
        "path_rows",
        lambda original: (
            lambda t, p: original(
                t, jnp.broadcast_to(jnp.arange(p.shape[1], dtype=jnp.int32)[None], p.shape)
            )
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    """Each fault makes the comparison with plain decoding, or with a fresh prefill, fail."""
    model, prompts = tiny_model("float64"), prompts_of((5, 63, 2))
    plain = tokens(decode(model, prompts, "autoregressive"))
    attribute, mutate = MUTANTS[name]
    jax.clear_caches()
    monkeypatch.setattr(steps, attribute, mutate(getattr(steps, attribute)))
    drafted = use_knowing_drafter(monkeypatch, model, prompts, plain)
    state = decode(drafted, prompts, "ddtree", dd.Speculation(20, 8))
    jax.clear_caches()
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        assert tokens(state) == plain


def test_taps_of_the_path_reach_the_drafter(monkeypatch):
    """The drafter's context by count instead of by accepted index costs no token: compare it."""
    model, prompts = tiny_model("float64"), prompts_of((5, 63))
    original = steps.commit

    def by_count(cache, drafter, state, tree, latents, taps, path, length):
        right = original(cache, drafter, state, tree, latents, taps, path, length)
        count = jnp.broadcast_to(jnp.arange(path.shape[1], dtype=jnp.int32)[None], path.shape)
        wrong = original(cache, drafter, state, tree, latents, taps, count, length)
        return replace(right, keys=wrong.keys, values=wrong.values)

    jax.clear_caches()
    monkeypatch.setattr(steps, "commit", by_count)
    state = decode(model, prompts, "ddtree", dd.Speculation(20, 8), dd.Sampling(1.0, seed=7))
    jax.clear_caches()
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        compare_with_prefill(model, prompts, state)


def test_unused_nodes_may_hold_anything(monkeypatch):
    """Nodes beyond a tree's size embed as NaN; chains leave most of a wide tree unused."""
    model = tiny_model("float64", vocab_size=13)
    model = replace(model, weights=replace(model.weights, drafter_config=replace(
        model.drafter_config, vocab_size=13)))  # fmt: skip
    target = list(model.weights.target)
    shapes = [leaf.shape for leaf in target]
    embed = shapes.index((13, 32))  # sorted paths: embed_tokens before lm_head
    target[embed] = target[embed].at[12].set(jnp.nan)
    head = len(shapes) - 1 - shapes[::-1].index((13, 32))
    target[head] = target[head].at[12].set(target[head][11] / 2)  # never the likeliest
    model = replace(model, weights=replace(model.weights, target=tuple(target)))
    prompts = prompts_of((5, 64))
    plain = tokens(decode(model, prompts, "autoregressive"))
    assert not any(12 in t for t in plain)
    original = steps.build

    def build(*arguments):
        tree = original(*arguments)
        unused = jnp.arange(tree.tokens.shape[1])[None] >= tree.size[:, None]
        return replace(tree, tokens=jnp.where(unused, 12, tree.tokens))

    jax.clear_caches()
    monkeypatch.setattr(steps, "build", build)
    state = decode(model, prompts, "ddtree", dd.Speculation(20, 1))
    jax.clear_caches()
    assert tokens(state) == plain and not bool(state.error.any())


def test_nan_drafts_change_nothing(monkeypatch):
    model, prompts = tiny_model("float64"), prompts_of((5, 64))
    plain = tokens(decode(model, prompts, "autoregressive"))
    drafter = tuple(jnp.full_like(leaf, jnp.nan) for leaf in model.weights.drafter)
    broken = replace(model, weights=replace(model.weights, drafter=drafter))
    for method in ("dflash", "ddtree"):
        state = decode(broken, prompts, method)
        assert tokens(state) == plain and not bool(state.error.any())
    # A chain drawn from them has no token: every pass draws one, with the position's noise.
    sampling = dd.Sampling(1.0, seed=3)
    plain = tokens(decode(model, prompts, "autoregressive", sampling=sampling))
    state = decode(broken, prompts, "dflash", dd.Speculation(acceptance="rejection"), sampling)
    assert tokens(state) == plain and not bool(state.error.any())


def test_nan_targets_end_their_request_only():
    """A request whose cache turned NaN stops with an error and no token of it; others go on."""
    model, prompts = tiny_model("float64"), prompts_of((5, 64, 9))
    plain = tokens(decode(model, prompts, "autoregressive"))
    for method in ("autoregressive", "dflash", "ddtree"):
        state = poison(prefill(model, prompts, max_new_tokens=24))
        page = state.block_tables[1, 0]
        latents = state.cache.latents.at[:, page, 3].set(jnp.nan)
        state = replace(state, cache=replace(state.cache, latents=latents))
        step = Method(method, dd.Speculation(), model.weights)
        state, running = run(model.weights, state, step, 1000)
        assert state.error.tolist() == [False, True, False] and not bool(running)
        got = tokens(state)
        assert got[0] == plain[0] and got[2] == plain[2] and got[1] == plain[1][:1]
