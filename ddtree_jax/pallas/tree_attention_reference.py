"""Tree attention over the paged latent cache: a row sees its request's prefix and its ancestors.

Mask offsets. Rows of all requests lie packed, request r owning rows row_start[r] ..
row_start[r+1]-1. For a row m of request r let i = m - row_start[r], its node. Node j of the same
request is visible to node i iff bit (j mod 32) of word ancestors[m, j // 32] is set, and the row
of node j is row_start[r] + j. Prefix tokens 0 .. lengths[r]-1 are visible to every row of r, and
nothing else is visible at all. Only row_start and the arrays' own shapes enter: neither the
drafter's block size nor a row count common to all requests appears, so neither can be wrong.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32


def tree_attention_reference(
    queries: Float[Array, "m heads d"],
    latents: Float[Array, "m d"],
    pool: Float[Array, "layers pages page d"],
    layer: int | Int[Array, ""],
    block_tables: Int[Array, "r p"],
    lengths: Int[Array, " r"],
    row_start: Int[Array, " r1"],
    ancestors: UInt32[Array, "m w"],
    *,
    scale: float,
    value_size: int,
    max_rows: int | None = None,
) -> tuple[Float[Array, "m heads v"], Float[Array, "m heads"]]:
    """Attention of packed tree rows, in plain jax.numpy: the definition the kernel is held to.

    `queries` are absorbed (512 + 64 elements), `latents` the rows' own cache rows, `pool` the paged
    cache of all layers, `block_tables` a request's pages in order, `lengths` its cached tokens.
    Values are the first `value_size` elements of a latent. `max_rows` bounds the rows of one
    request (default: what the words can name). Returns the weighted latents and the log-sum-exp of
    the scaled scores; a row that sees nothing gives 0 and -inf. Memory behind a request's length
    may hold anything, NaN included: it is never used.
    """
    m, heads, d = queries.shape
    requests, words = block_tables.shape[0], ancestors.shape[1]
    limit = min(32 * words, m)
    width = limit if max_rows is None else max_rows
    if not 1 <= width <= limit:
        raise ValueError(f"max_rows={max_rows}: must be from 1 to {limit} (rows, and 32 a word)")
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    high = lax.Precision.HIGHEST if wide == jnp.float32 else None
    nodes = jnp.arange(width, dtype=jnp.int32)

    def request(table, length, first, last):
        rows = jnp.minimum(
            first + nodes, m - 1
        )  # node 0, 1, ...; those from `last` on are not ours
        inside = first + nodes < last
        prefix = pool[layer, table].reshape(-1, d)  # [p * page, d]
        cached = jnp.arange(prefix.shape[0], dtype=jnp.int32) < length
        keys = jnp.concatenate([prefix, latents[rows]])
        some = inside & (ancestors[rows] != 0).any(axis=-1)  # padding rows see nothing
        visible = jnp.concatenate([cached, some])
        keys = jnp.where(visible[:, None], keys, 0).astype(queries.dtype)
        bits = (ancestors[rows][:, nodes // 32] >> (nodes % 32).astype(jnp.uint32)[None]) & 1
        tree = (bits == 1) & inside[None, :] & inside[:, None]
        mask = jnp.concatenate([cached[None] & some[:, None], tree], axis=-1)
        scores = jnp.einsum(
            "nhd,kd->nhk", queries[rows], keys, precision=high, preferred_element_type=wide
        )
        scores = jnp.where(mask[:, None], scores * scale, -jnp.inf)
        top = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
        total = weights.sum(axis=-1)
        out = jnp.einsum(
            "nhk,kv->nhv", weights.astype(queries.dtype), keys[:, :value_size],
            precision=high, preferred_element_type=wide,
        )  # fmt: skip
        out = (out / jnp.where(total > 0, total, 1)[..., None]).astype(queries.dtype)
        lse = jnp.where(total > 0, jnp.log(total) + top[..., 0], -jnp.inf)
        return out, lse, jnp.where(inside, rows, m)

    out, lse, rows = jax.vmap(request)(block_tables, lengths, row_start[:-1], row_start[1:])
    rows = rows.reshape(requests * width)
    out = (
        jnp.zeros((m, heads, value_size), queries.dtype)
        .at[rows]
        .set(out.reshape(-1, heads, value_size), mode="drop")
    )
    lse = jnp.full((m, heads), -jnp.inf, wide).at[rows].set(lse.reshape(-1, heads), mode="drop")
    return out, lse
