"""Counting repeats, and where the unlikelihood falls."""

import numpy as np

from ddtree_jax.train.polish import looping, occurrences, penalties
from ddtree_jax.train.sample import Texts


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


def test_penalties_fall_on_said_repeats_only():
    loop = np.tile(np.arange(10), 5)[None]
    texts = Texts(loop.astype(np.uint16), np.array([12]), np.array([40]), np.array([True]))
    weight = penalties(texts, 0.25)[0]
    assert (weight[:17] == 0).all() and (weight[40:] == 0).all()
    assert (weight[17:27] == 0.25).all() and (weight[27:40] == 1).all()
    fresh = Texts(np.arange(50)[None].astype(np.uint16), *(np.array([v]) for v in (2, 50, True)))
    assert looping(Texts(*(np.concatenate(p) for p in zip(
        vars(texts).values(), vars(fresh).values(), strict=True))), new=36) == 0.5  # fmt: skip
