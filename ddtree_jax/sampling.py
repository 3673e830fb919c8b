"""Which token the target chooses: argmax, or argmax under noise that does not depend on the draft.

`coupled` sampling: the token at position t is argmax_v (log p(v) + g(seed, t, v)) with Gumbel noise
g keyed by request seed, position and token id. The noise of a position is the same whichever tree
asks for it, so speculation commits the tokens plain decoding with the same seed commits, and the
argmax of Gumbel-perturbed log-probabilities is an exact draw from p (Maddison et al. 2014).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32


def keyed_noise(
    seeds: UInt32[Array, " r"],
    positions: Int[Array, "r p"],
    vocab_size: int,
    temperature: Float[Array, " r"],
) -> Float[Array, "r p v"]:
    """Gumbel noise of every (seed, position, token id), float32; zeros if no request samples."""

    def one(seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    def draw():
        return jax.vmap(jax.vmap(one, (None, 0)))(seeds, positions)

    shape = (*positions.shape, vocab_size)
    return lax.cond((temperature > 0).any(), draw, lambda: jnp.zeros(shape, jnp.float32))


def perturb(
    logits: Float[Array, "r *rows v"],
    noise: Float[Array, "r *rows v"],
    temperature: Float[Array, " r"],
) -> Float[Array, "r *rows v"]:
    """logits / T + noise where T > 0; the logits themselves, untouched, where T = 0."""
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    t = temperature.reshape((-1,) + (1,) * (logits.ndim - 1)).astype(wide.dtype)
    return jnp.where(t > 0, wide / jnp.where(t > 0, t, 1) + noise.astype(wide.dtype), wide)


def choose(scores: Float[Array, "*rows v"]) -> Int[Array, "*rows"]:
    """The best token of every row, ties to the lowest id; -1 where a score is NaN."""
    best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    return jnp.where(jnp.isnan(scores).any(axis=-1), -1, best)
