"""Temperature, top-k, top-p and min-p against an independent float64 implementation by sorting,
and against what transformers' processors made of the same logits."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from ddtree_jax import Sampling, filters
from ddtree_jax.sampling import Law, bar_stops, choose, keyed_noise, log_law, perturbed


def slow_law(logits, sampling) -> np.ndarray:
    """Probabilities of one row, by the definition: sort, cut, renormalise, one filter at a time."""
    x = np.asarray(logits, np.float64) / sampling.temperature
    p = np.exp(x - x.max())
    p /= p.sum()

    def keep(p, kept):
        p = np.where(kept, p, 0)
        return p / p.sum()

    order = np.sort(p)[::-1]
    if 0 < sampling.top_k < len(p):
        p = keep(p, p >= order[sampling.top_k - 1])
    if sampling.top_p < 1:
        order = np.sort(p)[::-1]
        needed = np.searchsorted(np.cumsum(order), sampling.top_p - 1e-12)
        p = keep(p, p >= order[min(needed, len(p) - 1)])
    if sampling.min_p > 0:
        p = keep(p, p >= sampling.min_p * p.max() * (1 - 1e-12))
    return p


def law_of(logits, samplings) -> np.ndarray:
    x = np.asarray(jax.jit(log_law)(jnp.asarray(logits), Law.of(samplings)), np.float64)
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def edges_apart(logits, sampling) -> bool:
    """Whether no cumulated mass is so close to top_p, no ratio to min_p, that rounding decides."""
    p = np.sort(slow_law(logits, Sampling(sampling.temperature, sampling.top_k)))[::-1]
    mass = np.abs(np.cumsum(p) - sampling.top_p).min() > 1e-5 or sampling.top_p in (0, 1)
    return mass and (np.abs(p / p[0] - sampling.min_p).min() > 1e-5 or sampling.min_p in (0, 1))


SETTINGS = [
    Sampling(t, top_k=k, top_p=p, min_p=m)
    for t in (0.3, 1.0, 2.0)
    for k in (0, 1, 3, 40, 10_000)
    for p in (0.0, 0.3, 0.95, 1.0)
    for m in (0.0, 0.1, 1.0)
]


@pytest.mark.parametrize("vocab", (97, 1500), ids=("head", "deep"))
@pytest.mark.parametrize("kind", ("plain", "peaked", "rounded", "infinite", "negative"))
def test_agrees_with_sorting(kind, vocab):
    """180 settings as one batch of requests, a row of random logits each.

    A vocabulary of 97 is all head; of 1,500, many thresholds lie below it.
    """
    rng = np.random.default_rng(sum(map(ord, kind)))
    logits = rng.normal(size=(len(SETTINGS), vocab)).astype(np.float32)
    if kind == "peaked":
        logits *= 8
    elif kind == "rounded":  # many exact ties: their groups must be kept whole
        logits = np.round(logits * 2) / 2
    elif kind == "infinite":
        logits[rng.random(logits.shape) < 0.5] = -np.inf
    elif kind == "negative":
        logits -= 50
    got = law_of(logits, SETTINGS)
    compared = 0
    for row, p, sampling in zip(logits, got, SETTINGS, strict=True):
        if not edges_apart(row, sampling):
            continue
        compared += 1
        np.testing.assert_allclose(p, slow_law(row, sampling), rtol=0, atol=1e-5)
    assert compared > 80


def test_agrees_with_transformers():
    golden = Path(__file__).parent / "golden" / "sampling" / "expected.safetensors"
    tensors = load_file(golden)
    samplings = [
        Sampling(t, top_k=int(k), top_p=p, min_p=m) for t, k, p, m in tensors["settings"].tolist()
    ]
    got = law_of(tensors["logits"], samplings)
    # transformers weighs top-p in float32 from the least token up: rounding may move its edge.
    apart = [edges_apart(*pair) for pair in zip(tensors["logits"], samplings, strict=True)]
    assert sum(apart) > 60
    # Among what is compared: filters off, at their ends, top-k past the vocabulary, infinities.
    top_k, top_p, min_p = tensors["settings"][apart, 1:].T
    infinite = np.isinf(tensors["logits"][apart]).any(axis=1)
    vocab = tensors["logits"].shape[1]
    for edge in (top_k == 0, top_k > vocab, top_p == 0, top_p == 1, min_p > 0):
        assert (edge & infinite).any() and (edge & ~infinite).any()
    np.testing.assert_allclose(got[apart], tensors["probabilities"][apart], rtol=0, atol=1e-5)


def test_a_threshold_does_not_depend_on_other_rows():
    """A row that must be searched to its depth changes nothing for rows that need not."""
    rng = np.random.default_rng(5)
    easy = rng.normal(size=(1, 1, 1500)).astype(np.float32) * 8
    flat = rng.normal(size=(1, 1, 1500)).astype(np.float32) * 0.1
    nucleus = Sampling(1.0, top_p=0.9)
    alone = log_law(jnp.asarray(easy), Law.of([nucleus]))
    both = jnp.concatenate([jnp.asarray(easy), jnp.asarray(flat)])
    together = log_law(both, Law.of([nucleus, nucleus]))
    np.testing.assert_array_equal(alone[0], together[0])
    assert np.isfinite(np.asarray(together)[1]).sum() > filters.HEAD
    assert np.isfinite(np.asarray(together)[0]).sum() < filters.HEAD


@pytest.mark.parametrize(
    "spread, likeliest, top_p", [(5, None, 0.9999), (3, None, 0.99), (0.3, 0.995, 0.999)]
)
def test_deep_thresholds_of_a_large_vocabulary(spread, likeliest, top_p):
    """A float32 sum that adds 163,840 weights one by one would lose the tail, and depend on where
    the likeliest token stands."""
    rng = np.random.default_rng(3)
    row = spread * rng.normal(size=163_840)
    if likeliest:
        row += np.log((1 - likeliest) / np.exp(row).sum())
        row[0] = np.log(likeliest)
    rows = np.stack([row, row[::-1]]).astype(np.float32)
    sampling = Sampling(1.0, top_p=top_p)
    got = law_of(rows, [sampling] * 2)
    for p, x in zip(got, rows, strict=True):
        wanted = slow_law(x, sampling)
        assert (wanted > 0).sum() > 1000
        assert abs((p > 0).sum() / (wanted > 0).sum() - 1) < 0.01
        assert np.abs(p - wanted).sum() < 1e-5


def test_golden_rows():
    """Cases from users' reports: a nucleus at the wrong temperature, ties, top_k 0 as greedy."""
    cases = [
        ([2.0, 1, 0], Sampling(2.0, top_p=0.6), [0.6225, 0.3775, 0]),
        ([1.0, 1, 0], Sampling(1.0, top_k=1), [0.5, 0.5, 0]),
        ([5.0, 1, 0], Sampling(1.0, top_p=0.0), [1, 0, 0]),
        ([0.0, 0, 0], Sampling(1.0, top_k=0), [1 / 3] * 3),
        ([0.0, -np.inf, 0], Sampling(1.0, top_p=0.999), [0.5, 0, 0.5]),
        ([-0.0, 0.0, -1], Sampling(1.0, top_k=1), [0.5, 0.5, 0]),
    ]
    for logits, sampling, wanted in cases:
        got = law_of(np.array([logits], np.float32), [sampling])[0]
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_mixed_batch_equals_each_alone():
    """Greedy rows stay greedy beside sampled ones, whatever filters the others have on."""
    samplings = [
        Sampling(), Sampling(0.7), Sampling(1.0), Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.6),
        Sampling(1e-6), Sampling(0.0, top_k=3, top_p=0.1),
    ]  # fmt: skip
    logits = np.random.default_rng(0).normal(size=(7, 2, 33)).astype(np.float32)
    together = np.asarray(log_law(jnp.asarray(logits), Law.of(samplings)))
    for i, sampling in enumerate(samplings):
        alone = np.asarray(log_law(jnp.asarray(logits[i : i + 1]), Law.of([sampling])))[0]
        np.testing.assert_array_equal(together[i], alone)
    for i in (0, 6):
        np.testing.assert_array_equal(together[i], logits[i])
    chosen = choose(jnp.asarray(together), jnp.zeros((7, 2), bool))
    np.testing.assert_array_equal(chosen[5], logits[5].argmax(-1))


def test_ties_go_to_the_lowest_id():
    logits = jnp.asarray([[3.0, 3, 1], [-1, 2, 2]])
    law = log_law(logits, Law.of([Sampling(), Sampling()]))
    assert choose(law, jnp.zeros(2, bool)).tolist() == [0, 1]


def test_stops_are_barred_by_path():
    logits = jnp.zeros((2, 3, 5)).at[:, :, 4].set(9.0)
    barred = jnp.array([[True, False, True], [False, False, False]])
    out = bar_stops(logits, jnp.array([[4, -1], [4, 2]]), barred)
    assert choose(out, jnp.zeros((2, 3), bool)).tolist() == [[0, 4, 0], [4, 4, 4]]
    assert (out[0, 0] == -jnp.inf).tolist() == [False] * 4 + [True]


def test_broken_rows_choose_nothing():
    logits = jnp.array([[1.0, jnp.nan, 0], [1, 2, 0]])
    law = Law.of([Sampling(1.0, top_p=0.9), Sampling(1.0, top_p=0.9)])
    assert choose(log_law(logits, law), jnp.isnan(logits).any(-1)).tolist() == [-1, 1]


@pytest.mark.parametrize("temperature", (0.5, 1.0, 2.0))
def test_choices_follow_the_tempered_law(temperature):
    """Frequencies of 20,000 keyed draws: within 4.5 standard deviations of softmax(logits / T)."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], np.float32)
    draws = 20_000
    law = Law.of([Sampling(temperature, seed=3)])
    noise = keyed_noise(law, jnp.arange(draws, dtype=jnp.int32)[None], len(logits))
    rows = jnp.broadcast_to(jnp.asarray(logits)[None, None], noise.shape)
    chosen = choose(perturbed(log_law(rows, law), noise, law), jnp.zeros(noise.shape[:2], bool))
    p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    found = np.bincount(np.asarray(chosen)[0], minlength=len(p)) / draws
    assert (np.abs(found - p) < 4.5 * np.sqrt(p * (1 - p) / draws)).all()


@pytest.mark.parametrize("logits, sampling, wanted", [
    ([20, 20, 1], Sampling(1e-6), [0.5, 0.5, 0]),
    ([20, 20, 1], Sampling(1e-8), [0.5, 0.5, 0]),
    ([1e9, 0, 1e9], Sampling(1e-30), [0.5, 0, 0.5]),
    ([1e7, 1e7, 1e7], Sampling(1.0), [1 / 3] * 3),
    ([-1e7, -1e7, -1e7 - 1], Sampling(1.0, top_p=0.999), [0.4223, 0.4223, 0.1554]),
    ([1e6, 1e6 - 0.125, 1e6], Sampling(1.0, min_p=0.9), [0.5, 0, 0.5]),
])  # fmt: skip
def test_large_logits_and_low_temperatures_drown_no_noise(logits, sampling, wanted):
    """Only differences of logits count: float32 must not add noise to large numbers."""
    draws = 4000
    law = Law.of([sampling])
    noise = keyed_noise(law, jnp.arange(draws, dtype=jnp.int32)[None], 3)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), noise.shape)
    chosen = choose(perturbed(log_law(rows, law), noise, law), jnp.zeros(noise.shape[:2], bool))
    found = np.bincount(np.asarray(chosen)[0], minlength=3) / draws
    np.testing.assert_allclose(found, wanted, atol=0.04)


def test_noise_is_fine_enough_for_a_large_vocabulary():
    """Small arrivals e^-g, which decide between the tail and a likely token, lie on no lattice of
    2^-23, and are as many as they should be."""
    law, positions = Law.of([Sampling(1.0, seed=4)]), jnp.arange(32, dtype=jnp.int32)[None]
    noise = np.asarray(keyed_noise(law, positions, 163_840), np.float64)
    small = np.exp(-noise[noise > -np.log(1e-5)]) * 2**23
    wanted = noise.size * 1e-5
    assert abs(small.size - wanted) < 5 * np.sqrt(wanted)
    assert (np.abs(small - np.round(small)) > 0.01).mean() > 0.9


def test_noise_is_keyed_by_seed_and_position_alone():
    positions = jnp.array([[5, 6], [5, 9]], jnp.int32)
    law = Law.of([Sampling(1.0, seed=1), Sampling(0.5, seed=2)])
    noise = np.asarray(keyed_noise(law, positions, 50))
    alone = keyed_noise(Law.of([Sampling(1.0, seed=2)]), jnp.array([[9]], jnp.int32), 50)
    np.testing.assert_array_equal(noise[1, 1], alone[0, 0])  # whatever the batch and temperature
    for other in (noise[0, 1], noise[1, 0], noise[1, 1]):
        assert np.abs(noise[0, 0] - other).max() > 1
