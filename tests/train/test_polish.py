"""Counting repeats, where the losses fall, and the rounds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.model.dflash import DFlash
from ddtree_jax.model.kimi import Kimi
from ddtree_jax.train import polish, sample, store
from ddtree_jax.train.nano import TINY
from ddtree_jax.train.pace import Pace
from ddtree_jax.train.params import initialise
from ddtree_jax.train.sample import Texts, looping, occurrences
from ddtree_jax.train.windows import Streams

RECIPE = polish.Recipe(
    rounds=2, steps=2, chunk=2, kept=2, real=(2, 200), said=(2, 1), joint_anchors=3,
    dtype="float32",
    groups=(
        sample.Group("short", batch=4, low=8, high=10, length=161, segment=161),
        sample.Group("long", batch=4, low=60, high=60, length=189, segment=189),
    ),
)  # fmt: skip


def texts(tokens, prompt, end, temperature=0.0):
    fields = (np.array([v]) for v in (prompt, end, np.float32(temperature)))
    return Texts(np.asarray(tokens)[None].astype(np.uint16), *fields)


def slow_occurrences(tokens, ngram):
    out = np.zeros(tokens.shape, int)
    for r, row in enumerate(tokens):
        seen = {}
        for end in range(ngram - 1, len(row)):
            gram = tuple(row[end - ngram + 1 : end + 1])
            out[r, end] = seen.get(gram, 0)
            seen[gram] = out[r, end] + 1
    return out


def test_occurrences():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2, (20, 60))
    for ngram in (2, 3, 8):
        np.testing.assert_array_equal(occurrences(tokens, ngram), slow_occurrences(tokens, ngram))


LOOP = np.tile(np.arange(10), 5)


def test_weights_fall_on_said_repeats_only():
    said = polish.weigh(texts(LOOP, 12, 40), 0.5)
    weight = said.penalty[0]
    assert (weight[:29] == 0).all() and (weight[40:] == 0).all()  # prompts may be repeated
    assert (weight[29:39] == 0.5).all() and weight[39] == 1
    assert not said.learnt.any()
    assert said.said[0].tolist() == [0] * 12 + [1] * 28 + [0] * 10


def test_sampled_texts_without_loops_are_learnt():
    for tokens, temperature, learnt in (
        (np.arange(50), 0.7, True), (np.arange(50), 0.0, False), (LOOP, 0.7, False)
    ):  # fmt: skip
        said = polish.weigh(texts(tokens, 5, 40, temperature), 0.5)
        want = (np.arange(50) >= 5) & (np.arange(50) < 40) & learnt
        assert (said.learnt[0] == want).all()
        assert said.penalty.any() == (tokens is LOOP)


def test_looping_by_temperature_and_length():
    both = Texts.join([texts(LOOP, 12, 40), texts(np.arange(50), 2, 50), texts(LOOP, 2, 50, 1.0)])
    assert looping(both, 0.0, 36) == 0.5
    assert looping(both, 0.0, 20) == 0
    assert looping(both, 1.0, 36) == 1
    assert np.isnan(looping(both, 0.7, 36))


def test_the_pool_keeps_the_last_rounds():
    rounds = [polish.weigh(texts(np.full(20, i), 2, 20), 0.5) for i in range(4)]
    pool = polish.renew(None, rounds[0], 3)
    assert pool.tokens[:, 0].tolist() == [0, 0, 0]
    for new in rounds[1:]:
        pool = polish.renew(pool, new, 3)
    assert pool.tokens[:, 0].tolist() == [1, 2, 3] and pool.tokens.dtype == jnp.uint16


@pytest.fixture(scope="module")
def streams():
    ids = np.random.default_rng(0).integers(0, 2048, (2, 600)).astype(np.uint16)
    return Streams(jnp.asarray(ids[0]), jnp.asarray(ids[1]))


def test_loss_is_the_sum_of_its_terms():
    params = initialise(Kimi, TINY.trained, 0), initialise(DFlash, TINY.drafter, 1)
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, 2048)
    real = polish.windows(
        jax.random.key(0), Streams(*(tokens.reshape(-1),) * 2), 2, 60, 0.5, 0.0, 4
    )
    weight = jnp.ones((2, 33))
    said = polish.Said(tokens, weight.at[0].set(0), weight.at[1].set(0), weight)
    said = said, polish.Said(tokens[:1], weight[:1], weight[:1] * 0, weight[:1])
    loss = jax.jit(partial(polish.loss, TINY, RECIPE))
    total, (m, _) = loss(params, real, said, jax.random.key(2))
    want = m["likely"] + 3 * (m["unlikely"] + m["ends"]) + 0.2 * m["own"] + 0.3 * m["block"]
    np.testing.assert_allclose(total, want, rtol=1e-6)
    eos = jax.nn.softmax(polish.forward.logits(
        params[0], polish.forward.run(TINY.trained, params[0], tokens[:, :-1], "xla").hidden
    ))[:, TINY.trained.eos_token_ids[0]]  # fmt: skip
    size, ends = [2 * (161 - 8), 189 - 60], -jnp.log1p(-eos).reshape(2, 32)
    # The losses see INT4 experts, this sum the masters.
    np.testing.assert_allclose(m["ends"], ends.sum() / size[0] + ends[0].sum() / size[1], rtol=0.1)
    assert 3 < m["own"] < 5 and 0 < m["unlikely"] < 0.01  # a mean over groups, one of them empty
    alone, (without, _) = loss((params[0], None), real, said, jax.random.key(2))
    assert "block" not in without
    np.testing.assert_allclose(alone, total - 0.3 * m["block"], rtol=1e-6)


@pytest.mark.slow
def test_stopped_and_resumed_equals_straight(streams, tmp_path):
    class Stopping(Pace):
        def must_stop(self, needed):
            return True

    def run(folder, kind=Pace):
        (tmp_path / folder).mkdir(exist_ok=True)
        params, drafter = initialise(Kimi, TINY.trained, 0), initialise(DFlash, TINY.drafter, 1)
        pace = kind(seconds=0.0, started=0.0)
        return polish.polish(TINY, RECIPE, streams, tmp_path / folder, pace, params, drafter)

    assert run("straight")
    assert not run("parts", Stopping) and not run("parts", Stopping) and run("parts")
    for stem in (store.TARGET, store.DRAFTER):
        straight, parts = (store.read_export(tmp_path / f, stem) for f in ("straight", "parts"))
        assert all((straight[n] == parts[n]).all() for n in straight)
