"""INT4 weights in the published form, in NumPy: the inverse of `expert_weights.dequantize`.

Symmetric, one bf16 scale for every 32 inputs of an output row. A value q in [-8, 7] is stored as
q + 8 in four bits, eight values a 32-bit word, least significant nibble first.
"""

import ml_dtypes
import numpy as np

from ddtree_jax.pallas.expert_weights import GROUP

_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)


def quantize_int4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Words int32 [.., out, in/8] and scales bf16 [.., out, in/32] of a matrix [.., out, in].

    A group's scale is max|w| / 7, rounded to bf16 before values are divided by it; a group of
    zeros has scale 0.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"{weight.shape[-1]} inputs: must be a multiple of the group of {GROUP}")
    wide = np.asarray(weight, np.float32)
    if not np.isfinite(wide).all():
        raise ValueError("the weight holds NaN or infinity")
    groups = wide.reshape(*wide.shape[:-1], -1, GROUP)
    scales = (np.abs(groups).max(axis=-1) / 7).astype(ml_dtypes.bfloat16)
    divisor = np.where(scales == 0, 1, scales.astype(np.float32))
    values = np.clip(np.rint(groups / divisor[..., None]), -8, 7).astype(np.int8)
    return pack_int4(values.reshape(wide.shape)), scales


def pack_int4(values: np.ndarray) -> np.ndarray:
    """Words int32 [.., in/8] of integers [.., in] in [-8, 7]."""
    if values.shape[-1] % 8:
        raise ValueError(f"{values.shape[-1]} values: must be a multiple of 8, a word")
    if values.size and not (-8 <= values.min() and values.max() <= 7):
        raise ValueError(f"values from {values.min()} to {values.max()}: must be from -8 to 7")
    nibbles = (values.astype(np.int8) + 8).astype(np.uint32).reshape(*values.shape[:-1], -1, 8)
    return np.bitwise_or.reduce(nibbles << _SHIFTS, axis=-1).view(np.int32)


def unpack_int4(words: np.ndarray) -> np.ndarray:
    """Integers int8 [.., in] of words int32 [.., in/8]."""
    nibbles = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> _SHIFTS) & 15
    return (nibbles.astype(np.int8) - 8).reshape(*words.shape[:-1], -1)
