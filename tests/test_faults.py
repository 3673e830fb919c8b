"""Faults that users of other engines reported, of acceptance, seeds and stops: none of them here.

Each test names its symptom. Tested elsewhere: a draft of probability 0 taken at coin 0, the
vocabulary's last id at the largest coin, argmax drafts held against a softmax q
(test_rejection); greedy rows in a mixed batch, a nucleus at the wrong temperature, top-k 0 as
greedy, ties in top-k (test_filters); stops inside an accepted run, exact limits, minimum lengths
(test_stops); half a character when streaming (test_tokenizer); penalties and log-probabilities
refused by name (test_bad_input).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lossless import decode, prompts_of, tokens
from tiny import tiny_model

import ddtree_jax as dd
from ddtree_jax.rejection import draw, walk_tree
from ddtree_jax.tree import build, candidates, chain, walk

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


def test_residual_is_put_through_a_softmax():
    """What is left of p is drawn from in proportion: [0.2, 0, 0.1] is [2/3, 0, 1/3]."""
    left = jnp.asarray([[0.2, 0.0, 0.1]])
    assert [int(draw(left, jnp.asarray([c]))[0]) for c in (0.0, 0.66, 0.67, 0.99)] == [0, 0, 2, 2]


def test_rows_of_another_request_decide():
    """Two requests with trees and laws of their own walk as each does alone."""
    rng = np.random.default_rng(3)
    log_q = jnp.asarray(np.log(rng.dirichlet(np.ones(6), (2, 3))), jnp.float32)
    tree = build(jnp.zeros(2, jnp.int32), *candidates(log_q, 3), 5, jnp.ones(2, bool))
    log_p = jnp.asarray(np.log(rng.dirichlet(np.ones(6), (2, 6))), jnp.float32)
    no, coins = jnp.zeros((2, 6), bool), jnp.asarray(rng.random((2, 2, 4)), jnp.float32)
    both = walk_tree(tree, log_p, no, no[:, 0], *coins, 3)
    for r in range(2):
        mine = jax.tree.map(lambda x, r=r: x[r : r + 1], (tree, log_p, no, no[:, 0], *coins))
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
