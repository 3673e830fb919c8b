"""The served drafter pass, with its pages, windows and masks, against a dense computation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lossless import poison, prompts_of
from tiny import tiny_model

import ddtree_jax as dd
from ddtree_jax.model.dflash import grouped_attention
from ddtree_jax.step import draft

LENGTHS = (1, 19, 20, 63, 64, 65, 84, 127, 128, 129, 191, 192, 193)
OTHERS = [(20, False), (64, False), (64, True), (65, False)]


@pytest.mark.parametrize(
    "window, causal",
    [(20, True), (65, True), *(pytest.param(*c, marks=pytest.mark.slow) for c in OTHERS)],
)
def test_pages_and_windows(window, causal):
    """Every length around the edges of pages and windows; the rest of the cache holds NaN."""
    with jax.enable_x64(True):
        model = tiny_model("float64")
        config = replace(model.drafter_config, sliding_window=window, causal_sliding=causal)
        weights = replace(model.weights, drafter_config=config)
        model = replace(model, weights=weights)
        state = poison(dd.prefill(model, prompts_of(LENGTHS), max_new_tokens=8))
        got = jax.jit(
            lambda w, s: draft(w.target_module(), w.drafter_module(), s, config.block_size)
        )(weights, state)
        for r, n in enumerate(LENGTHS):
            wanted = dense(weights, config, state, r, n)
            np.testing.assert_allclose(got[r], wanted, rtol=0, atol=1e-12, err_msg=str(n))


def dense(weights, config, state, request, length):
    """All context keys of a request at once, masks by distance."""
    target, drafter = weights.target_module(), weights.drafter_module()
    pages, block = state.block_tables[request], config.block_size
    keys, values = (
        pool[:, pages].reshape(pool.shape[0], -1, *pool.shape[3:])[:, :length]
        for pool in (state.cache.keys, state.cache.values)
    )
    positions = length + np.arange(block)
    distance = positions[:, None] - np.arange(length + block)[None]

    def attend(q, k, v, layer):
        mask = np.ones_like(distance, bool)
        if config.layer_types[layer] == "sliding_attention":
            mask = np.abs(distance) < config.sliding_window
            mask &= (distance >= 0) | (not config.causal_sliding)
        all_keys = jnp.concatenate([keys[layer], k[0]])
        all_values = jnp.concatenate([values[layer], v[0]])
        return grouped_attention(q[0], all_keys, all_values, jnp.asarray(mask))[None]

    ids = jnp.full((1, block), config.mask_token_id).at[0, 0].set(state.root[request])
    hidden = drafter(target.embed_tokens(ids), jnp.asarray(positions)[None], attend)
    return target.lm_head(hidden[:, 1:])[0]
