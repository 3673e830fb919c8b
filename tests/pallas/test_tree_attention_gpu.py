"""The Hopper kernels on a GPU: numerics, determinism, and the bundled model through them.

python -m pytest -m gpu tests/pallas/test_tree_attention_gpu.py
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KINDS, lines_of, parents

import ddtree_jax as dd
from benchmarks.prompts import load
from ddtree_jax import step as steps
from ddtree_jax.pallas.tree_attention import Config, padded_attention, tree_attention
from ddtree_jax.pallas.tree_attention_reference import tree_attention_reference
from ddtree_jax.tree import chain

pytestmark = pytest.mark.gpu
# Requests, most rows, heads, latent, value, config; 20 draws each.
SHAPES = [
    (1, 9, 64, 576, 512, Config()),
    (4, 17, 64, 576, 512, Config()),
    (3, 33, 64, 576, 512, Config()),
    (32, 1, 64, 576, 512, Config()),
    (2, 65, 64, 576, 512, Config(merge_together=2)),
    (5, 128, 64, 576, 512, Config(merge_together=8)),
    (33, 9, 8, 576, 512, Config(least_share=1)),
    (2, 128, 8, 576, 512, Config(merge_together=16)),
    (7, 31, 32, 320, 192, Config(stages=4)),
    (6, 40, 16, 192, 192, Config(stages=3)),
    (128, 2, 8, 576, 512, Config(least_share=8)),
    (5, 9, 4, 576, 512, Config()),
    (3, 17, 11, 576, 512, Config()),
]
PAGES = 40  # of a request's table


def draw(rng, requests, width, heads, d):
    """A ragged case on poisoned memory: lengths short and long, sizes from 1 to `width`."""
    lengths = rng.integers(0, PAGES * 64 + 1, requests)
    special = [0, 1, 63, 64, 65, PAGES * 64]
    for r in range(0, requests, 3):
        lengths[r] = special[rng.integers(len(special))]
    sizes = rng.integers(1, width + 1, requests)
    sizes[rng.integers(requests)] = width
    padding = rng.integers(0, width - sizes + 1)  # rows past a request's size
    row_start = np.concatenate([[0], np.cumsum(sizes + padding)])
    m = requests * width + 1  # all calls of a shape are one program: the rest is nobody's
    words = np.zeros((m, -(-width // 32)), np.uint32)
    alive = np.zeros(m, bool)
    for r in range(requests):
        for i, line in enumerate(lines_of(parents(rng, sizes[r], KINDS[rng.integers(5)]))):
            alive[row_start[r] + i] = True
            for j in line:
                words[row_start[r] + i, j // 32] |= np.uint32(1 << (j % 32))
    tables = rng.permutation(requests * PAGES + 3)[: requests * PAGES].reshape(requests, PAGES)
    keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), 3)
    queries, latents, pool = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(
            keys, [(m, heads, d), (m, d), (2, requests * PAGES + 3, 64, d)], strict=True
        )
    )
    free = np.ones((requests * PAGES + 3, 64), bool)
    free[tables] = (np.arange(PAGES * 64) >= lengths[:, None]).reshape(requests, PAGES, 64)
    dead = jnp.asarray(~alive)
    return (
        jnp.where(dead[:, None, None], jnp.nan, queries),
        jnp.where(dead[:, None], jnp.nan, latents),
        jnp.where(jnp.asarray(free)[None, :, :, None], jnp.nan, pool),
        jnp.int32(1),
        *(jnp.asarray(x, jnp.int32) for x in (tables, lengths, row_start)),
        jnp.asarray(words),
    )


@pytest.mark.parametrize("requests,width,heads,d,value,config", SHAPES)
def test_random_cases(requests, width, heads, d, value, config):
    """Relative error at most 1e-2 against float32, no NaN, and the same bits twice."""
    rng = np.random.default_rng([requests, width, heads])
    keywords = dict(scale=d**-0.5 * 2, value_size=value, max_rows=width)
    attend = jax.jit(partial(padded_attention, **keywords, config=config))
    reference = jax.jit(partial(tree_attention_reference, **keywords))
    for _ in range(20):
        arguments = draw(rng, requests, width, heads, d)
        out, lse = attend(*arguments)
        again = attend(*arguments)
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(again[0], np.float32))
        np.testing.assert_array_equal(lse, again[1])
        wide = [x.astype(jnp.float32) for x in arguments[:3]]
        wanted, wanted_lse = reference(*wide, *arguments[3:])
        unseen = np.isinf(wanted_lse)
        np.testing.assert_array_equal(np.isinf(lse), unseen)
        found, wanted = np.asarray(out, np.float64), np.asarray(wanted, np.float64)
        assert np.isfinite(found).all() and (found[unseen] == 0).all()
        norm = np.linalg.norm(wanted, axis=-1)[~unseen]
        assert (np.linalg.norm(found - wanted, axis=-1)[~unseen] <= 1e-2 * norm).all()
        np.testing.assert_allclose(lse[~unseen], wanted_lse[~unseen], rtol=0, atol=2e-3)


def test_more_than_two_to_the_31_elements():
    """A pool of 61 layers whose last one starts behind element 2^31."""
    pages, d = 1024, 576
    pool = jnp.zeros((61, pages, 64, d), jnp.bfloat16)
    last = jax.random.normal(jax.random.key(0), (pages, 64, d), jnp.bfloat16)
    pool = jax.jit(lambda p, x: p.at[-1].set(x), donate_argnums=0)(pool, last)
    assert pool.size > 2**31
    queries = jax.random.normal(jax.random.key(1), (9, 64, d), jnp.bfloat16)
    latents = jax.random.normal(jax.random.key(2), (9, d), jnp.bfloat16)
    rest = (
        jnp.arange(pages, dtype=jnp.int32)[None], jnp.array([pages * 64 - 5], jnp.int32),
        jnp.array([0, 9], jnp.int32), jnp.asarray(2 ** np.arange(1, 10)[:, None] - 1, jnp.uint32),
    )  # fmt: skip
    keywords = dict(scale=d**-0.5, value_size=512)
    out, _ = tree_attention(queries, latents, pool, 60, *rest, **keywords)
    wide = [x.astype(jnp.float32) for x in (queries, latents, last[None])]
    wanted, _ = tree_attention_reference(*wide, 0, *rest, **keywords)
    error = jnp.linalg.norm(out.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
    assert error <= 1e-2


@pytest.mark.parametrize("rows", (1, 9, 33))
def test_bundled_model_teacher_forced(monkeypatch, rows):
    """At least 99.5% of the reference path's tokens; others at near-ties of bf16 only."""
    model = dd.load("kimi-nano", dtype="bfloat16")
    ids = [model.tokenizer.encode(text) for text in load("code_long", 64)]

    def logits_of(weights, state, tree):
        return steps.verify(weights.target_module(), state, tree, ())[0].astype(jnp.float32)

    through = jax.jit(logits_of)
    plain = jax.jit(lambda *arguments: logits_of(*arguments))
    kernel, reference = [], []
    for cut in (37, 100, 320, 511, 900, 980):
        # As many pages and as much room for tokens each time: one program for all.
        state = dd.prefill(model, [i[:cut] for i in ids], max_new_tokens=2040 - cut)
        coming = jnp.asarray([i[cut : cut + rows] for i in ids], jnp.int32)
        tree = chain(
            coming[:, 0], coming[:, 1:], jnp.full(len(ids), rows - 1, jnp.int32), state.active
        )
        kernel.append(through(model.weights, state, tree))
        with monkeypatch.context() as patched:
            patched.setattr(steps, "plan_if_supported", lambda *_, **__: None)
            reference.append(plain(model.weights, state, tree))
    assert through._cache_size() == plain._cache_size() == 1
    assert "mosaic_gpu" in through.lower(model.weights, state, tree).as_text()
    kernel, reference = (np.concatenate([np.asarray(x) for x in xs]) for xs in (kernel, reference))
    assert np.isfinite(kernel).all()
    differ = kernel.argmax(-1) != reference.argmax(-1)
    assert differ.mean() <= 5e-3
    best = np.sort(reference[differ], axis=-1)[..., -2:]
    assert (best[..., 1] - best[..., 0] <= 2**-6 * np.abs(best[..., 1])).all()
