"""top-k, top-p and min-p as one threshold a row, found without sorting the vocabulary.

top-k keeps the k largest. Of their renormalised distribution top-p keeps the smallest set of
largest tokens with a mass of at least p. min-p keeps what has at least min_p times the greatest
probability. Equal tokens are kept or left out together.

Nearly every threshold lies among a row's HEAD largest tokens, which are cheap to find and give it
at once. A row whose threshold lies deeper (a flat distribution under top-p alone, top_k past
HEAD) takes up to 16 counting passes over the vocabulary; rows are judged one by one, so a row's
threshold is the same in every batch.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from ddtree_jax.select import largest_values

HEAD = 128
DIGIT = 4  # bits of a threshold found in a pass over the vocabulary
INFINITE = 0x007FFFFF, 0xFF800000  # where -inf and +inf stand in the order of all float32


def threshold(
    x: Float[Array, "*rows v"],
    top_k: Int[Array, "*rows"],
    top_p: Float[Array, "*rows"],
    min_p: Float[Array, "*rows"],
) -> Float[Array, "*rows"]:
    """The least logit, in float32, that the filters keep; logits are tempered already.

    Off are: top_k = 0, top_p = 1, min_p = 0.
    """
    x = x.astype(jnp.float32)
    found, settled, top = _in_head(x, top_k, top_p)
    cut = lax.cond(
        settled.all(),
        lambda: found,
        lambda: jnp.where(settled, found, _by_counting(x, top, top_k, top_p)),
    )
    return jnp.maximum(cut, top + jnp.log(min_p))  # -inf where off


def _in_head(x, top_k, top_p):
    """The threshold of top-k and top-p if it lies among the HEAD largest, whether it does, and the
    largest logit."""
    v = x.shape[-1]
    values = largest_values(x, min(HEAD, v))
    top = values[..., 0]
    weight = jnp.exp(values - _finite(top)[..., None])
    # Below the head nothing is known; equal to its last value, a tie may go on below.
    edge = values[..., -1] if v > HEAD else jnp.full_like(top, -jnp.inf)
    k = jnp.minimum(top_k, values.shape[-1])[..., None]
    kth = jnp.take_along_axis(values, jnp.maximum(k - 1, 0), axis=-1)[..., 0]
    kth = jnp.where(top_k > 0, kth, -jnp.inf)
    kept = jnp.where(values >= kth[..., None], weight, 0)
    everything = jnp.exp(x - _finite(top)[..., None]).sum(axis=-1)
    wanted = top_p * jnp.where(top_k > 0, kept.sum(axis=-1), everything)
    enough = jnp.cumsum(kept, axis=-1) >= wanted[..., None]
    first = jnp.argmax(enough, axis=-1)[..., None]
    nucleus = jnp.take_along_axis(values, first, axis=-1)[..., 0]
    # Rounding may leave all that top-k keeps a hair short of what is wanted: then it is all kept.
    nucleus = jnp.where((top_p < 1) & enough.any(axis=-1), nucleus, -jnp.inf)
    whole = edge == -jnp.inf
    k_settled = (top_k == 0) | (kth > edge) | whole
    p_settled = (top_p >= 1) | (nucleus > edge) | ((top_k > 0) & k_settled) | whole
    return jnp.maximum(kth, nucleus), k_settled & p_settled, top


def _by_counting(x, top, top_k, top_p):
    """The same at any depth: the digits of each threshold from the highest down, by counting and
    weighing what lies above."""
    v = x.shape[-1]
    k = jnp.where(top_k > 0, jnp.minimum(top_k, v), v)

    def weight(x):
        return jnp.exp(x - _finite(top)[..., None])

    def kept(x):
        return jnp.where(x >= kth[..., None], weight(x), 0)

    kth = lax.cond(
        (top_k > 0).any(),
        lambda: _greatest(x, lambda x: jnp.ones(x.shape, jnp.int32), k),
        lambda: jnp.full_like(top, -jnp.inf),
    )
    # Mass 0 is "enough" for top_p = 0 at any threshold: at least the largest is kept.
    nucleus = jnp.minimum(_greatest(x, kept, top_p * kept(x).sum(axis=-1)), top)
    return jnp.maximum(kth, jnp.where(top_p < 1, nucleus, -jnp.inf))


def _greatest(x, weight, wanted) -> Float[Array, "*rows"]:
    """The greatest threshold such that the logits from it upwards weigh `wanted`; -inf if none is.

    A pass over the row decides DIGIT bits: it weighs what lies above each of their values.
    """

    def digit(i, found):
        place = (32 - DIGIT * (i + 1)).astype(jnp.uint32)
        least = [_value(found | (jnp.uint32(d) << place))[..., None] for d in range(1, 1 << DIGIT)]
        weights = weight(x)
        # One sum each: of a reduction with many operands XLA adds a whole row one by one on a CPU,
        # which loses the tail.
        sums = [jnp.where(x >= value, weights, 0).sum(axis=-1) for value in least]
        enough = sum((weighed >= wanted).astype(jnp.uint32) for weighed in sums)
        return found | (enough << place)

    return _value(lax.fori_loop(0, 32 // DIGIT, digit, jnp.zeros(x.shape[:-1], jnp.uint32)))


def _value(key: UInt32[Array, "*s"]) -> Float[Array, "*s"]:
    """The float32 at a place in the order of all; beyond the infinities, these."""
    key = jnp.clip(key, *map(jnp.uint32, INFINITE))
    bits = jnp.where(key >> 31 == 1, key & jnp.uint32(2**31 - 1), ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _finite(top):
    return jnp.where(jnp.isfinite(top), top, 0)
