"""The drafter beside its target: one loss of two, its gradient through the taps alone."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.model.dflash import DFlash
from ddtree_jax.model.kimi import Kimi
from ddtree_jax.train import blocks, drafter, forward, joint, target
from ddtree_jax.train.nano import TINY
from ddtree_jax.train.params import initialise
from ddtree_jax.train.windows import Streams, sample

RECIPE = target.Recipe(batch=2, length=48, long_length=96, joint_anchors=3, dtype="float32")
KEY = jax.random.key(7)


@pytest.fixture(scope="module")
def params():
    return initialise(Kimi, TINY.trained, 0), initialise(DFlash, TINY.drafter, 1)


@pytest.fixture(scope="module")
def windows():
    ids = jax.random.randint(jax.random.key(0), (2, 500), 0, 2048)
    return sample(jax.random.key(1), Streams(*ids), 2, 48, 0.5, 1.0, 6)


@partial(jax.jit, static_argnums=0)
def loss(recipe, params, windows):
    value, (_, metrics) = target.loss(TINY, recipe, params, windows, False, KEY)
    return value, metrics


@jax.jit
def plain_loss(masters, windows):
    """Cross entropy and z-loss alone, as without a drafter."""
    weights = forward.working(masters, jnp.float32, False)
    nats, partition, _ = target.token_losses(TINY.trained, weights, windows.tokens, "xla")
    nats, z = (jnp.where(windows.kept, a, 0) for a in (nats, partition**2))
    return (nats.sum() + RECIPE.z_loss * z.sum()) / windows.kept.sum()


@jax.jit
def block_loss(params, windows, fixed):
    """The block loss by the drafter's stage's pieces, embedding and head from `fixed`."""
    masters, draft = params
    tokens = windows.tokens[:, :-1]
    rows = forward.run(TINY.trained, masters, tokens, "xla", TINY.drafter.target_layer_ids)
    chosen = joint.choose(KEY, windows, 3, 7)
    taps = rows.taps.reshape(2, 48, -1, TINY.trained.hidden_size)
    scores = blocks.block_logits(TINY.drafter, draft, fixed, taps, tokens, chosen.anchors)
    return blocks.loss(scores, chosen)[0]


def test_loss_is_the_sum_of_two(params, windows):
    value, metrics = loss(RECIPE, params, windows)
    want = plain_loss(params[0], windows), block_loss(params, windows, params[0])
    np.testing.assert_allclose(value, want[0] + 0.3 * want[1], rtol=1e-6)
    np.testing.assert_allclose(metrics["block"], want[1], rtol=1e-6)
    assert 1 <= metrics["accept"] < 8


def test_gradients_are_the_sum_and_reach_the_target_through_taps(params, windows):
    both = jax.jit(jax.grad(lambda p: loss(RECIPE, p, windows)[0]))(params)
    plain = jax.jit(jax.grad(plain_loss))(params[0], windows)
    block, drafter_grads = jax.jit(jax.grad(block_loss))(params, windows, params[0])
    for name in plain:
        want = plain[name] + 0.3 * block[name]
        np.testing.assert_allclose(both[0][name], want, rtol=1e-3, atol=1e-6, err_msg=name)
    for name in drafter_grads:
        np.testing.assert_allclose(both[1][name], 0.3 * drafter_grads[name], rtol=1e-3, atol=1e-6)
        assert jnp.abs(drafter_grads[name]).max() > 0, name
    # As a head the target's is a constant; nothing after the last tap learns from it.
    assert not block["lm_head/weight"].any() and not block["norm/weight"].any()
    for layer in range(TINY.trained.num_hidden_layers):
        assert jnp.abs(block[f"layers/{layer}/self_attn/o_proj/weight"]).max() > 0
    # Embeddings learn from tokens of the context only, not from masks.
    mask = TINY.drafter.mask_token_id
    assert not both[0]["embed_tokens/weight"][mask].any()


def test_without_weight_there_is_no_drafter(params, windows):
    off = replace(RECIPE, joint_weight=0.0)
    state = target.initial(TINY, off)
    assert set(state) == {"params", "moments", "step", "total"}
    value, metrics = loss(off, (params[0], None), windows)
    np.testing.assert_array_equal(value, plain_loss(params[0], windows))
    assert list(metrics) == ["loss"]


def test_anchors_have_context_and_horizon(windows):
    chosen = joint.choose(KEY, windows, 40, 7)
    assert chosen.anchors.min() >= 1 and chosen.anchors.max() + 7 <= 48
    assert (jnp.diff(chosen.anchors, axis=1) >= 0).all()  # one in each part, in order
    tokens, kept = np.asarray(windows.tokens), np.asarray(windows.kept)
    for b, a, k in np.ndindex(2, 40, 7):
        place = int(chosen.anchors[b, a]) + 1 + k
        assert chosen.labels[b, a, k] == tokens[b, place]
        assert chosen.valid[b, a, k] == kept[b, place - 1]
    assert not chosen.valid.all()


@pytest.mark.slow
def test_longer_windows_have_more_blocks(params):
    ids = jax.random.randint(jax.random.key(0), (2, 500), 0, 2048)
    windows = sample(jax.random.key(1), Streams(*ids), 1, 96, 0.5, 0.0, 6)
    _, metrics = loss(RECIPE, params, windows)

    @jax.jit
    def logits(params, tokens, anchors):
        taps = drafter.taps_of(TINY, params[0], tokens, "xla")
        return blocks.block_logits(TINY.drafter, params[1], params[0], taps, tokens, anchors)

    chosen = joint.choose(KEY, windows, 6, 7)
    scores = logits(params, windows.tokens[:, :-1], chosen.anchors)
    np.testing.assert_allclose(metrics["block"], blocks.loss(scores, chosen)[0], rtol=1e-5)


def test_export_round_trip(params, tmp_path):
    joint.export(tmp_path, params[1])
    again = joint.load(tmp_path)
    for name, value in params[1].items():
        np.testing.assert_array_equal(again[name], value.astype(jnp.bfloat16).astype(jnp.float32))
