"""The drafter's stage: anchors in said text, training text among it, the split evaluation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.model.dflash import DFlash
from ddtree_jax.model.kimi import Kimi
from ddtree_jax.train import drafter
from ddtree_jax.train.nano import TINY
from ddtree_jax.train.params import initialise
from ddtree_jax.train.windows import Streams

CONFIG = TINY.drafter
LENGTH = 40


def data(end):
    tokens = jnp.arange(2 * LENGTH, dtype=jnp.uint16).reshape(2, LENGTH)
    return drafter.Data(tokens, jnp.array([10, 20]), jnp.array(end), jnp.array([0.0, 1.0]))


def test_anchors_lie_in_said_text():
    blocks = drafter.choose(jax.random.key(0), data([18, 40]), 200, 7)
    assert blocks.anchors[0].min() == 10 and blocks.anchors[0].max() == 16
    assert blocks.anchors[1].min() == 20 and blocks.anchors[1].max() == 38
    places = blocks.anchors[..., None] + jnp.arange(1, 8).reshape(1, 1, 7)
    ends = jnp.array([18, 40])[:, None, None]
    assert (blocks.valid == (places < ends)).all()
    offsets = jnp.array([0, LENGTH])[:, None, None]
    assert jnp.where(blocks.valid, blocks.labels == places + offsets, True).all()
    assert blocks.valid[..., 0].all()


def test_a_text_without_room_counts_nothing():
    blocks = drafter.choose(jax.random.key(0), data([11, 20]), 5, 7)
    assert not blocks.valid.any()


def test_training_text_counts_from_its_second_token():
    ids = jnp.arange(300, dtype=jnp.uint16)
    real = drafter.real_text(jax.random.key(0), Streams(ids, ids), 6, 32, 0.5)
    assert real.tokens.shape == (6, 32) and (jnp.diff(real.tokens, axis=1) == 1).all()
    chosen = drafter.choose(jax.random.key(1), real, 50, 7)
    assert chosen.anchors.min() == 1 and chosen.anchors.max() == 30


def test_evaluation_is_split_by_temperature():
    recipe = drafter.Recipe(rows=128, anchors=3, dtype="float32")
    target, weights = initialise(Kimi, TINY.trained, 0), initialise(DFlash, CONFIG, 1)
    tokens = jax.random.randint(jax.random.key(2), (4, 32), 0, 2048)
    part = drafter.Data(
        tokens, jnp.full(4, 5), jnp.full(4, 32), jnp.array([0.0, 0.6, 0.0, 1.0], jnp.float32)
    )
    out = drafter.evaluate(TINY, recipe, weights, target, {"short": part})
    assert list(out) == ["short greedy", "short T=0.6", "short T=1.0"]
    assert all(1 <= v < 8 for v in out.values())


@pytest.mark.slow
def test_real_share_zero_needs_no_streams():
    recipe = replace(drafter.Recipe(), rows=64, anchors=2, chunk=1, real_share=0.0, dtype="float32")
    params = initialise(DFlash, CONFIG, 1)
    state = {
        "params": params, "moments": recipe.optimizer.init(params),
        "step": jnp.int32(0), "total": jnp.int32(4),
    }  # fmt: skip
    target = initialise(Kimi, TINY.trained, 0)
    before = np.asarray(params["fc/weight"])
    part = drafter.Data(
        jnp.ones((4, 32), jnp.uint16), jnp.full(4, 5), jnp.full(4, 32), jnp.zeros(4)
    )
    state, metrics = drafter.chunk_step(TINY, recipe, 2)(state, target, part, None)
    assert jnp.isfinite(metrics["loss"]).all() and (state["params"]["fc/weight"] != before).any()
