"""The Mosaic GPU kernel that merges the partial results of requests divided among gangs.

A gang leaves at most two partial results a tile: slot 2g for the request its range begins in, slot
2g + 1 for a request that begins behind and ends beyond. So a request's parts are those of the gangs
from the one that holds its first block to the one that holds its last. Each is normalised, and
comes with the base-2 logarithm of its sum of weights.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas.tree_attention_shapes import (
    LOWEST,
    MATRIX,
    ROW,
    SCRATCH,
    TILE,
    TILED,
    Shapes,
    filled,
    interpreter,
    row_vector,
)


def merge(s: Shapes, count: int, together: int):
    """The body of the merge kernel: one block of threads a tile and 64 columns of its output."""
    stride = count * s.tiles

    def body(requests, share, orphans, part, part_lse, out, lse, *, o_s, lse_s):
        r, tile, column = (lax.axis_index(name) for name in ("request", "tile", "column"))
        columns = pl.ds(column * 64, 64)
        start, stop = requests[r, 0], requests[r + 1, 0]
        row, rows = requests[r, 2], requests[r, 3]
        share = share[0]
        first, last = lax.div(start, share), lax.div(stop - 1, share)
        first_node = tile * s.tile_rows

        def store(i, to):
            """Tree row i of the tile in shared memory to row `to` of all."""
            plgpu.copy_smem_to_gmem(
                o_s.at[pl.ds(i * s.heads, s.heads)],
                out.at[pl.ds(to * s.heads, s.heads), columns],
            )

        @pl.when((first_node < rows) & (first < last))
        def _():
            def some(i, carry):
                acc, top, total = carry
                pieces = []
                for u in range(together):
                    gang = first + i * together + u
                    there = gang <= last
                    gang = jnp.minimum(gang, last)
                    place = (2 * gang + (start > gang * share).astype(jnp.int32)) * s.tiles + tile
                    value = plgpu.load(part_lse.at[place], layout=ROW, optimized=False)
                    x = plgpu.load(part.at[place, :, columns], layout=MATRIX, optimized=False)
                    pieces.append((value + jnp.where(there, 0.0, -jnp.inf), x))
                highest = top
                for value, _ in pieces:
                    highest = jnp.maximum(highest, value)
                alpha = jnp.exp2(top - highest)
                acc, total = acc * row_vector(alpha, acc), total * alpha
                for value, x in pieces:
                    weight = jnp.exp2(value - highest)
                    acc += row_vector(weight, acc) * x.astype(jnp.float32)
                    total += weight
                return acc, highest, total

            carry = (
                filled(0, (TILE, 64), MATRIX),
                filled(LOWEST, (TILE,), ROW),
                filled(0, (TILE,), ROW),
            )
            rounds = lax.div(last - first + together, jnp.int32(together))
            acc, top, total = lax.fori_loop(0, rounds, some, carry)
            empty = total <= 0
            total = jnp.where(empty, 1.0, total)
            o_s[...] = (acc * row_vector(1 / total, acc)).astype(jnp.bfloat16)
            lse_s[...] = jnp.where(empty, -jnp.inf, top + jnp.log2(total))
            plgpu.commit_smem()
            for i in range(s.tile_rows):
                pl.when(first_node + i < rows)(lambda i=i: store(i, row + first_node + i))
            pl.when(column == 0)(lambda: plgpu.copy_smem_to_gmem(lse_s, lse.at[r * s.tiles + tile]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        # Rows that no request owns are zeroed by whoever comes by.
        lost, mine = orphans[orphans.shape[0] - 1], r * s.tiles + tile

        @pl.when(mine < lost)
        def _():
            o_s[...] = jnp.zeros((TILE, 64), jnp.bfloat16)
            plgpu.commit_smem()

            @pl.loop(0, lax.div(lost - mine - 1, jnp.int32(stride)) + 1)
            def _(i):
                store(0, orphans[mine + i * stride])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return body


def run_merge(s: Shapes, together: int, requests, share, orphans, part, part_lse, out, lse):
    """Complete `out` and `lse` in place: divided requests, and rows of no request.

    `together` partial results are loaded at a time, so that their latencies overlap.
    """
    count = requests.shape[0] - 1
    out, lse = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        merge(s, count, together),
        scratch_types=dict(
            o_s=plgpu.SMEM((TILE, 64), jnp.bfloat16, transforms=TILED),
            lse_s=plgpu.SMEM((TILE,), jnp.float32),
        ),
        grid=(count, s.tiles, s.value // 64),
        grid_names=("request", "tile", "column"),
        num_threads=1,
        thread_name="wg",
        kernel_name="tree_attention_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=SCRATCH),
        interpret=interpreter() if s.interpret else None,
    )(requests, share, orphans, part, part_lse, out, lse)
    return jax.freeze(out), jax.freeze(lse)
