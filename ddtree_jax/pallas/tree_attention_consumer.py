"""The consumers of the attend kernel: warpgroup 0 leads every block, warpgroup 1 follows."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas.tree_attention_shapes import (
    LOG2E,
    LOWEST,
    MATRIX,
    ROW,
    TILE,
    Tile,
    filled,
    row_vector,
)


def consume(tile: Tile, wg: int) -> None:
    """Warpgroup `wg` of the two that compute: its columns of all tiles' outputs."""
    s, refs = tile.s, tile.refs
    q_s, results = refs.q_and_o
    plgpu.set_max_registers(232, action="increase")
    first_column, columns = s.columns(wg)

    def weights(slot):
        if s.separate_weights:
            return refs.p_s.at[slot]
        return refs.kv_s[1].at[slot, :, pl.ds(s.columns(1)[1], TILE)]

    def values(slot):
        return refs.kv_s[wg].at[slot, :, pl.ds(0, columns)]

    def stat(i):
        return plgpu.load(refs.stats_s.at[i], layout=ROW, optimized=False)

    def scores(seg, t, j, slot):
        """Products of queries and latents, -inf where the mask forbids."""
        # Always 0, which the compiler cannot know: else it keeps the addresses of all 36
        # parts of the queries in registers, and spills them.
        nought = lax.shift_right_logical(t + j, jnp.int32(30))

        def product(acc):
            for part in range(2):
                plgpu.barrier_wait(refs.kv_full.at[part, slot])
                here = q_s.at[nought, :, pl.ds(*s.part(part))]
                plgpu.wgmma(acc, here, refs.kv_s[part].at[slot].transpose((1, 0)))
            return acc[...]

        x = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32))
        if not s.masked:
            return x
        tree, first, valid = seg.block(j)

        def mask(x):
            # Prefix blocks read words of ones, which stand before those of the rows.
            word = jnp.where(tree, lax.div(first, jnp.int32(32)), 0)
            place = pl.ds(jnp.where(tree, tile.words(seg), 0), TILE)
            low, high = (
                plgpu.load(refs.words.at[word + i, place], layout=ROW, optimized=False)
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

    def publish(slot, p, alpha):
        plgpu.commit_smem()  # all warps are done with the columns P replaces
        weights(slot)[...] = p.astype(jnp.bfloat16)
        refs.stats_s[slot] = alpha
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.p_full.at[slot])

    def clean(seg, j, slot):
        """Zero the values behind the prefix: 0 * NaN is NaN. Tree blocks are clean."""
        if not s.masked:
            return
        tree, _, valid = seg.block(j)

        @pl.when(jnp.logical_not(tree) & (valid < TILE))
        def _():
            row = plgpu.broadcasted_iota(jnp.int32, (TILE, 64), 0, layout=MATRIX)
            for c in range(0, columns, 64):
                chunk = values(slot).at[:, pl.ds(c, 64)]
                x = plgpu.load(chunk, layout=MATRIX)
                chunk[...] = jnp.where(row < valid, x, jnp.bfloat16(0))
            plgpu.commit_smem()

    def accumulate(acc, seg, j, slot):
        """acc + P V."""
        clean(seg, j, slot)

        def product(ref):
            if not s.interpret:  # the interpreter cannot start from a value
                ref[...] = acc
            plgpu.wgmma(ref, weights(slot), values(slot))
            return ref[...]

        new = pl.run_scoped(product, plgpu.ACC((TILE, columns), jnp.float32))
        return acc + new if s.interpret else new

    def lead(seg, t, j, carry):
        acc, top, total = carry
        slot = tile.slot(t + j)
        x = scores(seg, t, j, slot)
        p, alpha, top, total = softmax(x, top, total)
        publish(slot, p, alpha)
        acc = accumulate(acc * row_vector(alpha, acc), seg, j, slot)
        for part in range(2):  # P stands in the second one
            plgpu.barrier_arrive(refs.kv_free[part].at[slot])
        return acc, top, total

    def follow(seg, t, j, acc):
        slot = tile.slot(t + j)
        plgpu.barrier_wait(refs.kv_full.at[1, slot])
        plgpu.barrier_wait(refs.p_full.at[slot])
        alpha = stat(slot)
        acc = acc * row_vector(alpha, acc)
        acc = accumulate(acc, seg, j, slot)
        plgpu.barrier_arrive(refs.kv_free[1].at[slot])
        return acc

    def work(seg, t):
        if wg == 0:  # which has waited for `done`: their memory is free
            for i in range(s.tile_rows):
                row = jnp.minimum(seg.row + tile.first_node + i, s.rows - 1)
                rows = refs.q.at[pl.ds(row * s.heads, s.heads)]
                plgpu.copy_gmem_to_smem(rows, q_s.at[0, pl.ds(i * s.heads, s.heads)], refs.q_full)
        plgpu.barrier_wait(refs.q_full)
        nothing = filled(0, (TILE, columns), MATRIX)
        if wg == 0:
            carry = nothing, filled(LOWEST, (TILE,), ROW), filled(0, (TILE,), ROW)
            acc, top, total = lax.fori_loop(0, seg.n, lambda j, c: lead(seg, t, j, c), carry)
            refs.stats_s[s.stages] = total
            plgpu.barrier_arrive(refs.total_full)
            finish(seg, acc, total, top)
        else:
            acc = lax.fori_loop(0, seg.n, lambda j, acc: follow(seg, t, j, acc), nothing)
            plgpu.barrier_wait(refs.total_full)
            finish(seg, acc, stat(s.stages))

    def finish(seg, acc, total, top=None):
        # 1 where the row saw anything, or NaN: a NaN is shown, unless the row has no bits
        # and so is padding, whatever it holds.
        shown = jnp.where(total <= 0, 0.0, 1.0)
        if s.masked:
            place = pl.ds(tile.words(seg), TILE)
            seen = plgpu.load(refs.words.at[0, place], layout=ROW, optimized=False)
            for w in range(1, refs.words.shape[0]):
                seen |= plgpu.load(refs.words.at[w, place], layout=ROW, optimized=False)
            shown = jnp.where(seen != 0, shown, 0.0)
        total = jnp.where(shown > 0, total, 1.0)
        scaled = acc * row_vector(1 / total, acc)
        o_s = results[wg]
        o_s[...] = jnp.where(row_vector(shown, acc) > 0, scaled, 0).astype(jnp.bfloat16)
        if wg == 0:
            refs.stats_s[s.stages + 1] = jnp.where(shown > 0, top + jnp.log2(total), -jnp.inf)
        plgpu.commit_smem()
        to = pl.ds(first_column, columns)

        place = seg.slot * s.tiles + tile.index
        for i in range(s.tile_rows):
            mine = o_s.at[pl.ds(i * s.heads, s.heads)]
            there = tile.first_node + i < seg.rows

            @pl.when(there & seg.whole)
            def _(i=i, mine=mine):
                row = seg.row + tile.first_node + i
                to_rows = refs.out.at[pl.ds(row * s.heads, s.heads), to]
                plgpu.copy_smem_to_gmem(mine, to_rows)

            @pl.when(there & jnp.logical_not(seg.whole))
            def _(i=i, mine=mine):
                to_rows = refs.part.at[place, pl.ds(i * s.heads, s.heads), to]
                plgpu.copy_smem_to_gmem(mine, to_rows)

        if wg == 0:
            lse = refs.stats_s.at[s.stages + 1]

            @pl.when(seg.whole)
            def _():
                to_tile = refs.lse.at[seg.request * s.tiles + tile.index]
                plgpu.copy_smem_to_gmem(lse, to_tile)

            @pl.when(jnp.logical_not(seg.whole))
            def _():
                plgpu.copy_smem_to_gmem(lse, refs.part_lse.at[place])

        # The next segment's queries overwrite what both have just stored.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if wg == 1:
            plgpu.barrier_arrive(refs.done)
        else:
            plgpu.barrier_wait(refs.done)

    tile.segments(work)
