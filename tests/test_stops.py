"""Stop ids, stop strings, limits: the first cause in token order; metrics as if it ended there."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from checkpoint import write_checkpoint
from tiny import tiny_model

import ddtree_jax as dd
from ddtree_jax.step import draft_and_walk
from ddtree_jax.stops import find, held_back

METHODS = ("autoregressive", "dflash", "ddtree")
PROMPT = [1, 2, 3]
TREE = dd.Speculation()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return dd.load(write_checkpoint(tmp_path_factory.mktemp("stops") / "model"))


def whole(model, method="autoregressive", **sampling):
    return dd.generate(model, "ab", method, sampling=dd.Sampling(**sampling), max_new_tokens=32)[0]


@pytest.mark.parametrize("method", METHODS)
def test_stop_ids_cut_an_accepted_run(method):
    model = tiny_model()
    plain = dd.generate(model, [PROMPT], "autoregressive", max_new_tokens=24)[0].tokens
    firsts = [plain.index(token) for token in (plain[0], plain[1], plain[3], plain[13])]
    assert firsts == [0, 1, 3, 13]
    samplings = [dd.Sampling(stop_ids=[plain[first]]) for first in firsts]
    cut = dd.generate(model, [PROMPT] * 4, method, sampling=samplings, max_new_tokens=24)
    for first, done in zip(firsts, cut, strict=True):
        assert done.tokens == plain[: first + 1] and done.finish_reason == "stop"
    # A stop id that is the last allowed token is a stop.
    limit = dd.generate(model, [PROMPT] * 4, method, TREE, samplings[3], firsts[3] + 1)
    assert all(done.tokens == cut[3].tokens and done.finish_reason == "stop" for done in limit)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_stop_id_at_a_limit_of_one(method):
    model = tiny_model()
    (said,) = dd.generate(model, [PROMPT], method, max_new_tokens=1)[0].tokens
    done = dd.generate(model, [PROMPT], method, TREE, dd.Sampling(stop_ids=[said]), 1)[0]
    assert done.tokens == [said] and done.finish_reason == "stop"


@pytest.mark.parametrize("method", METHODS)
def test_min_new_tokens_sees_the_path_of_each_node(method):
    """No stop id among the first tokens; every method bars it at the same places."""
    model = tiny_model()
    plain = dd.generate(model, [PROMPT], "autoregressive", max_new_tokens=24)[0].tokens
    sampling = dd.Sampling(stop_ids=[plain[3], plain[6]], min_new_tokens=9)
    wanted = dd.generate(model, [PROMPT], "autoregressive", sampling=sampling, max_new_tokens=24)
    done = dd.generate(model, [PROMPT], method, sampling=sampling, max_new_tokens=24)
    assert done[0].tokens == wanted[0].tokens
    assert not set(done[0].tokens[:9]) & {plain[3], plain[6]}


def said(prompt, method, speculation=TREE, **sampling):
    return dd.generate(
        tiny_model(), [prompt], method, speculation, dd.Sampling(**sampling), max_new_tokens=24
    )[0]


@pytest.mark.parametrize("method", ("dflash", "ddtree"))
def test_min_new_tokens_of_sampled_requests(method):
    """No stop id before the ninth token, with either rule; the first one after it may be one."""
    stop_ids, least = [0, 3, 5, 8], 9
    rejection, ends = dd.Speculation(acceptance="rejection"), {"coupled": [], "rejection": []}
    for seed in range(8):
        how = dict(temperature=1.0, seed=seed, stop_ids=stop_ids, min_new_tokens=least)
        done = dict(coupled=said(PROMPT, method, **how))
        assert done["coupled"].tokens == said(PROMPT, "autoregressive", **how).tokens
        done["rejection"] = said(PROMPT, method, rejection, **how)
        for rule, one in done.items():
            stops = [i for i, token in enumerate(one.tokens) if token in stop_ids]
            assert stops == ([len(one.tokens) - 1] if one.finish_reason == "stop" else [])
            assert all(i >= least for i in stops)
            ends[rule] += stops
    assert all(min(stops) == least for stops in ends.values())


@pytest.mark.parametrize("method", ("dflash", "ddtree"))
def test_rejection_bars_stops_by_the_path_of_each_node(method):
    """Nearly cold it says what greedy decoding says: a stop id ends the request at the first place
    where it may, and is passed over one place before, wherever an accepted run has brought it."""
    rejection, inside = dd.Speculation(acceptance="rejection"), 0
    for prompt in (PROMPT, [4, 9, 1], [7, 7, 2], [10, 0, 6]):
        plain = said(prompt, "autoregressive").tokens
        for place in sorted({plain.index(token) for token in plain[1:]}):
            for least in (place, place + 1):
                how = dict(stop_ids=[plain[place]], min_new_tokens=least)
                wanted = said(prompt, "autoregressive", **how)
                done = said(prompt, method, rejection, temperature=1e-4, **how)
                assert (done.tokens, done.finish_reason) == (wanted.tokens, wanted.finish_reason)
                assert (len(done.tokens) == place + 1) == (least == place)
                inside += done.verify_passes < len(done.tokens) - 1
    assert inside > 5  # runs with accepted drafts


@pytest.mark.parametrize("limits", ((1, 7), pytest.param((2, 13), marks=pytest.mark.slow)))
@pytest.mark.parametrize("method", METHODS)
def test_max_new_tokens_is_exact(method, limits):
    for limit in limits:
        done = dd.generate(tiny_model(), [PROMPT], method, max_new_tokens=limit)[0]
        assert len(done.tokens) == limit and done.finish_reason == "length"


def test_stop_strings(model):
    """The text ends before the string, tokens with it; streaming says the same."""
    plain = whole(model)
    for start, size in ((4, 1), (9, 2), (15, 5)):
        stop = plain.text[start : start + size]
        if not stop.strip("\ufffd"):
            continue
        for method in METHODS:
            done = whole(model, method, stop=[stop, "never said"])
            assert done.text == plain.text[: plain.text.index(stop)]
            assert done.finish_reason == "stop" and len(done.tokens) <= len(plain.tokens)
            assert done.tokens == plain.tokens[: len(done.tokens)]
            box: list = []
            pieces = dd.stream(
                model, "ab", method, sampling=dd.Sampling(stop=[stop]), max_new_tokens=32, done=box
            )
            assert "".join(pieces) == done.text and box[0].tokens == done.tokens
            assert replace(box[0], seconds=0) == replace(done, seconds=0)


def test_a_stop_string_at_the_limit_is_a_stop(model):
    """As a stop id there is."""
    plain = whole(model)
    for limit in range(4, 32):
        said = model.tokenizer.decode(plain.tokens[:limit])
        stop = said[-2:]
        if "\ufffd" not in stop and said.find(stop) == len(said) - 2:
            break
    sampling, done = dd.Sampling(stop=[stop]), []
    cut = dd.generate(model, "ab", "autoregressive", TREE, sampling, limit)[0]
    assert cut.finish_reason == "stop" and cut.text == said[:-2]
    pieces = dd.stream(model, "ab", "ddtree", TREE, sampling, limit, done=done)
    assert "".join(pieces) == cut.text and done[0].finish_reason == "stop"


def test_metrics_are_exact_after_a_cut(model):
    """All are those of the tokens kept, as if the limit had been there."""

    def run(limit, *stop):
        sampling = dd.Sampling(stop=stop)
        return dd.generate(model, "ab", "ddtree", TREE, sampling, limit, count_experts=True)[0]

    plain = run(32)
    for start in (3, 8, 14):
        done = run(32, plain.text[start : start + 2])
        assert done.finish_reason == "stop" and len(done.tokens) < len(plain.tokens)
        assert done.experts_touched is not None
        cut = run(len(done.tokens))
        assert replace(cut, text="", finish_reason="", seconds=0) == replace(
            done, text="", finish_reason="", seconds=0
        )


def test_find_takes_the_string_that_ends_first(model):
    tokens = model.tokenizer.encode("ab cd ef ab cd")
    cut = find(model.tokenizer, tokens, dd.Sampling(stop=["cd ef", "d e", "ab cd ef"]))
    assert cut.size == len("ab c")
    late = find(model.tokenizer, tokens, dd.Sampling(stop=["cd"], min_new_tokens=8))
    assert late is None or late.size == len("ab cd ef ab ")
    assert find(model.tokenizer, tokens, dd.Sampling()) is None


def test_held_back():
    assert held_back("abc", ("cde",)) == 1 and held_back("abcd", ("cde",)) == 2
    assert held_back("abc", ("xyz",)) == 0 and held_back("aaa", ("aab",)) == 2


def test_metrics_by_rank():
    done = dd.generate(
        tiny_model(), [PROMPT], "ddtree", dd.Speculation(20, 4), dd.Sampling(1.0), 40
    )[0]
    assert len(done.accept_by_rank) == 4 and np.isclose(sum(done.accept_by_rank), 1)
    assert done.drafted_nodes >= done.verify_passes
    accepted = len(done.tokens) - 1 - done.verify_passes
    assert np.isclose(sum(done.accept_by_depth) * done.verify_passes, accepted, atol=1)


def watched(model, prompts, speculation, sampling, limit):
    """What every pass of every request does, seen from outside: ranks of the accepted drafts by
    depth, nodes drafted, and distinct experts by layer, counted from the routers' choices."""
    moe_layers, width = model.config.num_moe_layers, speculation.budget + 1
    state = dd.prefill(model, prompts, sampling, limit, count_experts=True)
    look = jax.jit(partial(draft_and_walk, speculation=speculation, block_size=8))
    step = jax.jit(partial(dd.ddtree_step, speculation=speculation))
    passes = [[] for _ in prompts]
    while np.asarray(state.active).any():
        tree, rows, path, length, _ = jax.device_get(look(model.weights, state))
        chosen = rows.experts.reshape(moe_layers, len(prompts), width, -1)
        for r in np.flatnonzero(np.asarray(state.active)):
            used = chosen[:, r, : int(tree.size[r])].reshape(moe_layers, -1)
            experts = [len(set(layer.tolist())) for layer in used]
            passes[r].append((tree.rank[r, path[r, 1 : length[r]]], tree.size[r] - 1, experts))
        state = step(model.weights, state)
    return passes


def metrics(passes, committed, horizon, top_k):
    """By their definitions, of the passes that said `committed` tokens; the last may be cut."""
    ranks, nodes, experts = [], [], []
    for accepted, drafted, touched in passes:
        if committed > 0:
            ranks.append(accepted[:committed])
            committed -= len(accepted) + 1
            nodes.append(drafted)
            experts.append(touched)
    depths, accepted = np.array([len(r) for r in ranks]), np.concatenate(ranks)
    return dict(
        verify_passes=len(ranks),
        accept_by_depth=[float((depths > d).mean()) for d in range(horizon)],
        accept_by_rank=[float((accepted == k).sum() / max(len(accepted), 1)) for k in range(top_k)],
        drafted_nodes=sum(nodes),
        experts_touched=np.mean(experts, axis=0),
    )


def test_metrics_are_those_of_the_passes_kept():
    """After a limit, and after stop ids wherever they end a run."""
    model, prompts, speculation = tiny_model(), [PROMPT, PROMPT[:2]], dd.Speculation(7, 3)
    warm = dd.Sampling(1.0, seed=5)
    passes = watched(model, prompts, speculation, [warm, dd.Sampling()], 24)
    runs = [[len(ranks) + 1 for ranks, *_ in each] for each in passes]
    ends = [set(np.cumsum(run)) for run in runs]  # place of each bonus

    def run(limit, *stop_ids):
        sampling = [replace(warm, stop_ids=stop_ids), dd.Sampling(stop_ids=stop_ids)]
        return dd.generate(
            model, prompts, "ddtree", speculation, sampling, limit, count_experts=True
        )

    (said, _), inside = run(24), 0
    stops = {token: said.tokens.index(token) for token in said.tokens[1:]}
    for done in (run(24), run(9), *(run(24, token) for token in stops)):
        for r, one in enumerate(done):
            committed = len(one.tokens) - 1
            inside += one.finish_reason == "stop" and committed not in ends[r]
            if committed == 0:
                continue
            for name, value in metrics(passes[r], committed, 7, 3).items():
                np.testing.assert_allclose(getattr(one, name), value, err_msg=name)
            assert np.isclose(one.accept_length, committed / one.verify_passes)
    assert inside > 2


def test_experts_touched_by_plain_decoding():
    model = tiny_model()
    config = model.config
    plain = dd.generate(
        model, [PROMPT, PROMPT[:2]], "autoregressive", max_new_tokens=9, count_experts=True
    )
    for one in plain:
        assert one.experts_touched == [config.num_experts_per_tok] * config.num_moe_layers
    without = dd.generate(model, [PROMPT], "autoregressive", max_new_tokens=24)
    assert without[0].experts_touched is None


def test_rejection_of_nothing_is_plain_decoding():
    """A budget of 0 drafts nothing that could be accepted or rejected."""
    nothing, warm = dd.Speculation(0, acceptance="rejection"), dict(temperature=1.0, seed=6)
    done = said(PROMPT, "ddtree", nothing, **warm)
    assert done.tokens == said(PROMPT, "autoregressive", **warm).tokens
    assert done.tokens == said(PROMPT, "autoregressive", nothing, **warm).tokens


@pytest.mark.parametrize("acceptance", ("coupled", "rejection"))
@pytest.mark.parametrize("method", ("dflash", "ddtree"))
def test_rejection_is_greedy_at_temperature_zero(method, acceptance):
    model = tiny_model()
    plain = dd.generate(model, [PROMPT], "autoregressive", max_new_tokens=24)[0].tokens
    speculation = dd.Speculation(8, 4, acceptance=acceptance)
    assert dd.generate(model, [PROMPT], method, speculation, max_new_tokens=24)[0].tokens == plain
