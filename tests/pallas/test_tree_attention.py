"""The attention reference against a softmax in float64, row by row, on poisoned memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas.tree_attention_reference import tree_attention_reference

PAGE, D, V, HEADS = 64, 24, 16, 2


def random_parents(rng, nodes, kind):
    if kind == "chain":
        return [i - 1 for i in range(nodes)]
    if kind == "star":
        return [-1] + [0] * (nodes - 1)
    return [-1] + [int(rng.integers(0, i)) for i in range(1, nodes)]


def case(rng, sizes, prefixes, width, kind):
    """Packed rows of requests of different sizes; everything not owned is NaN."""
    requests, words = len(sizes), -(-width // 32)
    pages = max(1, -(-max(prefixes) // PAGE)) + 1
    pool = np.full((3, requests * pages + 2, PAGE, D), np.nan, np.float32)
    tables = rng.permutation(requests * pages + 2)[: requests * pages].reshape(requests, pages)
    row_start = np.concatenate([[0], np.cumsum(sizes)])
    rows = int(row_start[-1])
    latents = rng.normal(size=(rows, D)).astype(np.float32)
    ancestors = np.zeros((rows, words), np.uint32)
    lines = []
    for r, n in enumerate(sizes):
        for p in range(prefixes[r]):
            pool[1, tables[r, p // PAGE], p % PAGE] = rng.normal(size=D)
        parents = random_parents(rng, n, kind)
        own = []
        for i, parent in enumerate(parents):
            own.append({i} if parent < 0 else own[parent] | {i})
            for j in own[i]:
                ancestors[row_start[r] + i, j // 32] |= np.uint32(1 << (j % 32))
        lines.append(own)
    queries = rng.normal(size=(rows, HEADS, D)).astype(np.float32)
    return pool, tables, row_start, latents, ancestors, queries, lines


def slow(pool, tables, prefixes, row_start, latents, queries, lines, scale):
    out, lse = np.zeros((*queries.shape[:2], V)), np.full(queries.shape[:2], -np.inf)
    for r, own in enumerate(lines):
        prefix = [pool[1, tables[r, p // PAGE], p % PAGE] for p in range(prefixes[r])]
        for i, line in enumerate(own):
            m = row_start[r] + i
            keys = np.array(prefix + [latents[row_start[r] + j] for j in sorted(line)], np.float64)
            scores = keys @ queries[m].T.astype(np.float64) * scale
            top = scores.max(axis=0)
            weights = np.exp(scores - top)
            out[m] = (weights / weights.sum(axis=0)).T @ keys[:, :V]
            lse[m] = top + np.log(weights.sum(axis=0))
    return out, lse


CASES = [  # sizes of the requests' trees, prefixes, width the words allow, tree kind
    ((1,), (0,), 1, "chain"), ((2, 7), (1, 63), 8, "random"), ((8, 8, 8), (64, 65, 0), 9, "random"),
    ((9,), (130,), 9, "star"), ((17, 1, 5), (3, 64, 200), 17, "random"), ((31, 33), (65, 1), 33,
    "random"), ((64, 3), (0, 63), 64, "chain"), ((65,), (64,), 65, "random"),
    ((128, 1), (10, 127), 128, "random"),
]  # fmt: skip


@pytest.mark.parametrize("sizes,prefixes,width,kind", CASES)
def test_against_a_slow_softmax(sizes, prefixes, width, kind):
    rng = np.random.default_rng([*sizes, *prefixes])
    pool, tables, row_start, latents, ancestors, queries, lines = case(
        rng, sizes, prefixes, width, kind
    )
    expected = slow(pool, tables, prefixes, row_start, latents, queries, lines, 0.3)
    out, lse = jax.jit(
        tree_attention_reference, static_argnames=("scale", "value_size", "max_rows")
    )(
        queries, latents, pool, 1, tables, np.array(prefixes), row_start, ancestors,
        scale=0.3, value_size=V,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=3e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=0, atol=3e-5)


def test_rows_past_a_size_give_zero():
    """Uniform rows of 4, the second tree of 2: its last rows hold NaN and no bits."""
    rng = np.random.default_rng(0)
    pool, tables, _, latents, ancestors, queries, lines = case(rng, (4, 4), (5, 64), 4, "chain")
    ancestors[6:] = 0
    latents[6:] = np.nan
    out, lse = tree_attention_reference(
        *map(jnp.asarray, (queries, latents, pool)), 1, tables, jnp.array([5, 64]),
        jnp.array([0, 4, 8]), jnp.asarray(ancestors), scale=0.3, value_size=V, max_rows=4,
    )  # fmt: skip
    assert (out[6:] == 0).all() and (lse[6:] == -jnp.inf).all()
    assert np.isfinite(out).all() and np.isfinite(lse[:6]).all()


def test_refuses_more_rows_than_the_words_name():
    rng = np.random.default_rng(0)
    pool, tables, row_start, latents, ancestors, queries, _ = case(rng, (4,), (5,), 4, "chain")
    with pytest.raises(ValueError, match="max_rows=5"):
        tree_attention_reference(
            queries, latents, pool, 1, tables, np.array([5]), row_start, ancestors,
            scale=1.0, value_size=V, max_rows=5,
        )  # fmt: skip
