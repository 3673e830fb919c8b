"""The Mosaic GPU kernel that merges the partial results of requests divided among gangs.

A gang leaves at most two partial results a tile: slot 2g for the request its range begins in, slot
2g + 1 for a request that begins behind and ends beyond. So a request's parts are those of the gangs
from the one that holds its first block to the one that holds its last. Each is normalised, and
comes with the base-2 logarithm of its sum of weights.

A block of 128 threads takes one query row (tree row and head) after another: thread t holds a few
neighbouring columns, so that all parts of a row are read at once and in whole lines.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas.tree_attention_shapes import (
    LOWEST,
    TILE,
    Shapes,
    interpreter,
)

THREADS = 128
FEW = 4  # partial results of a row that are not worth loading more together
BLOCKS = 16  # of threads on each multiprocessor, so that many rows are read at once


def merge(s: Shapes, blocks: int, together: int):
    """The body of the merge kernel."""
    of_request = s.most * s.heads  # query rows, at most
    each = s.wide // THREADS
    vector = next(size for size in (4, 2, 1) if each % size == 0)
    layout = plgpu.Layout.WG_STRIDED((s.wide,), vec_size=vector)

    def constant(value):
        return plgpu.layout_cast(jnp.full((s.wide,), value, jnp.float32), layout)

    def body(requests, share, divided, orphans, part, part_lse, out, lse):
        block, share = lax.axis_index("block"), share[0]

        def mine(count, work):
            """work(item) for every blocks-th of `count` items."""
            pl.loop(0, lax.div(count + (blocks - 1) - block, jnp.int32(blocks)))(
                lambda i: work(block + i * blocks)
            )

        def one(item):
            r = divided[lax.div(item, jnp.int32(of_request))]
            query = lax.rem(item, jnp.int32(of_request))
            pl.when(query < requests[r, 4] * s.heads)(lambda: query_row(r, query))

        def query_row(r, query):
            start, stop = requests[r, 0], requests[r, 1]
            first, last = lax.div(start, share), lax.div(stop - 1, share)
            tile, lane = lax.div(query, jnp.int32(TILE)), lax.rem(query, jnp.int32(TILE))

            def some(together, i, carry):
                acc, top, total = carry
                pieces = []
                for u in range(together):
                    gang = first + i * together + u
                    there = gang <= last
                    gang = jnp.minimum(gang, last)
                    place = (2 * gang + (start > gang * share).astype(jnp.int32)) * s.tiles + tile
                    x = plgpu.load(part.at[place, lane], layout=layout, optimized=False)
                    pieces.append((jnp.where(there, part_lse[place, lane], -jnp.inf), x))
                highest = top
                for value, _ in pieces:
                    highest = jnp.maximum(highest, value)
                alpha = jnp.exp2(top - highest)
                acc, total = acc * alpha, total * alpha
                for value, x in pieces:
                    weight = jnp.exp2(value - highest)
                    acc += x.astype(jnp.float32) * weight
                    total += weight
                return acc, highest, total

            def all_of(together):
                rounds = lax.div(last - first + together, jnp.int32(together))
                carry = constant(0), jnp.float32(LOWEST), jnp.float32(0)
                return lax.fori_loop(0, rounds, partial(some, together), carry)

            few = min(FEW, together)
            acc, top, total = lax.cond(
                last - first < few, lambda: all_of(few), lambda: all_of(together)
            )
            empty = total <= 0
            total = jnp.where(empty, 1.0, total)
            out[requests[r, 3] * s.heads + query] = (acc * (1 / total)).astype(jnp.bfloat16)
            lse[r * s.tiles + tile, lane] = jnp.where(empty, -jnp.inf, top + jnp.log2(total))

        def nothing(item):
            row, head = (op(item, jnp.int32(s.heads)) for op in (lax.div, lax.rem))
            out[orphans[row] * s.heads + head] = constant(0).astype(jnp.bfloat16)

        mine(divided[divided.shape[0] - 1] * of_request, one)
        mine(orphans[orphans.shape[0] - 1] * s.heads, nothing)

    return body


def run_merge(
    s: Shapes, together: int, multiprocessors: int, requests, share, divided, orphans, part,
    part_lse, out, lse,
):  # fmt: skip
    """Complete `out` and `lse` in place: divided requests, and rows of no request.

    `together` partial results are loaded at a time, so that their latencies overlap.
    """
    rows = max(requests.shape[0] * s.most, s.rows) * s.heads
    blocks, together = min(BLOCKS * multiprocessors, rows), min(together, s.gangs)
    out, lse = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        merge(s, blocks, together),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="wg",
        kernel_name="tree_attention_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpreter() if s.interpret else None,
    )(requests, share, divided, orphans, part, part_lse, out, lse)
    return jax.freeze(out), jax.freeze(lse)
