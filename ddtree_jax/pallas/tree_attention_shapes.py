"""Sizes, shared memory and work of the attend kernel, as its producer and consumers see them."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64  # query rows of a tile, and latents of a block: a page
LOG2E = math.log2(math.e)
LOWEST = -1e30  # below every score, and finite: the difference of two such maxima is 0, not NaN
MATRIX, ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SCRATCH = 256  # bytes the compiler may use for reductions across warps


class Shapes(NamedTuple):
    """Static sizes of one call."""

    heads: int
    d: int  # elements of a latent
    value: int  # of which values
    most: int  # rows of a request at most
    tiles: int  # of a request
    tree_blocks: int  # of a request
    gangs: int
    rows: int  # M
    pages: int  # of one layer of the pool
    stages: int
    masked: bool  # False: an upper bound for benchmarks, no tree and no lengths
    scale: float
    interpret: bool

    @property
    def wide(self) -> int:
        """Columns of the results in memory: whole vectors of 128 threads."""
        return -(-self.value // 128) * 128

    @property
    def tile_rows(self) -> int:
        return TILE // self.heads

    def columns(self, warpgroup: int) -> tuple[int, int]:
        """First column and number of columns of V that a consumer accumulates."""
        left = 64 * -(-self.value // 128)
        return (0, left) if warpgroup == 0 else (left, self.value - left)

    def part(self, index: int) -> tuple[int, int]:
        """First column and number of columns of a page's parts, which are copied one by one."""
        left = self.columns(0)[1]
        return (0, left) if index == 0 else (left, self.d - left)

    @property
    def separate_weights(self) -> bool:
        """Whether P needs memory of its own, the latents having no columns beside the values."""
        return self.d - self.value < TILE


def scratch_types(s: Shapes) -> dict:
    """Shared memory and barriers of the attend kernel."""
    smem, bf16, f32 = plgpu.SMEM, jnp.bfloat16, jnp.float32

    queries = smem((1, TILE, s.d), bf16, transforms=TILED)
    results = [smem((TILE, s.columns(wg)[1]), bf16, transforms=TILED) for wg in range(2)]
    weights = smem((s.stages, TILE, TILE), bf16, transforms=TILED)
    return dict(
        q_and_o=plgpu.RefUnion(queries, results),  # a segment stores its result over its queries
        kv_s=[smem((s.stages, TILE, s.part(i)[1]), bf16, transforms=TILED) for i in range(2)],
        # By stage: rescaling of what was summed before; then the sum; then the log-sum-exp.
        stats_s=smem((s.stages + 2, TILE), f32),
        q_full=plgpu.Barrier(num_arrivals=s.tile_rows),
        kv_full=plgpu.Barrier(num_barriers=(2, s.stages)),  # of each part of a page
        kv_free=[  # the first by the leader, the second by both
            plgpu.Barrier(num_arrivals=n, num_barriers=s.stages) for n in (1, 2)
        ],
        p_full=plgpu.Barrier(num_barriers=s.stages),
        total_full=plgpu.Barrier(),
        done=plgpu.Barrier(),  # warpgroup 1 has stored its part
        **(dict(p_s=weights) if s.separate_weights else {}),
    )


def row_vector(x, like):
    """[64] along the rows of a matrix."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def filled(value, shape, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def interpreter():
    return plgpu.InterpretGPUParams(detect_races=True)


class Segment(NamedTuple):
    """A gang's part of one request: `n` blocks from block `low` on."""

    request: jax.Array
    length: jax.Array
    row: jax.Array  # first row of the request
    rows: jax.Array
    prefix: jax.Array  # blocks of the prefix; those of the tree follow
    low: jax.Array
    n: jax.Array
    whole: jax.Array  # the request's only segment
    slot: jax.Array  # of a partial result

    def block(self, j):
        """Of block low + j: (whether it holds tree rows, its first token or node, valid ones)."""
        b = self.low + j
        tree = b >= self.prefix
        first = TILE * jnp.where(tree, b - self.prefix, b)
        return tree, first, jnp.where(tree, self.rows, self.length) - first


def segment_of(requests, share, gang, request) -> Segment:
    """The blocks of `request` that fall into the gang's range of all blocks, if any."""
    start, stop, length, row, rows = (requests[request, i] for i in range(5))
    begin = gang * share
    low, high = jnp.maximum(begin, start), jnp.minimum(begin + share, stop)
    return Segment(
        request, length, row, rows, lax.div(length + TILE - 1, jnp.int32(TILE)), low - start,
        jnp.maximum(high - low, 0), (low == start) & (high == stop),
        2 * gang + (low > begin).astype(jnp.int32),
    )  # fmt: skip


class Tile(NamedTuple):
    """What a block of threads works on: one tile of every request of its gang."""

    s: Shapes
    gang: jax.Array
    index: jax.Array
    first_node: jax.Array  # the tile's first tree row
    share: jax.Array  # blocks of a gang
    refs: SimpleNamespace  # all references of the kernel, by name

    def segments(self, work):
        """Run `work(segment, t)` over the gang's segments; t counts its blocks before."""
        requests, gangs = self.refs.requests, self.refs.gangs

        def one(r, t):
            seg = segment_of(requests, self.share, self.gang, r)
            seg = seg._replace(n=jnp.where(self.first_node < seg.rows, seg.n, 0))
            pl.when(seg.n > 0)(lambda: work(seg, t))
            return t + seg.n

        return lax.fori_loop(gangs[self.gang, 0], gangs[self.gang, 1], one, jnp.int32(0))

    def words(self, seg: Segment) -> jax.Array:
        """Where the words of the tile's query rows begin."""
        return jnp.minimum(seg.row + self.first_node, self.s.rows) * self.s.heads + TILE

    def slot(self, t) -> jax.Array:
        """The stage that holds block t."""
        return lax.rem(t, jnp.int32(self.s.stages))
