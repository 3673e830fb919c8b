"""The drafter's training pass is its inference pass at many anchors at once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.model.dflash import DFlash, block_visibility, grouped_attention, merge_dflash
from ddtree_jax.model.kimi import Kimi
from ddtree_jax.train import blocks, drafter, forward
from ddtree_jax.train.nano import TINY
from ddtree_jax.train.params import initialise, leaves

CONFIG = TINY.drafter
LENGTH = 40


@pytest.mark.parametrize("layer", range(CONFIG.num_hidden_layers))
def test_visibility_against_a_loop(layer):
    config = replace(CONFIG, sliding_window=9)
    anchors = jnp.array([[3, 30], [0, 17]], jnp.int32)
    got = np.asarray(blocks.context_visibility(config, layer, anchors, LENGTH))
    sliding = config.layer_types[layer] == "sliding_attention"
    for b in range(2):
        for a in range(2):
            for row in range(config.block_size):
                query, anchor = int(anchors[b, a]) + row, int(anchors[b, a])
                want = [key < anchor and (not sliding or query - key < 9) for key in range(LENGTH)]
                assert got[b, a * config.block_size + row].tolist() == want


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ["plain", "xla"])
def test_training_logits_equal_inference(causal, implementation):
    config = replace(CONFIG, sliding_window=9, causal_sliding=causal)
    scale = replace(TINY, drafter=config)
    target = initialise(Kimi, TINY.trained, 0)
    weights = initialise(DFlash, config, 1)
    tokens = jax.random.randint(jax.random.key(2), (2, LENGTH), 0, 2048)
    anchors = jnp.array([[5, 21, 38], [11, 1, 30]], jnp.int32)
    taps = drafter.taps_of(scale, target, tokens, "xla")
    trained = blocks.block_logits(config, weights, target, taps, tokens, anchors, implementation)

    model = merge_dflash(config, leaves(weights), jnp.float32)
    for b, a in ((0, 1), (1, 0), (0, 2)):
        anchor = int(anchors[b, a])  # the prefix alone, as inference has it
        known = drafter.taps_of(scale, target, tokens[b : b + 1, :anchor], "xla")[0]
        before = jnp.arange(anchor, dtype=jnp.int32)
        keys, values = model.context(known, before)
        places = anchor + jnp.arange(config.block_size, dtype=jnp.int32)

        def attend(q, k, v, layer, keys=keys, values=values, before=before, places=places):
            mask = jnp.concatenate(
                [
                    block_visibility(config, layer, places, before, block=False),
                    block_visibility(config, layer, places, places, block=True),
                ],
                axis=1,
            )
            both = [jnp.concatenate(p) for p in ((keys[layer], k[0]), (values[layer], v[0]))]
            return grouped_attention(q[0], *both, mask)[None]

        ids = jnp.full(config.block_size, config.mask_token_id).at[0].set(tokens[b, anchor])
        hidden = model(target["embed_tokens/weight"][ids][None], places[None], attend)[0, 1:]
        want = forward.logits(target, hidden)
        np.testing.assert_allclose(trained[b, a], want, rtol=1e-4, atol=1e-4)


def test_accept_length_counts_leading_matches():
    labels = jnp.array([[[1, 2, 3], [1, 2, 3]]])
    said = jnp.array([[[1, 2, 0], [0, 2, 3]]])
    valid = jnp.array([[[True, True, True], [True, True, False]]])
    chosen = blocks.Blocks(jnp.zeros((1, 2), jnp.int32), labels, valid)
    taken, whole = blocks.accepted(jax.nn.one_hot(said, 5), chosen)
    assert taken.tolist() == [[3, 1]] and whole.tolist() == [[True, False]]


def test_fused_attention_has_the_gradients_of_the_plain_one():
    assert blocks._difference(CONFIG, "xla", jnp.float32) < 1e-5
    assert blocks.default_attention(CONFIG) == "plain"  # on a CPU


def test_loss_by_hand():
    scores = jax.random.normal(jax.random.key(0), (1, 2, 3, 5))
    labels = jnp.array([[[1, 2, 3], [4, 0, 1]]])
    valid = jnp.array([[[True, True, True], [True, False, True]]])
    value, accept = blocks.loss(scores, blocks.Blocks(jnp.zeros((1, 2), int), labels, valid))
    total = weight = 0.0
    for a in range(2):
        for k in range(3):
            if valid[0, a, k]:
                share = np.exp(-k / 4)
                total -= share * float(jax.nn.log_softmax(scores[0, a, k])[labels[0, a, k]])
                weight += share
    assert float(value) == pytest.approx(total / weight, rel=1e-5)
    hits = np.asarray(scores.argmax(-1) == labels)[0, 0]
    assert float(accept) == 1 + np.cumprod(hits).sum()
