"""Rotary positions with YaRN, in half-split pair order: element i turns with element i + dim/2.

Published Kimi weights pair neighbours (0,1), (2,3), ...; `checkpoint` permutes their rope rows
once at load, which leaves every product of a query and a key as it was.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ddtree_jax.config import Yarn


def inverse_frequencies(dim: int, theta: float, yarn: Yarn | None) -> np.ndarray:
    """Angles per position, [dim/2] float64: theta^(-2i/dim), slowed by YaRN where it applies.

    YaRN (arXiv 2309.00071, section 3.2): dimensions that turn often enough within the original
    context keep their speed, the slowest are divided by `factor`, with a ramp between.
    """
    plain = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if yarn is None:
        return plain

    def turning(rotations: float) -> float:  # the dimension that makes so many turns
        context = yarn.original_max_position_embeddings
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turning(yarn.beta_fast)), 0)
    high = min(math.ceil(turning(yarn.beta_slow)), dim - 1)
    width = max(high - low, 0.001)
    ramp = np.clip((np.arange(dim // 2) - low) / width, 0, 1)
    return (1 - ramp) * plain + ramp * plain / yarn.factor


def cos_sin(
    positions: Int[Array, "*rows"], dim: int, theta: float, yarn: Yarn | None, dtype
) -> tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]:
    """cos and sin of every position's angles, scaled by YaRN's amplitude; angles in float32."""
    wide = jnp.promote_types(dtype, jnp.float32)
    frequencies = jnp.asarray(inverse_frequencies(dim, theta, yarn), wide)
    frequencies = frequencies.reshape((1,) * positions.ndim + (-1,))
    angles = positions.astype(wide)[..., None] * frequencies
    amplitude = 1.0 if yarn is None else yarn.attention_factor
    return (jnp.cos(angles) * amplitude).astype(dtype), (jnp.sin(angles) * amplitude).astype(dtype)


def rotate(x: Float[Array, "*rows dim"], cos, sin) -> Float[Array, "*rows dim"]:
    """Turn the pairs (i, i + dim/2) of x; cos and sin broadcast against x's rows."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
