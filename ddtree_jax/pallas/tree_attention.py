"""Tree attention over the paged latent cache, for Hopper: one pass over prefix and ancestors.

What is computed, `tree_attention_reference` defines. This file checks the arguments, plans who
works on what, and runs the two kernels of `tree_attention_kernel`.

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
Nodes then see strangers' slots, and padding, as ancestors: nothing is out of bounds, nothing is
NaN, and the only symptom is a tree whose drafts are hardly ever accepted. Here no F exists to be
taken: it is not an argument, and the tests sweep N with F different everywhere.

**Plan.** The blocks of 64 latents of all requests, tree blocks last in each, form one line. It is
cut into equal shares, one for each gang: as many blocks of threads as a request has tiles. The
tiles of a request thus read the same page at about the same time, and it comes from memory once.
A request divided among gangs leaves partial results, at most two a gang, which the second kernel
merges by their log-sum-exp. All of it is arithmetic on a prefix sum, done on the device; it
depends on lengths and rows only, so that one plan serves all layers of a pass.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from ddtree_jax.pallas import tree_attention_kernel as kernel

TILE = kernel.TILE
HEADS = (8, 16, 32, 64)
SHARED_MEMORY = 232_448  # bytes a block of threads may have on Hopper


@dataclass(frozen=True)
class Config:
    """How the kernels divide their work; results differ by rounding at most."""

    stages: int = 2  # pages in flight
    alternate: bool = True  # both consumers take turns with the softmax
    overlap: bool = True  # and do it while a product runs
    auto_barriers: bool = True  # the compiler's own, around every access to shared memory
    cluster: int = 1  # tiles that share each page they read: 1, 2 or 4
    least_share: int = 4  # blocks a gang takes at least: fewer shares, less to merge
    merge_together: int = 4  # partial results loaded at a time
    multiprocessors: int = 132

    def __post_init__(self):
        for name, low, high in (
            ("stages", 2, 16), ("least_share", 1, 1 << 20), ("merge_together", 1, 16),
            ("multiprocessors", 1, 1 << 10),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name}={value}: must be an integer from {low} to {high}")
        if self.cluster not in (1, 2, 4):
            raise ValueError(f"cluster={self.cluster}: must be 1, 2 or 4")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Who works on what, and the mask as the kernel reads it: the same for all layers."""

    requests: Int32[Array, "r1 4"]  # first block, prefix length, first row, rows; last: the end
    gangs: Int32[Array, "gangs 2"]  # the requests of a gang, from and to
    share: Int32[Array, " 1"]  # blocks of a gang
    words: Int32[Array, "w queries"]  # 64 columns of ones, those of every query row, 64 of zeros
    nodes: Int32[Array, "r nodes"]  # the rows of a request's nodes, M behind them
    orphans: Int32[Array, " m1"]  # rows of no request, and last how many
    places: Int32[Array, " m"]  # of a row among the rows of all tiles
    owned: Bool[Array, " m"]


def shared_memory(d: int, value: int, config: Config = Config()) -> int:
    """Bytes of shared memory a block of threads takes."""

    def aligned(size):
        return -(-size // 1024) * 1024

    pages = 2 * config.stages * TILE * d
    weights = 2 * config.stages * TILE * TILE if d - value < TILE else 0
    stats = 4 * (config.stages + 2) * 2 * TILE
    barriers = 8 * (1 + 2 * config.stages + 2 + 1 + 1)
    buffers = 2 * TILE * d, pages, weights, stats, kernel.SCRATCH
    return sum(map(aligned, buffers)) + barriers


def make_plan(
    lengths: Int[Array, " r"],
    row_start: Int[Array, " r1"],
    ancestors: UInt32[Array, "m w"],
    *,
    heads: int,
    pages: int,
    max_rows: int | None = None,
    config: Config = Config(),
) -> Plan:
    """The plan of a pass; `pages` is the width of the block tables."""
    m, words = ancestors.shape
    max_rows = _width(max_rows, m, words)
    tiles, gangs = _tiles_and_gangs(heads, max_rows, lengths.shape[0], pages, config)
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, pages * TILE)
    first = jnp.clip(row_start[:-1].astype(jnp.int32), 0, m)
    rows = jnp.clip(row_start[1:].astype(jnp.int32) - first, 0, jnp.minimum(max_rows, m - first))
    blocks = jnp.where(rows > 0, _blocks(lengths) + _blocks(rows), 0)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    share = jnp.maximum(-(-ends[-1] // gangs), config.least_share)
    begin = jnp.arange(gangs, dtype=jnp.int32) * share
    of_gang = [  # requests that end before the gang begins, and that start before it ends
        (ends[None] <= begin[:, None]).sum(axis=1, dtype=jnp.int32),
        (starts[None, :-1] < jnp.minimum(begin + share, ends[-1])[:, None]).sum(
            axis=1, dtype=jnp.int32
        ),
    ]
    row = jnp.arange(m, dtype=jnp.int32)
    mine = (row[None] >= first[:, None]) & (row[None] < (first + rows)[:, None])
    owned, request = mine.any(axis=0), jnp.argmax(mine, axis=0).astype(jnp.int32)
    orphans = jnp.nonzero(~owned, size=m, fill_value=0)[0].astype(jnp.int32)
    node = jnp.arange(_blocks(max_rows) * TILE, dtype=jnp.int32)[None]
    nodes = jnp.where(node < rows[:, None], first[:, None] + node, m)
    seen = (ancestors != 0).any(axis=1)
    nodes = jnp.where(jnp.append(seen, False)[nodes], nodes, m)  # padding rows are no nodes
    zero = jnp.zeros(1, jnp.int32)
    table = [starts, *(jnp.concatenate([x, zero]) for x in (lengths, first, rows))]
    pairs = 2 * -(-max_rows // 64)  # a tree block reads two words
    mask = jnp.pad(ancestors, ((0, 0), (0, max(0, pairs - words))))[:, :pairs]
    mask = jnp.repeat(jax.lax.bitcast_convert_type(mask, jnp.int32).T, heads, axis=1)
    mask = jnp.pad(mask, ((0, 0), (TILE, TILE))).at[:, :TILE].set(-1)
    return Plan(
        requests=jnp.stack(table, axis=1),
        gangs=jnp.stack(of_gang, axis=1),
        share=share[None],
        words=mask,
        nodes=nodes,
        orphans=jnp.concatenate([orphans, (~owned).sum(dtype=jnp.int32)[None]]),
        places=request * (tiles * TILE // heads) + row - first[request],
        owned=owned,
    )


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
    max_rows = _width(max_rows, m, words)
    config = best_config(heads, max_rows) if config is None else config
    check(queries, latents, pool, layer, block_tables, lengths, row_start, value_size, config)
    if not scale > 0:
        raise ValueError(f"scale={scale}: must be positive")
    tiles, gangs = _tiles_and_gangs(heads, max_rows, requests, block_tables.shape[1], config)
    if plan is None:
        plan = make_plan(
            jnp.asarray(lengths), jnp.asarray(row_start), ancestors, heads=heads,
            pages=block_tables.shape[1], max_rows=max_rows, config=config,
        )  # fmt: skip
    shapes = kernel.Shapes(
        heads, d, value_size, tiles, _blocks(max_rows), gangs, m, pool.shape[1], config.stages,
        config.cluster, config.alternate, config.overlap, config.auto_barriers, masked, scale,
        interpret,
    )  # fmt: skip
    layer = jnp.clip(jnp.asarray(layer, jnp.int32), 0, pool.shape[0] - 1)
    return _run(shapes, config.merge_together, queries, latents, pool, layer, block_tables, plan)


@partial(jax.jit, static_argnums=(0, 1))  # traced once for all layers
def _run(shapes, together, queries, latents, pool, layer, block_tables, plan):
    m, heads, d = queries.shape
    # The copy engine wants a request's nodes to start at a multiple of 8, and whatever stands
    # where no node does must be 0: a weight of 0 does not keep NaN away.
    nodes = latents.at[plan.nodes.reshape(-1)].get(mode="fill", fill_value=0)
    out, lse, part, part_lse = kernel.run_attend(
        shapes,
        queries.reshape(m * heads, d),
        nodes,
        pool.reshape(-1, d),  # rows, so that no index exceeds 32 bits
        block_tables.astype(jnp.int32),
        layer.reshape(1),
        plan.requests, plan.gangs, plan.share, plan.words,
    )  # fmt: skip
    out, lse = kernel.run_merge(
        shapes, together, plan.requests, plan.share, plan.orphans, part, part_lse, out, lse
    )
    lse = lse.reshape(-1, heads)[plan.places] * (1 / kernel.LOG2E)
    out = out.reshape(m, heads, shapes.value)
    return out, jnp.where(plan.owned[:, None], lse, -jnp.inf)


def best_config(heads: int, max_rows: int) -> Config:
    """The config measured best for a class of shapes (`benchmarks/tree_attention.py`)."""
    del heads, max_rows
    return Config()


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


def _width(max_rows: int | None, m: int, words: int) -> int:
    limit = min(32 * words, m)
    width = limit if max_rows is None else max_rows
    if not 1 <= width <= limit:
        raise ValueError(f"max_rows={max_rows}: must be from 1 to {limit} (rows, and 32 a word)")
    return width


def _blocks(tokens):
    return (tokens + TILE - 1) // TILE


def _tiles_and_gangs(heads: int, max_rows: int, requests: int, pages: int, config: Config):
    """Tiles of a request, whole clusters of them, and gangs of so many blocks of threads."""
    tiles = -(-max_rows * heads // TILE)
    tiles = -(-tiles // config.cluster) * config.cluster
    blocks = requests * (pages + -(-max_rows // TILE))  # at most
    return tiles, max(1, min(config.multiprocessors // tiles, blocks))
