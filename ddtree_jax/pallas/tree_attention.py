"""Tree attention over the paged latent cache, for Hopper: one pass over prefix and ancestors.

What is computed, `tree_attention_reference` defines. This file checks the arguments and runs the
two kernels, `tree_attention_kernel` and `tree_attention_merge`, by a plan (`tree_attention_plan`).

**Mask offsets.** Rows of all requests lie packed, request r owning the rows row_start[r] ..
row_start[r+1]-1. Let m be one of them.

1. Its node is i = m - row_start[r], and node j of the same tree is row row_start[r] + j: where
   its latent stands in `latents`, its query in `queries` and its ancestors in `ancestors`.
2. `ancestors[m]` has a bit for every node of r's own tree, not for every row of the batch: node j
   is bit j % 32 of word j // 32. Node i sees node j iff that bit is set.
3. Stored row by row, W words each, that bit is bit (m * W * 32 + j) of the array. W is the
   array's own second axis; m holds row_start[r], which is the sum of the widths of the requests
   before r. So the offset of a row's mask follows from row_start and the shapes and from nothing
   else, and r's tokens are found through its block table and length alone.
4. The kernel keeps the words query row by query row: query row m * heads + h has the words of m.
   A tile holds 64 / heads tree rows. Its mask starts at query row (row_start[r] + first) * heads,
   `first` being the tile's first node. Tree block c holds the nodes 64c .. 64c+63, so column k
   of its scores is bit k % 32 of word 2c + k // 32.

Whoever computes the offset of request r as r * F (the drafter's block size) instead of
row_start[r] = r * N reads, from the second request on, the words of rows r * (N - F) earlier;
whoever takes F for the words' or rows' stride within a request does so from the second row on.
Nodes then see strangers' slots, and padding, as ancestors. Nothing is out of bounds, nothing is
NaN: the text is wrong, and the accept length mostly, but not always, falls
(`notebooks/mask_offsets.ipynb` has figures). Here no F exists to be taken: it is not an argument,
and the tests sweep N with F different everywhere.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from ddtree_jax.pallas.tree_attention_kernel import run_attend
from ddtree_jax.pallas.tree_attention_merge import run_merge
from ddtree_jax.pallas.tree_attention_plan import (
    Config,
    Plan,
    blocks_of,
    check_width,
    make_plan,
    tiles_and_gangs,
)
from ddtree_jax.pallas.tree_attention_reference import tree_attention_reference
from ddtree_jax.pallas.tree_attention_shapes import LOG2E, SCRATCH, TILE, Shapes

HEADS = (8, 16, 32, 64)
SHARED_MEMORY = 232_448  # bytes a block of threads may have on Hopper


def tree_attention(
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
    config: Config | None = None,
    plan: Plan | None = None,
    masked: bool = True,
    interpret: bool = False,
) -> tuple[Float[Array, "m heads v"], Float[Array, "m heads"]]:
    """Attention of packed tree rows; arguments and results as in `tree_attention_reference`.

    bf16 only. `plan` is one of the same arguments and config; without it one is made here.
    `masked=False` leaves out mask and lengths: wrong, and only there to time what they cost.
    `interpret` runs on a CPU, with race detection.
    """
    m, heads, d = queries.shape
    requests, words = block_tables.shape[0], ancestors.shape[1]
    max_rows = check_width(max_rows, m, words)
    config = best_config(heads, max_rows) if config is None else config
    check(queries, latents, pool, layer, block_tables, lengths, row_start, value_size, config)
    if not scale > 0:
        raise ValueError(f"scale={scale}: must be positive")
    tiles, gangs = tiles_and_gangs(heads, max_rows, requests, block_tables.shape[1], config)
    if plan is None:
        plan = make_plan(
            jnp.asarray(lengths), jnp.asarray(row_start), ancestors, heads=heads,
            pages=block_tables.shape[1], max_rows=max_rows, config=config,
        )  # fmt: skip
    shapes = Shapes(
        heads, d, value_size, max_rows, tiles, blocks_of(max_rows), gangs, m, pool.shape[1],
        config.stages, masked, scale, interpret,
    )  # fmt: skip
    layer = jnp.clip(jnp.asarray(layer, jnp.int32), 0, pool.shape[0] - 1)
    merging = config.merge_together, config.multiprocessors
    return _run(shapes, merging, queries, latents, pool, layer, block_tables, plan)


@partial(jax.jit, static_argnums=(0, 1))  # traced once for all layers
def _run(shapes, merging, queries, latents, pool, layer, block_tables, plan):
    m, heads, d = queries.shape
    # The copy engine wants a request's nodes to start at a multiple of 8, and whatever stands
    # where no node does must be 0: a weight of 0 does not keep NaN away.
    nodes = latents.at[plan.nodes.reshape(-1)].get(mode="fill", fill_value=0)
    out, lse, part, part_lse = run_attend(
        shapes,
        queries.reshape(m * heads, d),
        nodes,
        pool.reshape(-1, d),  # rows, so that no index exceeds 32 bits
        block_tables.astype(jnp.int32),
        layer.reshape(1),
        plan.requests, plan.gangs, plan.share, plan.words,
    )  # fmt: skip
    out, lse = run_merge(
        shapes, *merging, plan.requests, plan.share, plan.divided, plan.orphans, part, part_lse,
        out, lse,
    )  # fmt: skip
    lse = lse.reshape(-1, heads)[plan.places] * (1 / LOG2E)
    out = out.reshape(m, heads, shapes.wide)[..., : shapes.value]
    return out, jnp.where(plan.owned[:, None], lse, -jnp.inf)


def padded_attention(
    queries: Float[Array, "m heads d"], *rows, **keywords
) -> tuple[Float[Array, "m heads v"], Float[Array, "m heads"]]:
    """`tree_attention` of a device's part of the heads, of which the kernel may want more.

    Queries of zeros fill up: a tile works on 64 query rows, whether any are zeros or not.
    """
    heads = queries.shape[1]
    queries = jnp.pad(queries, ((0, 0), (0, kernel_heads(heads) - heads), (0, 0)))
    out, lse = tree_attention(queries, *rows, **keywords)
    return out[:, :heads], lse[:, :heads]


def kernel_heads(heads: int) -> int:
    """The least number of heads that the kernel supports for so many; beyond its most, as given."""
    return min((h for h in HEADS if h >= heads), default=heads)


def attend(
    queries: Float[Array, "m heads d"],
    latents: Float[Array, "m d"],
    pool: Float[Array, "layers pages page d"],
    layer: int | Int[Array, ""],
    block_tables: Int[Array, "r p"],
    lengths: Int[Array, " r"],
    row_start: Int[Array, " r1"],
    ancestors: UInt32[Array, "m w"],
    plan: Plan | None,
    *,
    scale: float,
    value_size: int,
    max_rows: int,
) -> Float[Array, "m heads v"]:
    """Tree attention on the platform at hand: the kernels on NVIDIA GPUs if `plan` is given.

    `plan_if_supported` gives it: None for what the kernels cannot do, such as float32.
    """
    keywords = dict(scale=scale, value_size=value_size, max_rows=max_rows)
    layer = jnp.asarray(layer, jnp.int32)
    rows = queries, latents, pool, layer, block_tables, lengths, row_start, ancestors
    if plan is None:
        return tree_attention_reference(*rows, **keywords)[0]
    return jax.lax.platform_dependent(
        *rows, plan,
        cuda=lambda *rows: padded_attention(*rows[:-1], **keywords, plan=rows[-1])[0],
        default=lambda *rows: tree_attention_reference(*rows[:-1], **keywords)[0],
    )  # fmt: skip


def plan_if_supported(
    pool: Float[Array, "layers pages page d"],
    block_tables: Int[Array, "r p"],
    lengths: Int[Array, " r"],
    row_start: Int[Array, " r1"],
    ancestors: UInt32[Array, "m w"],
    *,
    heads: int,
    value_size: int,
    max_rows: int,
) -> Plan | None:
    """The plan of a pass, for all its layers; None where only the reference can serve.

    That is: a shape or dtype that `check` refuses once heads are padded, and NVIDIA GPUs other
    than Hopper.
    """
    if jax.default_backend() == "gpu" and any(
        getattr(device, "compute_capability", None) != "9.0" for device in jax.local_devices()
    ):
        return None
    m, d, heads = ancestors.shape[0], pool.shape[3], kernel_heads(heads)
    shape, config = jax.ShapeDtypeStruct, best_config(heads, max_rows)
    queries, latents = shape((m, heads, d), pool.dtype), shape((m, d), pool.dtype)
    try:
        check(queries, latents, pool, 0, block_tables, lengths, row_start, value_size, config)
    except ValueError:
        return None
    return make_plan(
        lengths, row_start, ancestors, heads=heads, pages=block_tables.shape[1],
        max_rows=max_rows, config=config,
    )  # fmt: skip


# By heads, and whether requests have one row each: what `benchmarks/tree_attention.py` chose.
BEST = {
    (8, False): Config(merge_together=16),
    (8, True): Config(least_share=2, merge_together=16),
    (64, True): Config(least_share=2, merge_together=32),
}


def best_config(heads: int, max_rows: int) -> Config:
    """The config measured best for a class of shapes."""
    return BEST.get((heads, max_rows == 1), Config())


def check(queries, latents, pool, layer, block_tables, lengths, row_start, value_size, config):
    """Refuse, before tracing, what the kernel cannot do, and what is visibly inconsistent."""
    m, heads, d = queries.shape
    for name, x in (("queries", queries), ("latents", latents), ("pool", pool)):
        if x.dtype != jnp.bfloat16:
            raise ValueError(f"{name} is {x.dtype}: the kernel supports bfloat16 only")
    if heads not in HEADS:
        raise ValueError(f"{heads} heads: the kernel supports {', '.join(map(str, HEADS))}")
    if pool.shape[2] != TILE:
        raise ValueError(f"pages of {pool.shape[2]} tokens: the kernel supports {TILE}")
    if d % 64 or d < 128:
        raise ValueError(f"latents of {d} elements: the kernel supports multiples of 64 from 128")
    if value_size % 64 or not 128 <= value_size <= min(512, d):
        raise ValueError(
            f"value_size={value_size}: the kernel supports multiples of 64 from 128 to 512 that "
            f"do not exceed the latent's {d}"
        )
    if latents.shape != (m, d) or pool.shape[3] != d:
        raise ValueError(
            f"latents {latents.shape} and pool {pool.shape} do not fit queries {queries.shape}"
        )
    requests = block_tables.shape[0]
    if lengths.shape != (requests,) or row_start.shape != (requests + 1,):
        raise ValueError(
            f"{requests} block tables, but lengths {lengths.shape} and row_start {row_start.shape}"
        )
    size = shared_memory(d, value_size, config)
    if size > SHARED_MEMORY:
        raise ValueError(
            f"{config.stages} stages of latents of {d} need {size} bytes of shared memory: "
            f"there are {SHARED_MEMORY}"
        )
    if int(np.prod(pool.shape[:3])) > np.iinfo(np.int32).max:
        raise ValueError(f"pool of {pool.shape[:3]} rows: the kernel supports 2^31 - 1")
    if isinstance(layer, int) and not 0 <= layer < pool.shape[0]:
        raise ValueError(f"layer={layer}: the pool has {pool.shape[0]}")
    if isinstance(lengths, np.ndarray) and lengths.size:
        room = block_tables.shape[1] * TILE
        if lengths.min() < 0 or lengths.max() > room:
            raise ValueError(
                f"lengths from {lengths.min()} to {lengths.max()}: block tables hold 0 to {room}"
            )


def shared_memory(d: int, value: int, config: Config) -> int:
    """Bytes of shared memory a block of threads takes."""

    def aligned(size):
        return -(-size // 1024) * 1024

    pages = 2 * config.stages * TILE * d
    weights = 2 * config.stages * TILE * TILE if d - value < TILE else 0
    stats = 4 * (config.stages + 2) * TILE
    barriers = 8 * (3 + 5 * config.stages)
    buffers = 2 * TILE * d, pages, weights, stats, SCRATCH
    return sum(map(aligned, buffers)) + barriers
