"""The Mosaic GPU kernel of tree attention; `tree_attention_merge` completes what it divides.

A block of threads works on one tile, 64 query rows (tree rows x heads) of one request, against 64
latents at a time: S = Q K^T, online softmax, O += P V, where V is the first columns of K. Three
warpgroups share it, since the accumulator of 64 x 512 floats fills the registers of two:

    warpgroup 0    QK  softmax  PV (left columns of V)
    warpgroup 1    QK  softmax  PV (right columns)
    warpgroup 2    copies pages and tree rows to shared memory, `stages` blocks ahead

The leader of a block computes its S and P, both multiply with P. `alternate` makes the consumers
lead in turn, so that the softmax of one runs beside the matrix products of the other; else
warpgroup 0 leads every block. P replaces the rotary columns of its page, which no value needs: a
second buffer would not fit, and the page's own barriers then order P as well.
"""

import math
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
    tiles: int  # of a request, a multiple of the cluster
    tree_blocks: int  # of a request
    gangs: int
    rows: int  # M
    pages: int  # of one layer of the pool
    stages: int
    cluster: int
    alternate: bool
    overlap: bool
    auto_barriers: bool
    masked: bool  # False: an upper bound for benchmarks, no tree and no lengths
    scale: float
    interpret: bool

    @property
    def tile_rows(self) -> int:
        return TILE // self.heads

    def columns(self, warpgroup: int) -> tuple[int, int]:
        """First column and number of columns of V that a consumer accumulates."""
        left = 64 * -(-self.value // 128)
        return (0, left) if warpgroup == 0 else (left, self.value - left)

    @property
    def separate_weights(self) -> bool:
        """Whether P needs memory of its own, the latents having no columns beside the values."""
        return self.d - self.value < TILE


def scratch_types(s: Shapes) -> dict:
    """Shared memory and barriers of the attend kernel."""
    smem, bf16, f32 = plgpu.SMEM, jnp.bfloat16, jnp.float32
    free = 2  # both consumers
    if s.cluster > 1:
        kv_free = plgpu.ClusterBarrier(
            collective_axes=("peer",), num_arrivals=free, num_barriers=s.stages
        )
    else:
        kv_free = plgpu.Barrier(num_arrivals=free, num_barriers=s.stages)
    queries = smem((1, TILE, s.d), bf16, transforms=TILED)
    results = [smem((TILE, s.columns(wg)[1]), bf16, transforms=TILED) for wg in range(2)]
    weights = smem((s.stages, TILE, TILE), bf16, transforms=TILED)
    return dict(
        q_and_o=plgpu.RefUnion(queries, results),  # a segment stores its result over its queries
        kv_s=smem((s.stages, TILE, s.d), bf16, transforms=TILED),
        # By stage: what the leader tells (0 rescaling, 1 maximum); then both sums; then the result.
        stats_s=smem((s.stages + 2, 2, TILE), f32),
        q_full=plgpu.Barrier(num_arrivals=s.tile_rows),
        kv_full=plgpu.Barrier(num_barriers=s.stages),
        kv_free=kv_free,
        # By leader and stage. One a leader would not do: it may lead the next block before the
        # other has seen that this one is led, and a barrier must not run two phases ahead.
        p_full=plgpu.Barrier(num_barriers=(2, s.stages)),
        sums_full=plgpu.Barrier(num_arrivals=2),
        done=plgpu.Barrier(),  # warpgroup 1 has stored its part
        **(dict(p_s=weights) if s.separate_weights else {}),
    )


def row_vector(x, like):
    """[64] along the rows of a matrix."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def filled(value, shape, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


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
    start, length = requests[request, 0], requests[request, 1]
    row, rows = requests[request, 2], requests[request, 3]
    stop, total = requests[request + 1, 0], requests[requests.shape[0] - 1, 0]
    begin = gang * share
    end = jnp.minimum(begin + share, total)
    low, high = jnp.maximum(begin, start), jnp.minimum(end, stop)
    return Segment(
        request, length, row, rows, lax.div(length + TILE - 1, jnp.int32(TILE)), low - start,
        jnp.maximum(high - low, 0), (low == start) & (high == stop),
        2 * gang + (low > begin).astype(jnp.int32),
    )  # fmt: skip


def attend(s: Shapes):
    """The body of the attend kernel."""

    def body(
        q, nodes, pool, tables, layer, requests, gangs, share, words,
        out, lse, part, part_lse, *, q_and_o, kv_s, stats_s,
        q_full, kv_full, kv_free, p_full, sums_full, done, p_s=None,
    ):  # fmt: skip
        q_s, results = q_and_o
        gang = lax.axis_index("gang")
        peer = lax.axis_index("peer") if s.cluster > 1 else 0
        leader_tile = lax.axis_index("tile") * s.cluster
        tile = leader_tile + peer
        first_node = tile * s.tile_rows
        share = share[0]

        def segments(work):
            """Run `work(segment, t)` over the gang's segments; t counts its blocks before."""

            def one(r, t):
                seg = segment_of(requests, share, gang, r)
                # All tiles of a cluster take part as long as one of them has rows.
                busy = leader_tile * s.tile_rows < seg.rows
                seg = seg._replace(n=jnp.where(busy, seg.n, 0))
                pl.when(seg.n > 0)(lambda: work(seg, t))
                return t + seg.n

            return lax.fori_loop(gangs[gang, 0], gangs[gang, 1], one, jnp.int32(0))

        def words_of(seg):
            """Where the words of the tile's query rows begin."""
            return jnp.minimum(seg.row + first_node, s.rows) * s.heads + TILE

        def slot_of(t):
            return lax.rem(t, jnp.int32(s.stages))

        def produce():
            plgpu.set_max_registers(40, action="decrease")
            to_cluster = dict(collective_axes="peer") if s.cluster > 1 else {}
            base = layer[0] * s.pages

            def work(seg, t):
                @pl.loop(0, seg.n)
                def _(j):
                    slot = slot_of(t + j)
                    tree, first, _ = seg.block(j)
                    page = tables[seg.request, jnp.where(tree, 0, seg.low + j)]
                    page = base + jnp.clip(page, 0, s.pages - 1)

                    @pl.when(t + j >= s.stages)
                    def _():
                        plgpu.barrier_wait(kv_free.at[slot])

                    def copy(source, row):
                        rows = source.at[pl.ds(pl.multiple_of(row, TILE), TILE)]
                        plgpu.copy_gmem_to_smem(rows, kv_s.at[slot], kv_full.at[slot], **to_cluster)

                    own = seg.request * (s.tree_blocks * TILE) + first
                    pl.when(tree)(lambda: copy(nodes, own))
                    pl.when(jnp.logical_not(tree))(lambda: copy(pool, page * TILE))

            total = segments(work)

            # Nobody leaves while a peer may still write to it or arrive at its barriers.
            @pl.loop(jnp.maximum(total - s.stages, 0), total)
            def _(t):
                plgpu.barrier_wait(kv_free.at[slot_of(t)])

        def consume(wg: int):
            plgpu.set_max_registers(232, action="increase")
            first_column, columns = s.columns(wg)

            def weights(slot):
                if s.separate_weights:
                    return p_s.at[slot]
                return kv_s.at[slot, :, pl.ds(s.value, TILE)]

            def stat(i, kind):
                return plgpu.load(stats_s.at[i, kind], layout=ROW, optimized=False)

            def scores(seg, t, j, slot):
                """Products of queries and latents, -inf where the mask forbids."""
                # Always 0, which the compiler cannot know: else it keeps the addresses of all 36
                # parts of the queries in registers, and spills them.
                nought = lax.shift_right_logical(t + j, jnp.int32(30))

                def product(acc):
                    plgpu.wgmma(acc, q_s.at[nought], kv_s.at[slot].transpose((1, 0)))
                    return acc[...]

                x = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32))
                if not s.masked:
                    return x
                tree, first, valid = seg.block(j)

                def mask(x):
                    # Prefix blocks read words of ones, which stand before those of the rows.
                    word = jnp.where(tree, lax.div(first, jnp.int32(32)), 0)
                    place = pl.ds(jnp.where(tree, words_of(seg), 0), TILE)
                    low, high = (
                        plgpu.load(words.at[word + i, place], layout=ROW, optimized=False)
                        for i in range(2)
                    )
                    column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=MATRIX)
                    bits = jnp.where(column < 32, row_vector(low, x), row_vector(high, x))
                    bits = lax.shift_right_logical(bits, column & 31) & 1
                    return jnp.where((bits == 1) & (column < valid), x, -jnp.inf)

                return lax.cond(tree | (valid < TILE), mask, lambda x: x, x)

            def softmax(x, top, total):
                """(weights, rescaling of what was summed before, new maximum, new sum)."""
                c = s.scale * LOG2E
                highest = jnp.maximum(top, x.max(axis=1) * c)
                p = jnp.exp2(x * c - row_vector(highest, x))
                alpha = jnp.exp2(top - highest)
                return p, alpha, highest, total * alpha + p.sum(axis=1)

            def publish(slot, p, alpha, top):
                if not s.auto_barriers:  # all warps are done with the columns P replaces
                    plgpu.commit_smem()
                weights(slot)[...] = p.astype(jnp.bfloat16)
                stats_s[slot, 0] = alpha
                if s.alternate:
                    stats_s[slot, 1] = top
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_full.at[wg, slot])

            def clean(seg, j, slot):
                """Zero the values behind the prefix: 0 * NaN is NaN. Tree blocks are clean."""
                if not s.masked:
                    return
                tree, _, valid = seg.block(j)

                @pl.when(jnp.logical_not(tree) & (valid < TILE))
                def _():
                    row = plgpu.broadcasted_iota(jnp.int32, (TILE, 64), 0, layout=MATRIX)
                    for c in range(first_column, first_column + columns, 64):
                        chunk = kv_s.at[slot, :, pl.ds(c, 64)]
                        x = plgpu.load(chunk, layout=MATRIX)
                        chunk[...] = jnp.where(row < valid, x, jnp.bfloat16(0))
                    plgpu.commit_smem()

            def accumulate(acc, seg, j, slot, beside=None):
                """acc + P V; `beside` is computed while the tensor cores are at it."""
                clean(seg, j, slot)
                values = kv_s.at[slot, :, pl.ds(first_column, columns)]

                def product(ref):
                    if not s.interpret:  # the interpreter cannot start from a value
                        ref[...] = acc
                    plgpu.wgmma(ref, weights(slot), values)
                    got = beside() if beside is not None else None
                    return ref[...], got

                shape = plgpu.ACC((TILE, columns), jnp.float32)
                new, got = pl.run_scoped(product, shape)
                new = acc + new if s.interpret else new
                plgpu.barrier_arrive(kv_free.at[slot])
                return (new, got) if beside is not None else new

            def lead(seg, t, j, carry):
                acc, top, total = carry
                slot = slot_of(t + j)
                plgpu.barrier_wait(kv_full.at[slot])
                x = scores(seg, t, j, slot)
                p, alpha, top, total = softmax(x, top, total)
                publish(slot, p, alpha, top)
                acc = accumulate(acc * row_vector(alpha, acc), seg, j, slot)
                return acc, top, total

            def heard(seg, t, j, carry):
                """Wait for the other's weights of block j: rescaled carry, and the new maximum."""
                acc, top, total = carry
                slot = slot_of(t + j)
                plgpu.barrier_wait(p_full.at[1 - wg, slot])
                alpha = stat(slot, 0)
                if s.alternate:
                    top, total = stat(slot, 1), total * alpha
                return acc * row_vector(alpha, acc), top, total

            def follow(seg, t, j, carry):
                slot = slot_of(t + j)
                plgpu.barrier_wait(kv_full.at[slot])
                acc, top, total = heard(seg, t, j, carry)
                return accumulate(acc, seg, j, slot), top, total

            def follow_and_lead(seg, t, j, carry):
                """Follow block j - 1 while leading j: its softmax hides behind that product."""
                before, slot = slot_of(t + j - 1), slot_of(t + j)
                plgpu.barrier_wait(kv_full.at[slot])
                x = scores(seg, t, j, slot)
                plgpu.barrier_wait(kv_full.at[before])
                acc, top, total = heard(seg, t, j - 1, carry)
                if s.overlap:
                    acc, (p, alpha, top, total) = accumulate(
                        acc, seg, j - 1, before, lambda: softmax(x, top, total)
                    )
                else:
                    acc = accumulate(acc, seg, j - 1, before)
                    p, alpha, top, total = softmax(x, top, total)
                publish(slot, p, alpha, top)
                acc = accumulate(acc * row_vector(alpha, acc), seg, j, slot)
                return acc, top, total

            def loop(step, low, high, seg, t, carry, stride=1, offset=0):
                def one(i, carry):
                    return step(seg, t, i * stride + offset, carry)

                return lax.fori_loop(low, high, one, carry)

            def work(seg, t):
                if wg == 0:  # which has waited for `done`: their memory is free
                    for i in range(s.tile_rows):
                        row = jnp.minimum(seg.row + first_node + i, s.rows - 1)
                        rows = q.at[pl.ds(row * s.heads, s.heads)]
                        plgpu.copy_gmem_to_smem(
                            rows, q_s.at[0, pl.ds(i * s.heads, s.heads)], q_full
                        )
                plgpu.barrier_wait(q_full)
                carry = (
                    filled(0, (TILE, columns), MATRIX),
                    filled(LOWEST, (TILE,), ROW),
                    filled(0, (TILE,), ROW),
                )
                if not s.alternate:
                    carry = loop(lead if wg == 0 else follow, 0, seg.n, seg, t, carry)
                else:
                    half = lax.div(seg.n, jnp.int32(2))
                    odd = seg.n - 2 * half
                    if wg == 0:  # leads 0, 2, 4, ...
                        carry = lead(seg, t, 0, carry)
                        args = seg, t, carry, 2, 2
                        carry = loop(follow_and_lead, 0, half + odd - 1, *args)
                        carry = loop(follow, 0, 1 - odd, seg, t, carry, 0, seg.n - 1)
                    else:
                        carry = loop(follow_and_lead, 0, half, seg, t, carry, 2, 1)
                        carry = loop(follow, 0, odd, seg, t, carry, 0, seg.n - 1)
                finish(seg, carry)

            def finish(seg, carry):
                acc, top, total = carry
                sums, result = s.stages, s.stages + 1
                stats_s[sums, wg] = total
                plgpu.barrier_arrive(sums_full)
                plgpu.barrier_wait(sums_full)
                total = stat(sums, 0) + stat(sums, 1)
                # 1 where the row saw anything, or NaN: a NaN is shown, unless the row has no bits
                # and so is padding, whatever it holds.
                shown = jnp.where(total <= 0, 0.0, 1.0)
                if s.masked:
                    place = pl.ds(words_of(seg), TILE)
                    seen = plgpu.load(words.at[0, place], layout=ROW, optimized=False)
                    for w in range(1, words.shape[0]):
                        seen |= plgpu.load(words.at[w, place], layout=ROW, optimized=False)
                    shown = jnp.where(seen != 0, shown, 0.0)
                total = jnp.where(shown > 0, total, 1.0)
                scaled = acc * row_vector(1 / total, acc)
                o_s = results[wg]
                o_s[...] = jnp.where(row_vector(shown, acc) > 0, scaled, 0).astype(jnp.bfloat16)
                if wg == 0:
                    stats_s[result, 0] = jnp.where(shown > 0, top + jnp.log2(total), -jnp.inf)
                plgpu.commit_smem()
                to = pl.ds(first_column, columns)

                @pl.when(seg.whole)
                def _():
                    for i in range(s.tile_rows):

                        @pl.when(first_node + i < seg.rows)
                        def _(i=i):
                            row = seg.row + first_node + i
                            plgpu.copy_smem_to_gmem(
                                o_s.at[pl.ds(i * s.heads, s.heads)],
                                out.at[pl.ds(row * s.heads, s.heads), to],
                            )

                    if wg == 0:
                        plgpu.copy_smem_to_gmem(
                            stats_s.at[result, 0], lse.at[seg.request * s.tiles + tile]
                        )

                @pl.when(jnp.logical_not(seg.whole))
                def _():
                    place = seg.slot * s.tiles + tile
                    plgpu.copy_smem_to_gmem(o_s, part.at[place, :, to])
                    if wg == 0:
                        plgpu.copy_smem_to_gmem(stats_s.at[result, 0], part_lse.at[place])

                # The next segment's queries overwrite what both have just stored.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if wg == 1:
                    plgpu.barrier_arrive(done)
                else:
                    plgpu.barrier_wait(done)

            segments(work)

        wg = lax.axis_index("wg")
        pl.when(wg == 0)(lambda: consume(0))
        pl.when(wg == 1)(lambda: consume(1))
        pl.when(wg == 2)(produce)

    return body


def run_attend(s: Shapes, q, nodes, pool, tables, layer, requests, gangs, share, words):
    """Outputs of tiles attended by one gang, and partial results of all others.

    Returns `out` [rows * heads, value] and `lse` [requests * tiles, 64] (in units of log2), both
    written for undivided requests only, and `part`, `part_lse` by slot and tile.
    """
    slots, count = 2 * s.gangs * s.tiles, requests.shape[0] - 1
    bf16, f32 = jnp.bfloat16, jnp.float32
    mesh = dict(grid=(s.gangs, s.tiles // s.cluster), grid_names=("gang", "tile"))
    if s.cluster > 1:
        mesh |= dict(cluster=(s.cluster,), cluster_names=("peer",))
    return plgpu.kernel(
        attend(s),
        out_type=(
            jax.ShapeDtypeStruct((s.rows * s.heads, s.value), bf16),
            jax.ShapeDtypeStruct((count * s.tiles, TILE), f32),
            jax.ShapeDtypeStruct((slots, TILE, s.value), bf16),
            jax.ShapeDtypeStruct((slots, TILE), f32),
        ),
        scratch_types=scratch_types(s),
        num_threads=3,
        thread_name="wg",
        kernel_name="tree_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=SCRATCH,
            unsafe_no_auto_barriers=not s.auto_barriers,
        ),
        interpret=interpreter() if s.interpret else None,
        **mesh,
    )(q, nodes, pool, tables, layer, requests, gangs, share, words)


def interpreter():
    return plgpu.InterpretGPUParams(detect_races=True)
