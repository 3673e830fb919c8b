"""The sampler: greedy text is the training forward's argmax; ends and loops."""

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.model.kimi import Kimi
from ddtree_jax.train import forward, sample
from ddtree_jax.train.nano import TINY
from ddtree_jax.train.params import initialise
from ddtree_jax.train.windows import Streams

CONFIG = TINY.trained
GROUP = sample.Group("test", batch=4, low=6, high=10, length=24, segment=8)


def test_greedy_text_is_the_teacher_forced_argmax():
    weights = initialise(Kimi, CONFIG, 0)
    tokens = jax.random.randint(jax.random.key(0), (4, 24), 0, 2048)
    prompt = jnp.array([6, 8, 10, 7])
    temperature = jnp.array([0.0, 0.0, 0.0, 1.0])
    given = np.asarray(tokens)  # the call takes the buffer
    said = np.asarray(
        sample.generate(
            CONFIG, weights, GROUP, tokens, prompt, temperature, jax.random.key(1), "xla"
        )
    )
    scores = forward.logits(weights, forward.run(CONFIG, weights, said, "xla").hidden)
    best = np.asarray(scores.reshape(4, 24, -1).argmax(-1))
    for row, start in enumerate(prompt.tolist()):
        assert (said[row, :start] == given[row, :start]).all()
        same = said[row, start:] == best[row, start - 1 : -1]
        assert same.all() if temperature[row] == 0 else same.mean() < 0.5


def test_a_barred_token_is_never_said():
    weights = initialise(Kimi, CONFIG, 0)
    prompt, cold, key = jnp.full(4, 6), jnp.zeros(4), jax.random.key(1)

    def said(barred):
        tokens = jax.random.randint(jax.random.key(0), (4, 24), 0, 2048)
        made = sample.generate(
            CONFIG, weights, GROUP, tokens, prompt, cold, key, "xla", barred=barred
        )
        return np.asarray(made)[:, 6:]

    freely = said(None)
    first = int(freely[0, 0])
    assert first in freely and first not in said(first)


def test_loops_start_at_the_third_time():
    text = np.arange(1000, 1060)
    text[20:29] = text[29:38] = text[38:47] = np.arange(9)  # period 9, from 20
    other = np.arange(2000, 2060)
    found = sample.loops(np.stack([text, other]), np.zeros(2, int))
    assert found.tolist() == [38, 60]
    # With the first in the prompt, it takes one token more.
    assert sample.loops(text[None], np.array([21])).tolist() == [39]


def test_ends():
    tokens = np.arange(3 * 40).reshape(3, 40)
    tokens[0, 5] = tokens[0, 20] = 2049  # in the prompt, then said
    tokens[1, 12:] = 7  # a loop below temperature 1
    tokens[2, 12:] = 7  # the same at 1
    texts = sample.finish(tokens, np.array([10, 10, 10]), np.array([0.0, 0.6, 1.0]), eos=2049)
    assert texts.end.tolist() == [21, 14, 40]
    assert texts.said == 11 + 4 + 30


def test_prompts_have_all_temperatures_and_lengths():
    ids = jnp.arange(300, dtype=jnp.uint16)
    tokens, prompt, temperature, _ = sample.prompts(
        jax.random.key(0), GROUP, Streams(ids, ids), 0.5
    )
    assert tokens.shape == (4, 24)
    assert ((prompt >= 6) & (prompt <= 10)).all()
    np.testing.assert_allclose(temperature, [0, 0.6, 0, 1])


def test_texts_on_disk(tmp_path):
    texts = sample.Texts(
        np.zeros((2, 3), np.uint16), np.array([1, 2]), np.array([3, 3]), np.array([0.0, 0.6])
    )
    texts.save(tmp_path / "t.npz")
    both = sample.Texts.join([texts, sample.Texts.load(tmp_path / "t.npz")])
    assert both.said == 6 and both.greedy.tolist() == [True, False] * 2
