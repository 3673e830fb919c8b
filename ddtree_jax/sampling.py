"""Which token the target chooses: its filtered distribution, and noise that no draft can move.

A request's law is its logits over temperature, then top-k, then top-p, then min-p. `coupled`
sampling commits at position t the token argmax_v (log p(v) + g(seed, t, v)) with Gumbel noise g
keyed by request seed, position and token id. The noise of a position is the same whichever tree
asks for it, so speculation commits the tokens plain decoding with the same seed commits, and the
argmax of Gumbel-perturbed log-probabilities is an exact draw from p (Maddison et al. 2014).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from ddtree_jax.config import Sampling
from ddtree_jax.filters import threshold


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Law:
    """`Sampling` of every request as arrays: a mixed batch is one program."""

    seed: UInt32[Array, " r"]
    temperature: Float[Array, " r"]
    top_k: Int[Array, " r"]  # 0: off
    top_p: Float[Array, " r"]
    min_p: Float[Array, " r"]
    min_new_tokens: Int[Array, " r"]

    @classmethod
    def of(cls, samplings: list[Sampling]) -> "Law":
        def column(name, dtype):
            return jnp.asarray([getattr(s, name) for s in samplings], dtype)

        return cls(
            column("seed", jnp.uint32),
            column("temperature", jnp.float32),
            column("top_k", jnp.int32),
            column("top_p", jnp.float32),
            column("min_p", jnp.float32),
            column("min_new_tokens", jnp.int32),
        )


def keyed_noise(
    law: Law, positions: Int[Array, "r p"], vocab_size: int, stream: int | None = None
) -> Float[Array, "r p v"]:
    """Gumbel noise of every (seed, position, token id), float32; zeros if no request samples.

    Streams are independent of each other and of the noise without one.

    From 64 random bits each: with the 23 of a float32 uniform no noise exceeds 16, and among
    163,840 tokens those of the tail would be drawn by the percent too seldom or too often.
    """

    def one(seed, position):
        key = _key(seed, position)
        key = key if stream is None else jax.random.fold_in(key, stream)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="highest")

    def draw():
        return jax.vmap(jax.vmap(one, (None, 0)))(law.seed, positions)

    shape = (*positions.shape, vocab_size)
    return lax.cond((law.temperature > 0).any(), draw, lambda: jnp.zeros(shape, jnp.float32))


def keyed_coins(law: Law, positions: Int[Array, "r p"], stream: int) -> Float[Array, "r p"]:
    """Uniform coins in [0, 1) of every (seed, position); streams are independent of each other
    and of the noise."""

    def one(seed, position):
        return jax.random.uniform(jax.random.fold_in(_key(seed, position), stream), (), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)))(law.seed, positions)


def _key(seed, position):
    return jax.random.fold_in(jax.random.key(seed), position)


def tempered(logits: Float[Array, "r *rows v"], law: Law) -> Float[Array, "r *rows v"]:
    """Logits less the greatest, over temperature, in float32 or wider; untouched where T = 0.

    The greatest becomes 0, so that noise and filters are not rounded away at a low temperature.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    t = _per_row(law.temperature, wide).astype(wide.dtype)
    sampled = (law.temperature > 0).any()
    top = lax.cond(sampled, lambda: wide.max(axis=-1), lambda: jnp.zeros_like(wide[..., 0]))
    top = jnp.where((t > 0) & jnp.isfinite(top)[..., None], top[..., None], 0)
    return (wide - top) / jnp.where(t > 0, t, 1)


def perturbed(x: Float[Array, "r *rows v"], noise, law: Law) -> Float[Array, "r *rows v"]:
    """Log-probabilities plus noise, where the request samples."""
    return jnp.where(_per_row(law.temperature, x) > 0, x + noise.astype(x.dtype), x)


def log_law(logits: Float[Array, "r *rows v"], law: Law) -> Float[Array, "r *rows v"]:
    """Unnormalised log-probabilities after temperature and filters; -inf for tokens left out.

    Where T = 0 the logits come back untouched: the choice is their argmax, and no filter can
    change it.
    """
    x = tempered(logits, law)
    sampled = law.temperature > 0
    filters = sampled & ((law.top_k > 0) | (law.top_p < 1) | (law.min_p > 0))

    def least():
        each = (law.top_k, law.top_p, law.min_p)
        return threshold(x, *(jnp.broadcast_to(_per_row(f, x[..., 0]), x.shape[:-1]) for f in each))

    # Only thresholds leave the branches: logits that did would be copied.
    edge = lax.cond(filters.any(), least, lambda: jnp.full(x.shape[:-1], -jnp.inf, jnp.float32))
    kept = (x.astype(jnp.float32) >= edge[..., None]) | ~_per_row(filters, x)
    return jnp.where(kept, x, -jnp.inf)


def _per_row(values: Float[Array, " r"], like) -> Array:
    return values.reshape((-1,) + (1,) * (like.ndim - 1))


def bar_stops(
    logits: Float[Array, "r n v"], stop_ids: Int[Array, "r s"], barred: Bool[Array, "r n"]
) -> Float[Array, "r n v"]:
    """-inf for the request's stop ids in the rows that must not stop yet."""
    vocab = logits.shape[-1]

    def mask():
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        ids = jnp.where(stop_ids >= 0, stop_ids, vocab)
        return jnp.zeros((logits.shape[0], vocab), bool).at[rows, ids].set(True, mode="drop")

    stops = lax.cond(barred.any(), mask, lambda: jnp.zeros((logits.shape[0], vocab), bool))
    return jnp.where(barred[..., None] & stops[:, None], -jnp.inf, logits)


def choose(scores: Float[Array, "*rows v"], broken: Bool[Array, "*rows"]) -> Int[Array, "*rows"]:
    """The best token of every row, ties to the lowest id; -1 for broken rows."""
    return jnp.where(broken, -1, jnp.argmax(scores, axis=-1).astype(jnp.int32))
