"""Paged caches: the target's latents, the drafter's context keys and values, and their commit.

Both live in pools of pages of 64 tokens and share one block table and one length a request. Only
committed tokens are ever written: a verify pass carries its rows' own latents beside the pool.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddtree_jax.config import PAGE_SIZE, DFlashConfig, KimiConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Pools of all layers; `keys` and `values` are the drafter's, None without one."""

    latents: Float[Array, "layers pages page latent"]
    keys: Float[Array, "dlayers pages page kv d"] | None
    values: Float[Array, "dlayers pages page kv d"] | None


def empty_cache(
    config: KimiConfig, drafter: DFlashConfig | None, pages: int, dtype, heads: int | None = None
) -> Cache:
    """Zeroed pools of `pages` pages; `heads` are the drafter's key heads, where they are padded."""
    latents = jnp.zeros((config.num_hidden_layers, pages, PAGE_SIZE, config.latent_size), dtype)
    if drafter is None:
        return Cache(latents, None, None)
    heads = drafter.num_key_value_heads if heads is None else heads
    shape = (drafter.num_hidden_layers, pages, PAGE_SIZE, heads, drafter.head_dim)
    return Cache(latents, jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def identity_tables(requests: int, pages_each: int) -> Int[Array, "r p"]:
    """Contiguous decoding: request r owns pages r * pages_each onwards."""
    return jnp.arange(requests * pages_each, dtype=jnp.int32).reshape(requests, pages_each)


def scatter_tokens(
    pool: Float[Array, "layers pages page *row"],
    rows: Float[Array, "layers r t *row"],
    block_tables: Int[Array, "r p"],
    start: Int[Array, " r"],
    count: Int[Array, " r"],
) -> Float[Array, "layers pages page *row"]:
    """Write rows[:, r, :count[r]] to the slots of positions start[r], start[r]+1, ... of request r.

    Rows from `count` on, and positions that the table has no page for, are dropped.
    """
    offset = jnp.arange(rows.shape[2], dtype=jnp.int32)[None]
    position = start[:, None] + offset
    page = jnp.minimum(position // PAGE_SIZE, block_tables.shape[1] - 1)
    page = jnp.take_along_axis(block_tables, page, axis=1)
    keep = (offset < count[:, None]) & (position < block_tables.shape[1] * PAGE_SIZE)
    page = jnp.where(keep, page, pool.shape[1])
    return pool.at[:, page, position % PAGE_SIZE].set(rows.astype(pool.dtype), mode="drop")
