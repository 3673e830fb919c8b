"""Faults that users of other engines reported, of acceptance, seeds and stops: none of them here.

Each test names its symptom. ROWS says of every collected report that needs no accelerator where it
is tested, or why it cannot happen here.
"""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import LIMIT, drawn_law
from lossless import decode, prompts_of, tokens
from tiny import tiny_model

import ddtree_jax as dd
from ddtree_jax.rejection import walk_tree
from ddtree_jax.sampling import Law, bar_stops, choose, log_law, perturbed
from ddtree_jax.state import LENGTH, RUNNING, STOP, emit
from ddtree_jax.tree import build, candidates, chain, walk

HERE, NOT = Path(__file__).parent, "not applicable: "
ROWS = {  # by the report's number
    1: "test_rejection.py::test_a_draft_without_a_chance_is_not_taken",  # at coin 0
    2: "test_rejection.py::test_bonus_and_drafts_are_drawn_in_proportion",  # no inverse CDF
    4: "test_faults.py::test_seeds_are_ignored_by_rejection",
    5: "test_faults.py::test_seeds_are_ignored_by_rejection",  # on chains
    7: "test_filters.py::test_mixed_batch_equals_each_alone",  # greedy rows negated
    8: "test_filters.py::test_golden_rows",  # the nucleus at T = 1
    10: "test_filters.py::test_golden_rows",  # top-k 0 as greedy
    11: "test_faults.py::test_a_banned_token_makes_a_greedy_request_nan",
    13: "test_faults.py::test_a_greedy_request_breaks_ties_another_way",  # none set: greedy
    14: "test_faults.py::test_a_greedy_request_breaks_ties_another_way",
    16: NOT + "sampling has no kernel to fall back from; the law is one program everywhere",
    17: "test_faults.py::test_rejection_ignores_the_temperature",
    19: "test_faults.py::test_accepts_after_a_miss",
    20: "test_wrong_variants.py::test_argmax_drafts_held_against_a_softmax_q",
    22: "test_faults.py::test_residual_is_put_through_a_softmax",
    23: "test_filters.py::test_golden_rows",  # ties in top-k
    25: "test_faults.py::test_rows_of_another_request_decide",
    26: "test_faults.py::test_a_tree_of_one_branch_accepts_less_than_the_chain",
    28: "test_rejection.py::test_trees_of_all_shapes",  # greedy drafts, sampled target
    29: "test_faults.py::test_filters_give_other_text_when_drafted",
    31: "test_bad_input.py::test_sampling_fields",  # penalties are refused
    32: "test_stops.py::test_min_new_tokens_sees_the_path_of_each_node",
    34: NOT + "arrays are immutable, so no call can change what it was given",
    35: "test_faults.py::test_a_root_alone_has_no_path_beyond_it",
    37: "test_faults.py::test_a_stop_inside_a_run_is_counted_past",
    38: "test_faults.py::test_a_stop_inside_a_run_is_counted_past",
    40: "test_stops.py::test_metrics_are_those_of_the_passes_kept",  # the bonus, in or out
    41: "test_stops.py::test_metrics_are_those_of_the_passes_kept",  # and docs/sampling.md
    43: "test_faults.py::test_crashes_at_the_end_of_the_context",
    44: "test_stops.py::test_max_new_tokens_is_exact",
    46: "test_faults.py::test_a_legitimate_token_is_taken_for_the_mask",
    47: "test_tokenizer.py::test_stream_is_never_half_a_character",
    49: "test_bad_input.py::test_sampling_fields",  # log-probabilities are refused
    50: NOT + "nothing is kept of a request when it has ended: there is no prefix cache",
}
PROMPTS = prompts_of((5, 63, 2, 64))
FILTERED = [
    dd.Sampling(0.9, top_k=5, seed=1),
    dd.Sampling(0.7, top_p=0.9, seed=2),
    dd.Sampling(1.3, min_p=0.1, seed=3),
    dd.Sampling(1.1, top_k=8, top_p=0.95, min_p=0.02, seed=4),
]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_every_report_is_accounted_for():
    """The tests that ROWS names are there."""
    for row, where in ROWS.items():
        if not where.startswith(NOT):
            file, name = where.split("::")
            assert re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE), row


@pytest.mark.parametrize("method, budget", [("dflash", 0), ("ddtree", 4), ("ddtree", 16)])
def test_filters_give_other_text_when_drafted(method, budget):
    """A seeded top-k request differed between plain and speculative decoding."""
    model, speculation = tiny_model("float64"), dd.Speculation(budget, 4)
    plain = tokens(decode(model, PROMPTS, "autoregressive", sampling=FILTERED))
    assert tokens(decode(model, PROMPTS, method, speculation, FILTERED)) == plain
    back = decode(model, PROMPTS[::-1], method, speculation, FILTERED[::-1])
    assert tokens(back) == plain[::-1]


@pytest.mark.parametrize("method", (pytest.param("dflash", marks=pytest.mark.slow), "ddtree"))
def test_seeds_are_ignored_by_rejection(method):
    """Coins drawn anew for each call, or for the whole batch at once."""
    model, speculation = tiny_model("float64"), dd.Speculation(8, 4, acceptance="rejection")

    def run(prompts, samplings):
        return tokens(decode(model, prompts, method, speculation, samplings))

    together = run(PROMPTS, FILTERED)
    assert run(PROMPTS, FILTERED) == together
    assert run(PROMPTS[1:2], FILTERED[1:2]) == together[1:2]
    assert run(PROMPTS, [replace(s, seed=s.seed + 9) for s in FILTERED]) != together


def test_rejection_ignores_the_temperature():
    """Nearly cold, the law is the argmax: so is what is accepted, and what is drawn."""
    model, cold = tiny_model("float64"), dd.Sampling(1e-4, seed=3)
    plain = tokens(decode(model, PROMPTS, "autoregressive"))
    for method in ("dflash", "ddtree"):
        speculation = dd.Speculation(8, 4, acceptance="rejection")
        assert tokens(decode(model, PROMPTS, method, speculation, cold)) == plain


def test_accepts_after_a_miss():
    """Matches 1, 0, 1 along a chain: one draft is accepted, not two."""
    drafts = jnp.asarray([[3, 4, 5]])
    line = chain(jnp.zeros(1, jnp.int32), drafts, jnp.asarray([3]), jnp.ones(1, bool))
    _, length, bonus = walk(line, jnp.asarray([[3, 9, 5, 7]]), 3)
    assert length.tolist() == [2] and bonus.tolist() == [9]


def test_a_banned_token_makes_a_greedy_request_nan():
    """A logit of -inf over a temperature of -1, or of 0: the argmax of the rest is wanted."""
    logits = jnp.asarray([[[1.0, 5, 3]], [[1.0, -jnp.inf, 3]], [[1.0, 5, 3]]])
    law = Law.of([dd.Sampling(), dd.Sampling(), dd.Sampling(0.5)])
    barred, stop_ids = jnp.asarray([[True], [False], [True]]), jnp.full((3, 1), 1)
    scores = log_law(bar_stops(logits, stop_ids, barred), law)
    assert not jnp.isnan(scores).any()
    chosen = choose(perturbed(scores, jnp.zeros((3, 1, 3)), law), jnp.zeros((3, 1), bool))
    assert chosen.tolist() == [[2]] * 3


def test_a_greedy_request_breaks_ties_another_way():
    """Beside sampled ones, or where the temperature was left out, as if it were small, not 0."""
    logits, noise = jnp.asarray([[3.0, 3, 1]] * 2), jnp.asarray([[0.0, 9, 0]] * 2)
    for neighbour in (dd.Sampling(), dd.Sampling(1e-6), dd.Sampling(1.0, top_p=0.9)):
        law = Law.of([dd.Sampling(), neighbour])
        chosen = choose(perturbed(log_law(logits, law), noise, law), jnp.zeros(2, bool))
        assert chosen.tolist() == [0, 0 if neighbour == dd.Sampling() else 1]


def test_a_stop_inside_a_run_is_counted_past():
    """Or the limit behind it is named as the reason: whichever comes first in the run is."""
    run, stop, limits = [7, 8, 3, 1, 2], 3, [5, 3, 2, 9]
    state = dd.prefill(tiny_model(), [[1]] * 4, dd.Sampling(stop_ids=[stop]), max_new_tokens=16)
    none, zeros = jnp.zeros(4, jnp.int32), jnp.zeros((4, 5), jnp.int32)
    state = replace(state, count=none, reason=none + RUNNING, limit=jnp.asarray(limits, jnp.int32))
    said = jnp.asarray([run, run, run, [7, stop, 8, 1, 2]], jnp.int32)
    state = emit(state, said, none + 5, none > 0, zeros, zeros, none, None)
    assert tokens(state) == [[7, 8, stop], [7, 8, stop], [7, 8], [7, stop]]
    assert state.reason.tolist() == [STOP, STOP, LENGTH, STOP]


def test_residual_is_put_through_a_softmax():
    """What is left of p is drawn from in proportion: [0.2, 0, 0.1] is [2/3, 0, 1/3]."""
    found = drawn_law(np.random.default_rng(0), np.array([2, 0, 1, 0]) / 3)
    np.testing.assert_allclose(found, [2 / 3, 0, 1 / 3, 0], rtol=0, atol=LIMIT)


def test_rows_of_another_request_decide():
    """Two requests with trees and laws of their own walk as each does alone."""
    rng = np.random.default_rng(3)
    log_q = jnp.asarray(np.log(rng.dirichlet(np.ones(6), (2, 3))), jnp.float32)
    tree = build(jnp.zeros(2, jnp.int32), *candidates(log_q, 3), 5, jnp.ones(2, bool))
    log_p = jnp.asarray(np.log(rng.dirichlet(np.ones(6), (2, 6))), jnp.float32)
    no, coins = jnp.zeros((2, 6), bool), jnp.asarray(rng.random((2, 4)), jnp.float32)
    both = walk_tree(tree, log_p, no, no[:, 0], coins, 3)
    for r in range(2):
        mine = jax.tree.map(lambda x, r=r: x[r : r + 1], (tree, log_p, no, no[:, 0], coins))
        for together, alone in zip(both, walk_tree(*mine, 3), strict=True):
            np.testing.assert_array_equal(together[r], alone[0])


def test_a_tree_of_one_branch_accepts_less_than_the_chain():
    model, made = tiny_model("float64"), []
    for method, speculation in (("dflash", dd.Speculation()), ("ddtree", dd.Speculation(7, 1))):
        for temperature in (0.0, 1.0):
            sampling = dd.Sampling(temperature, seed=5)
            state = decode(model, PROMPTS, method, speculation, sampling)
            made.append((tokens(state), state.passes.tolist(), state.hits(7).tolist()))
    assert made[:2] == made[2:]


def test_a_root_alone_has_no_path_beyond_it():
    tree = build(
        jnp.asarray([4]), jnp.zeros((1, 0, 1)), jnp.zeros((1, 0, 1), jnp.int32), 0,
        jnp.ones(1, bool),
    )  # fmt: skip
    path, length, bonus = walk(tree, jnp.asarray([[2]]), 3)
    assert path.tolist() == [[0, 0, 0, 0]] and length.tolist() == [1] and bonus.tolist() == [2]


@pytest.mark.parametrize(
    "method",
    (*(pytest.param(m, marks=pytest.mark.slow) for m in ("autoregressive", "dflash")), "ddtree"),
)
def test_crashes_at_the_end_of_the_context(method):
    """Drafts and tree rows reach past the last position a request may have."""
    model = tiny_model("float64", max_position_embeddings=72)
    plain = dd.generate(tiny_model("float64"), PROMPTS[1], "autoregressive", max_new_tokens=9)
    done = dd.generate(model, PROMPTS[1], method, max_new_tokens=9)
    assert len(PROMPTS[1]) + 9 == 72 and done[0].tokens == plain[0].tokens
    one = dd.generate(model, [1] * 71, method, max_new_tokens=1)[0]
    assert len(one.tokens) == 1 and one.finish_reason == "length"


@pytest.mark.parametrize("method", (pytest.param("dflash", marks=pytest.mark.slow), "ddtree"))
def test_a_legitimate_token_is_taken_for_the_mask(method):
    """The target may say the drafter's mask id; it stays in the text."""
    model = tiny_model("float64")
    mask = model.weights.drafter_config.mask_token_id
    leaves = list(model.weights.target)
    head = max(i for i, leaf in enumerate(leaves) if leaf.shape == (12, 32))
    loud = leaves[head].at[mask].set(jnp.ones(32) * 3)
    for sign in (1, -1):
        leaves[head] = leaves[head].at[mask].set(sign * loud[mask])
        partial = replace(model, weights=replace(model.weights, target=tuple(leaves)))
        plain = tokens(decode(partial, PROMPTS, "autoregressive"))
        assert tokens(decode(partial, PROMPTS, method)) == plain
        if any(mask in said for said in plain):
            return
    raise AssertionError("the target never says the mask id")


def test_identical_requests_share_nothing():
    """Two requests with one prompt and one seed say the same; another seed, something else."""
    model, warm = tiny_model("float64"), dd.Sampling(1.0, seed=1)
    prompts = [PROMPTS[1]] * 3
    first, second, other = tokens(
        decode(model, prompts, "ddtree", sampling=[warm, warm, replace(warm, seed=2)])
    )
    assert first == second != other
