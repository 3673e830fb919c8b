"""Training windows, cut on the device from token streams that live there.

What a step sees depends on the seed and the step index alone, so resuming is exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

PLACES = 3  # repeats put into a window that gets any
LONGEST = 60  # tokens of a repeated chunk


class Streams(NamedTuple):
    """Documents on end, each closed by [EOS], as uint16."""

    code: Int[Array, " c"]
    prose: Int[Array, " p"]


class Windows(NamedTuple):
    tokens: Int[Array, "b t1"]  # inputs and, shifted by one, labels
    kept: Bool[Array, "b t"]  # labels that count
    code: Bool[Array, " b"]


def repeat_map(key: Array, size: int, longest: int = LONGEST):
    """Where each of `size` outputs is read from, and whether it is an inserted copy.

    At PLACES points the chunk of 3..longest tokens before the point is said once or twice more,
    then the text goes on. With the loss off on the copies but on after them, the model learns
    that a verbatim repeat is broken out of, which small greedy models are bad at.
    """
    stride = size // PLACES
    if stride < longest + 4:
        raise ValueError(f"a window of {size} is too short for repeats of {longest}")
    where, length, copies = (
        jax.random.randint(k, (PLACES,), low, high)
        for k, low, high in zip(
            jax.random.split(key, 3), (longest + 3, 3, 1), (stride, longest + 1, 3), strict=True
        )
    )
    points = where + stride * jnp.arange(PLACES, dtype=jnp.int32)  # in the source, ascending
    return _insert(points, length, copies, size)


def _insert(points, length, copies, size: int):
    added = length * copies
    starts = points + jnp.cumsum(added, dtype=jnp.int32) - added  # in the output
    out = jnp.arange(size, dtype=jnp.int32)[:, None]
    offset = out - starts[None]
    inside = (offset >= 0) & (offset < added[None])
    passed = jnp.where(offset >= added[None], added[None], 0).sum(axis=1)
    copied = (points - length)[None] + jnp.maximum(offset, 0) % length[None]
    copy = inside.any(axis=1)
    index = jnp.where(copy, jnp.where(inside, copied, 0).sum(axis=1), out[:, 0] - passed)
    return index.astype(jnp.int32), copy


def sample(
    key: Array, streams: Streams, batch: int, length: int, code_share, loop_share, longest=LONGEST
) -> Windows:
    """`batch` random windows; a `loop_share` of them with repeats put in."""
    size = length + 1
    keys = jax.random.split(key, (4, batch))
    code = jax.vmap(lambda k: jax.random.bernoulli(k, code_share))(keys[0])
    looped = jax.vmap(lambda k: jax.random.bernoulli(k, loop_share))(keys[1])
    index, copy = jax.vmap(lambda k: repeat_map(k, size, longest))(keys[2])
    index = jnp.where(looped[:, None], index, jnp.arange(size, dtype=jnp.int32)[None])

    def read(stream):
        last = stream.shape[0] - size
        starts = jax.vmap(lambda k: jax.random.randint(k, (), 0, last + 1))(keys[3])
        return jax.vmap(lambda s, i: lax.dynamic_slice(stream, (s,), (size,))[i])(starts, index)

    tokens = jnp.where(code[:, None], read(streams.code), read(streams.prose)).astype(jnp.int32)
    return Windows(tokens, ~(copy & looped[:, None])[:, 1:], code)
