"""INT4 packing: the published bit order, and agreement with the dequantisation of the model."""

import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.model.quantize import pack_int4, quantize_int4, unpack_int4
from ddtree_jax.pallas.expert_weights import dequantize

GOLDEN = np.array([-8, -7, 0, 7, 1, 2, 3, -1], np.int8)


def test_golden_word():
    words = pack_int4(GOLDEN)
    assert words.dtype == np.int32
    assert words.view(np.uint32).tolist() == [0x7BA9F810]
    assert unpack_int4(words).tolist() == GOLDEN.tolist()


def test_pack_round_trip():
    values = np.random.default_rng(0).integers(-8, 8, (2, 3, 64), np.int8)
    assert pack_int4(values).shape == (2, 3, 8)
    assert (unpack_int4(pack_int4(values)) == values).all()


def test_unpack_reads_strided_words():
    words = pack_int4(np.random.default_rng(0).integers(-8, 8, (4, 64), np.int8))
    assert (unpack_int4(words[:, ::2]) == unpack_int4(words[:, ::2].copy())).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_dequantize_agrees(dtype):
    weight = np.random.default_rng(1).normal(size=(2, 5, 96)).astype(dtype)
    words, scales = quantize_int4(weight)
    assert (words.shape, scales.shape) == ((2, 5, 12), (2, 5, 3))
    assert (words.dtype, scales.dtype) == (np.int32, ml_dtypes.bfloat16)
    wide = np.repeat(scales.astype(np.float32), 32, axis=-1)
    expected = unpack_int4(words).astype(np.float32) * wide
    assert (np.asarray(dequantize(words, scales, np.float32)) == expected).all()
    assert (np.abs(expected - weight.astype(np.float32)) <= wide * 0.54).all()


def test_quantized_weights_are_a_fixed_point():
    words, scales = quantize_int4(np.random.default_rng(2).normal(size=(8, 64)))
    again = quantize_int4(np.asarray(dequantize(words, scales, np.float32)))
    assert (again[0] == words).all() and (again[1] == scales).all()


def test_zero_group():
    weight = np.zeros((1, 64), np.float32)
    weight[0, 40] = 1e-3
    words, scales = quantize_int4(weight)
    assert scales[0, 0] == 0 and scales[0, 1] > 0
    assert (np.asarray(dequantize(words, scales, np.float32))[0, :40] == 0).all()


@pytest.mark.parametrize(
    ("call", "values", "said"),
    [
        (quantize_int4, np.zeros((2, 33)), "33 inputs"),
        (quantize_int4, np.full((2, 32), np.nan), "NaN"),
        (pack_int4, np.zeros(7, np.int8), "7 values"),
        (pack_int4, np.full(8, 8, np.int8), "from -8 to 7"),
    ],
)
def test_refuses(call, values, said):
    with pytest.raises(ValueError, match=said):
        call(values)
