"""Windows and the repeats put into them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.train.windows import PLACES, Streams, _insert, repeat_map, sample


def test_insert_by_hand():
    index, copy = _insert(jnp.array([4, 8, 11]), jnp.array([3, 3, 3]), jnp.array([1, 2, 1]), 24)
    want = [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 5, 6, 7, 8, 9, 10, 8, 9, 10, 11]
    assert index.tolist() == want
    assert np.flatnonzero(copy).tolist() == [4, 5, 6, 11, 12, 13, 14, 15, 16, 20, 21, 22]


@pytest.mark.parametrize("seed", range(5))
def test_repeats_are_verbatim_and_the_text_goes_on(seed):
    index, copy = map(np.asarray, repeat_map(jax.random.key(seed), 200, 12))
    kept = index[~copy]
    assert (kept == np.arange(len(kept))).all()  # nothing of the source is lost or reordered
    edges = np.flatnonzero(np.diff(np.r_[0, copy.astype(int), 0]))
    runs = edges.reshape(-1, 2)
    assert 1 <= len(runs) <= PLACES
    for start, stop in runs:
        chunk = index[start:stop]
        period = int(index[start - 1]) - int(chunk[0]) + 1
        assert 3 <= period <= 12
        if stop < 200:
            assert (stop - start) in (period, 2 * period)
            assert index[stop] == index[start - 1] + 1
        assert (chunk == index[start - period : stop - period]).all()


def test_sample_is_keyed_and_masks_only_copies():
    streams = Streams(jnp.arange(500, dtype=jnp.uint16), jnp.arange(1000, 1400, dtype=jnp.uint16))
    draw = lambda key, loops: sample(key, streams, 64, 60, 0.5, loops, 12)  # noqa: E731
    plain = draw(jax.random.key(0), 0.0)
    assert plain.tokens.shape == (64, 61) and plain.kept.all()
    assert (jnp.diff(plain.tokens, axis=1) == 1).all()
    assert ((plain.tokens[:, 0] < 500) == plain.code).all()
    assert 10 < plain.code.sum() < 54
    looped = draw(jax.random.key(0), 1.0)
    assert not looped.kept.all(axis=1).any()
    assert (looped.tokens == draw(jax.random.key(0), 1.0).tokens).all()
    assert (looped.tokens != draw(jax.random.key(1), 1.0).tokens).any()


def test_too_short_a_window_is_refused():
    with pytest.raises(ValueError, match="too short"):
        repeat_map(jax.random.key(0), 20, 12)
