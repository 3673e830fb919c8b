"""The Mosaic GPU kernel of tree attention; `tree_attention_merge` completes what it divides.

A block of threads works on one tile, 64 query rows (tree rows x heads) of one request, against 64
latents at a time: S = Q K^T, online softmax, O += P V, where V is the first columns of K. Three
warpgroups share it, since the accumulator of 64 x 512 floats fills the registers of two:

    warpgroup 0    S = Q K^T, softmax, O += P V for the left columns of V
    warpgroup 1    O += P V for the right columns
    warpgroup 2    copies pages and tree rows to shared memory, `stages` blocks ahead

Warpgroup 1 multiplies a block while warpgroup 0 may be at the next one's scores. A page comes
in two parts, each with barriers of its own. The first holds the left columns of V and is free once
warpgroup 0 is done with them, early enough for the page after next. P replaces the rotary columns
of its page, which no value needs: a second buffer would not fit, and the page's own barriers then
order P as well.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas.tree_attention_consumer import consume
from ddtree_jax.pallas.tree_attention_shapes import (
    SCRATCH,
    TILE,
    Shapes,
    Tile,
    interpreter,
    scratch_types,
)


def produce(tile: Tile) -> None:
    """Warpgroup 2: copies what the consumers will want, as far ahead as there are stages."""
    s, refs = tile.s, tile.refs
    plgpu.set_max_registers(40, action="decrease")
    base = refs.layer[0] * s.pages

    def work(seg, t):
        @pl.loop(0, seg.n)
        def _(j):
            slot = tile.slot(t + j)
            tree, first, _ = seg.block(j)
            page = refs.tables[seg.request, jnp.where(tree, 0, seg.low + j)]
            page = base + jnp.clip(page, 0, s.pages - 1)

            own = seg.request * (s.tree_blocks * TILE) + first

            def copy(source, row, part):
                here = pl.ds(*s.part(part))
                rows = source.at[pl.ds(pl.multiple_of(row, TILE), TILE), here]
                plgpu.copy_gmem_to_smem(rows, refs.kv_s[part].at[slot], refs.kv_full.at[part, slot])

            for part in range(2):

                @pl.when(t + j >= s.stages)
                def _(part=part):
                    plgpu.barrier_wait(refs.kv_free[part].at[slot])

                pl.when(tree)(lambda part=part: copy(refs.nodes, own, part))
                pl.when(jnp.logical_not(tree))(lambda part=part: copy(refs.pool, page * TILE, part))

    total = tile.segments(work)

    # Nobody leaves before the consumers have arrived at all barriers.
    @pl.loop(jnp.maximum(total - s.stages, 0), total)
    def _(t):
        for free in refs.kv_free:
            plgpu.barrier_wait(free.at[tile.slot(t)])


ARRAYS = (
    "q", "nodes", "pool", "tables", "layer", "requests", "gangs", "share", "words",
    "out", "lse", "part", "part_lse",
)  # fmt: skip


def attend(s: Shapes):
    """The body of the attend kernel."""

    def body(*arrays, **scratch):
        refs = SimpleNamespace(**dict(zip(ARRAYS, arrays, strict=True)), **scratch)
        gang = lax.axis_index("gang")
        index = lax.axis_index("tile")
        tile = Tile(s, gang, index, index * s.tile_rows, refs.share[0], refs)

        wg = lax.axis_index("wg")
        pl.when(wg == 0)(lambda: consume(tile, 0))
        pl.when(wg == 1)(lambda: consume(tile, 1))
        pl.when(wg == 2)(lambda: produce(tile))

    return body


def run_attend(s: Shapes, q, nodes, pool, tables, layer, requests, gangs, share, words):
    """Outputs of tiles attended by one gang, and partial results of all others.

    Returns `out` [rows * heads, wide], of which the first `value` columns are written, and `lse`
    [requests * tiles, 64] (in units of log2), both for undivided requests only, and `part`,
    `part_lse` by slot and tile.
    """
    slots, count = 2 * s.gangs * s.tiles, requests.shape[0]
    bf16, f32 = jnp.bfloat16, jnp.float32
    return plgpu.kernel(
        attend(s),
        out_type=(
            jax.ShapeDtypeStruct((s.rows * s.heads, s.wide), bf16),
            jax.ShapeDtypeStruct((count * s.tiles, TILE), f32),
            jax.ShapeDtypeStruct((slots, TILE, s.wide), bf16),
            jax.ShapeDtypeStruct((slots, TILE), f32),
        ),
        scratch_types=scratch_types(s),
        num_threads=3,
        thread_name="wg",
        kernel_name="tree_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=SCRATCH,
            unsafe_no_auto_barriers=True,
        ),
        interpret=interpreter() if s.interpret else None,
        grid=(s.gangs, s.tiles),
        grid_names=("gang", "tile"),
    )(q, nodes, pool, tables, layer, requests, gangs, share, words)
