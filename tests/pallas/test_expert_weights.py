"""Records of INT4 weights: golden words, the layout as documented, and the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas.experts import published

from ddtree_jax.checkpoint import load_target, save_target
from ddtree_jax.loading import BUNDLED
from ddtree_jax.model.kimi import merge_kimi
from ddtree_jax.model.quantize import pack_int4, unpack_int4
from ddtree_jax.pallas import expert_weights
from ddtree_jax.pallas.expert_weights import (
    Int4,
    Records,
    block_values,
    down_records,
    expert_matrix,
    gate_up_records,
    layer_matrices,
    stack_shape,
)
from ddtree_jax.shards import read_json


def bits(scales):
    return np.asarray(scales).view(np.uint16)


def test_golden_block():
    """Row r, input i holds (3 r + i) mod 16, scale bits 256 r + g: words of two threads by hand."""
    row, column = np.mgrid[:256, :128]
    words = pack_int4(((3 * row + column) % 16 - 8).astype(np.int8))
    scales = (256 * np.arange(256)[:, None] + np.arange(4)[None]).astype(np.uint16)
    scales = jax.lax.bitcast_convert_type(jnp.asarray(scales), jnp.bfloat16)
    made = np.asarray(down_records(Int4(jnp.asarray(words), scales))).view(np.uint32)
    assert made.shape == (1, 1, 4, 9, 128)
    # Thread 0, word 0: rows 0 and 8, inputs 0, 8 (nibbles 0-3) and 1, 9 (nibbles 4-7).
    assert made[0, 0, 0, 0, 0] == 0x1991_0880
    # Thread 37 (warp 1, lane 1, column 1), block 2, inputs 64 + 16 * 3 ..: rows 145, 153.
    assert made[0, 0, 2].reshape(-1)[512 + 4 * 37 + 3] == 0x6EE6_5DD5
    assert (
        made[0, 0, 2].reshape(-1)[1024 + 4 * (37 // 4) + 2] == (153 * 256 + 2) << 16 | 145 * 256 + 2
    )


def test_layout_as_documented():
    rng = np.random.default_rng(0)
    weight = published(rng, hidden=512, width=256)[2]
    values = unpack_int4(np.asarray(weight.words))[1, 2].astype(int) + 8
    record = np.asarray(down_records(weight)).view(np.uint32)[1, 2, 1, 1]
    for _ in range(300):
        block, j, t, s, p, b, h, g = (int(rng.integers(n)) for n in (4, 2, 128, 4, 2, 2, 2, 4))
        lane, column, words = t % 32 // 4, t % 4, record[block].reshape(-1)
        row = 256 + 64 * block + 16 * (t // 32) + lane + 8 * h
        nibble = words[512 * j + 4 * t + s] >> 4 * (4 * p + 2 * b + h) & 15
        assert nibble == values[row, 128 + 64 * j + 16 * s + 8 * b + 2 * column + p]
        scale = words[1024 + 4 * (t // 4) + g] >> 16 * h & 0xFFFF
        assert scale == bits(weight.scales)[1, 2, row, 4 + g]


def test_records_round_trip_bit_for_bit():
    gate, up, down = published(np.random.default_rng(1), hidden=512, width=256)
    both = jax.jit(gate_up_records)(gate, up)
    for records, weight, part in ((both, gate, "gate"), (both, up, "up"), (None, down, "down")):
        records = down_records(weight) if records is None else records
        back = expert_weights.published(records, part)
        assert (np.asarray(back.words) == np.asarray(weight.words)).all()
        assert (bits(back.scales) == bits(weight.scales)).all()
        kept = Records(records, part)
        assert stack_shape(kept) == stack_shape(weight)
        for layer, expert in ((0, 0), (1, 5)):
            pair = (expert_matrix(w, layer, expert, jnp.bfloat16) for w in (kept, weight))
            assert np.array_equal(*map(np.asarray, pair))
        pair = (layer_matrices(w, 1, jnp.float32) for w in (kept, weight))
        assert np.array_equal(*map(np.asarray, pair))


def test_one_expert_packs_as_many_do():
    """Loading packs expert by expert."""
    gate, up, down = published(np.random.default_rng(2))
    alone = [Int4(w.words[1, 4], w.scales[1, 4]) for w in (gate, up, down)]
    assert (gate_up_records(gate, up)[1, 4] == gate_up_records(*alone[:2])).all()
    assert (down_records(down)[1, 4] == down_records(alone[2])).all()


def test_block_values_are_the_matrix():
    weight = published(np.random.default_rng(3))[2]
    nibbles, scales = block_values(down_records(weight)[0, 1, 0, 0, 3])
    words = np.asarray(weight.words)[0, 1, 192:256]
    assert (np.asarray(nibbles) - 8 == unpack_int4(words)).all()
    assert (bits(scales) == bits(weight.scales)[0, 1, 192:256]).all()


def test_loading_packs_every_expert(tmp_path):
    """kimi-nano with records holds the published bits; such a target is not saved by mistake."""
    folder = BUNDLED / "kimi-nano"
    loaded = [load_target(folder, "bfloat16", records) for records in (False, True)]
    assert [config.expert_records for config, _ in loaded] == [False, True]
    stored, packed = (merge_kimi(c, leaves, "bfloat16").experts.weights() for c, leaves in loaded)
    for weight, kept in zip(stored, packed, strict=True):
        back = expert_weights.published(kept.words, kept.part)
        assert (np.asarray(back.words) == np.asarray(weight.words)).all()
        assert (bits(back.scales) == bits(weight.scales)).all()
    config, leaves = loaded[1]
    with pytest.raises(ValueError, match="records"):
        save_target(tmp_path, config, read_json(folder, "config.json"), leaves)
