"""The few largest entries of long rows, without sorting the rows.

XLA's top_k sorts whole rows on a GPU. Here a row is cut into blocks. An entry among the `count`
largest lies in one of the `count` blocks with the largest maxima: every other block has `count`
entries elsewhere that come before all of its own. So one pass finds the maxima, and what is left
to sort is short.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

SHORT = 8  # a row of at most SHORT * count entries is sorted as it is


def largest(
    x: Float[Array, "*rows v"], count: int
) -> tuple[Float[Array, "*rows count"], Int[Array, "*rows count"]]:
    """The `count` largest entries of every row and their places, as `lax.top_k` gives them.

    Equal entries come in the order of their places. Raises ValueError unless 1 <= count <= v.
    """
    return _largest(x, count, in_order=True)


def largest_values(x: Float[Array, "*rows v"], count: int) -> Float[Array, "*rows count"]:
    """The `count` largest entries of every row, in falling order: fewer kernels than `largest`."""
    return _largest(x, count, in_order=False)[0]


def _largest(x, count: int, in_order: bool):
    v = x.shape[-1]
    if not 1 <= count <= v:
        raise ValueError(f"count={count}: must be from 1 to the row's {v} entries")
    if v <= SHORT * count:
        return lax.top_k(x, count)
    # Blocks of about sqrt(v / count) entries leave the least to sort: v / block + count * block.
    block = 1 << round(math.log2(v / count) / 2)
    blocks = -(-v // block)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, blocks * block - v)]
    cut = jnp.pad(x, padding, constant_values=-jnp.inf).reshape(*x.shape[:-1], blocks, block)
    _, found = _largest(cut.max(axis=-1), count, in_order)
    if in_order:  # blocks in the order of their places, so that equal entries are
        found = jnp.sort(found, axis=-1)
    entries = jnp.take_along_axis(cut, found[..., None], axis=-2)
    values, place = _largest(entries.reshape(*x.shape[:-1], count * block), count, in_order)
    home = jnp.take_along_axis(found, place // block, axis=-1)
    return values, (home * block + place % block).astype(jnp.int32)
