"""Our models on published weights against the goldens of transformers and a NumPy oracle."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import tiny_model

from ddtree_jax.checkpoint import load_drafter, load_target
from ddtree_jax.config import PAGE_SIZE
from ddtree_jax.model.attention import expanded_attention
from ddtree_jax.model.dflash import block_visibility, grouped_attention, merge_dflash
from ddtree_jax.model.kimi import DecoderLayer, merge_kimi
from ddtree_jax.pallas.tree_attention_reference import tree_attention_reference

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
TARGETS = sorted(folder.name for folder in GOLDEN.glob("kimi_*"))
DFLASH = GOLDEN / "dflash_small"

sys.path.append(str(TESTS / "oracles"))
import plain_dflash  # noqa: E402


def relative(found, wanted) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def test_bf16_sums_over_layers_and_logits_are_not_rounded(monkeypatch):
    """What a layer computes and what is kept of it is bf16."""
    seen, call = [], DecoderLayer.__call__

    def watched(self, x, *rest):
        seen.append(x.dtype)
        return call(self, x, *rest)

    monkeypatch.setattr(DecoderLayer, "__call__", watched)
    target, index = tiny_model("bfloat16").weights.target_module(), jnp.arange(8, dtype=jnp.int32)
    rows = target(index, index, index >= 0, expanded_attention, (0,))
    logits = target.lm_head(rows.hidden)
    assert {str(dtype) for dtype in seen} == {"float32"} == {str(logits.dtype)}
    assert {str(x.dtype) for x in (rows.hidden, rows.taps, rows.latents)} == {"bfloat16"}
    assert (logits != logits.astype(jnp.bfloat16)).mean() > 0.9


def cases(name):
    expected = load_file(GOLDEN / name / "expected.safetensors")
    for case in sorted({key.split(".")[0] for key in expected}):
        yield tuple(expected[f"{case}.{part}"] for part in ("input_ids", "logits", "hidden_states"))


def forward(config, leaves, tokens, start, attend):
    """Logits, outputs of all layers [m, layers, hidden] and latents of rows from `start` on."""

    @jax.jit
    def run(leaves):
        model = merge_kimi(config, leaves, jnp.float32)
        rows = tokens.shape[0]
        positions = start + jnp.arange(rows, dtype=jnp.int32)
        taps = tuple(range(config.num_hidden_layers))
        out = model(tokens, positions, jnp.ones(rows, bool), attend, taps)
        return model.lm_head(out.hidden), out.taps, out.latents

    return run(leaves)


def absorbed(config, prefix, rows):
    """Rows as a chain behind `prefix` [layers, S, latent], in pages that hold NaN elsewhere."""
    layers, length, size = prefix.shape
    pages = -(-length // PAGE_SIZE)
    table = jnp.arange(pages, 0, -1, dtype=jnp.int32)[None]  # backwards; page 0 is nobody's
    pool = np.full((layers, pages + 1, PAGE_SIZE, size), np.nan, np.float32)
    for token in range(length):
        pool[:, pages - token // PAGE_SIZE, token % PAGE_SIZE] = prefix[:, token]
    pool = jnp.asarray(pool)
    seen = np.tril(np.ones((rows, rows), bool))
    seen = np.pad(seen, ((0, 0), (0, -rows % 32))).reshape(rows, -1, 32)
    words = (seen * (1 << np.arange(32, dtype=np.uint64))).sum(-1).astype(np.uint32)

    def attend(mla, x, positions, layer):
        nope, rope, latent = mla.project(x, positions)
        out, _ = tree_attention_reference(
            mla.absorb(nope, rope), latent, pool, layer, table,
            jnp.array([length], jnp.int32), jnp.array([0, rows], jnp.int32), jnp.asarray(words),
            scale=config.softmax_scale, value_size=config.kv_lora_rank,
        )  # fmt: skip
        return mla.output(out), latent

    return attend


@pytest.mark.parametrize("name", TARGETS)
def test_target_equals_transformers(name):
    config, leaves = load_target(GOLDEN / name, jnp.float32)
    for ids, logits, hidden in cases(name):
        tokens, wanted_taps = jnp.asarray(ids[0]), hidden.transpose(1, 0, 2)
        found, taps, latents = forward(config, leaves, tokens, 0, expanded_attention)
        assert relative(found, logits) <= 1e-4
        for layer in range(config.num_hidden_layers):
            assert relative(taps[:, layer], wanted_taps[:, layer]) <= 1e-4
        start = max(tokens.shape[0] // 2, tokens.shape[0] - 4)  # of 70 rows, 66: two pages
        attend = absorbed(config, latents[:, :start], tokens.shape[0] - start)
        found, taps, _ = forward(config, leaves, tokens[start:], start, attend)
        assert relative(found, logits[start:]) <= 1e-4
        for layer in range(config.num_hidden_layers):
            assert relative(taps[:, layer], wanted_taps[start:, layer]) <= 1e-4


def drafter_logits(config, leaves, target, taps, root, rows):
    """Context keys and values, and logits [rows - 1, V], of one block behind `taps` [S, ..]."""
    drafter = merge_dflash(config, leaves, jnp.float64)
    length = taps.shape[0]
    positions = jnp.arange(length + rows, dtype=jnp.int32)
    before, block = positions[:length], positions[length:]
    taps = jnp.asarray(taps, jnp.float64).reshape(length, len(config.target_layer_ids), -1)
    keys, values = drafter.context(taps, before)

    def attend(queries, block_keys, block_values, layer):
        mask = jnp.concatenate(
            [
                block_visibility(config, layer, block, before, False),
                block_visibility(config, layer, block, block, True),
            ],
            axis=1,
        )
        all_keys = jnp.concatenate([keys[layer], block_keys[0]])
        all_values = jnp.concatenate([values[layer], block_values[0]])
        return grouped_attention(queries[0], all_keys, all_values, mask)[None]

    tokens = [root] + [config.mask_token_id] * (rows - 1)
    embedded = jnp.asarray(target["embed"][tokens], jnp.float64)[None]
    hidden = drafter(embedded, block[None], attend)[0, 1:]
    return keys, values, hidden @ jnp.asarray(target["lm_head"], jnp.float64).T


@pytest.mark.parametrize("causal", [False, True])
def test_drafter_equals_oracle(causal):
    published = json.loads((DFLASH / "config.json").read_text())
    weights, target, expected = (
        load_file(DFLASH / f"{name}.safetensors") for name in ("model", "target", "expected")
    )
    target_config = replace(load_target(GOLDEN / TARGETS[0], jnp.float32)[0], num_hidden_layers=10)
    with jax.enable_x64(True):
        config, leaves = load_drafter(DFLASH, jnp.float64, target_config)
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float64")}
        config = replace(config, causal_sliding=causal)
        for case in sorted({k.rsplit(".", 1)[0] for k in expected if k.endswith(".root")}):
            length, rows = (int(part[1:]) for part in case.split("."))
            taps, root = expected["context_taps"][:length], int(expected[case + ".root"][0])
            keys, values, logits = drafter_logits(config, leaves, target, taps, root, rows)
            oracle = plain_dflash.drafter_logits(
                weights, published, target["embed"], target["lm_head"], taps, root, rows, causal
            )
            assert relative(logits, oracle) <= 1e-9
            golden = expected[case + (".logits_sliding_causal" if causal else ".logits")]
            assert relative(logits, golden) <= 1e-5
            assert relative(keys, expected["context_keys"][:, :length]) <= 1e-9
            assert relative(values, expected["context_values"][:, :length]) <= 1e-9
