"""Work list and sorted rows of a small batch in one launch, where every launch is felt.

The function is `expert_work.work_list` and `expert_work.sorted_rows` for tiles of 8 rows, but
slots come in the order in which their experts first appear. Every block works the whole list out
for itself (pairs x pairs comparisons) and then copies its share of the rows:

    before[i]   pairs before i with i's expert; i heads a slot if that is a multiple of 8
    slot[i]     heads before the head of i's slot; its row is 8 slot[i] + before[i] % 8
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.pallas.expert_config import FLAGS
from ddtree_jax.pallas.expert_multiply import GROUPS, INLINE, STOCK
from ddtree_jax.pallas.expert_weights import DEPTH
from ddtree_jax.pallas.expert_work import Rows, Work, row_bound, slot_bound

MAX_PAIRS = 640  # beyond, comparing all pairs takes longer than the launches it saves
_LANES = 128
_UNROLL = 8


def sort_rows(
    x: BFloat16[Array, "m inputs"],
    ids: Int32[Array, "m k"],
    weights: Float[Array, "m k"],
    first: Int32[Array, "1"],
    experts: int,
    ctas: int,
    interpret=None,
) -> tuple[Work, Rows]:
    """Slots of at most 8 rows of experts first .. first+experts-1, and their rows of x."""
    (m, k), inputs = ids.shape, x.shape[1]
    pairs, chunks = m * k, -(-m * k // _LANES)
    per = next(v for v in (8, 4, 2) if inputs % (v * _LANES) == 0)
    part, run = per * _LANES, INLINE if interpret is None else STOCK
    parts = inputs // part
    rows = row_bound(pairs, experts)

    def body(x_g, ids_g, weights_g, first_g, *refs):
        slots_g, used_g, pair_g, share_g, xs_g, bias_g, *flags_g = refs[:8]
        before_s, slot_s, count_s = refs[8:]
        cta, start = lax.axis_index("cta"), first_g[0]
        layout = plgpu.Layout.WG_STRIDED((_LANES,), 1)
        lane = plgpu.broadcasted_iota(jnp.int32, (_LANES,), 0, layout=layout)
        index = [lane + c * _LANES for c in range(chunks)]
        zero = plgpu.layout_cast(jnp.zeros((_LANES,), jnp.int32), layout)

        def choose(*args):
            return zero + jnp.where(*args)  # a bare select forgets that its integers are signed

        def expert_of(i):
            """Of pair i, counted in the shard; -1: not in it."""
            expert = ids_g[i] - start
            return jnp.where((expert >= 0) & (expert < experts), expert, -1)

        def each(step, carry):
            """step(i, carry) for every pair; several at a time, so that loads overlap."""

            def some(j, carry):
                for u in range(_UNROLL):
                    carry = step(j * _UNROLL + u, carry)
                return carry

            whole = pairs // _UNROLL
            carry = lax.fori_loop(0, whole, some, carry)
            for i in range(whole * _UNROLL, pairs):
                carry = step(jnp.int32(i), carry)
            return carry

        def place(i, found):
            expert = expert_of(i)
            return [choose(at == i, expert, f) for at, f in zip(index, found, strict=True)]

        mine = each(place, [zero - 1] * chunks)

        def tally(i, counts):
            expert, ahead = expert_of(i), []
            for at, own, (before, count) in zip(index, mine, counts, strict=True):
                same = choose(own == expert, 1, 0)
                ahead.append((before + choose(at > i, same, 0), count + same))
            return ahead

        counts = each(tally, [(zero, zero)] * chunks)
        for c, (before, count) in enumerate(counts):
            before_s[pl.ds(c * _LANES, _LANES)] = before
            count_s[pl.ds(c * _LANES, _LANES)] = count

        def number(i, carry):
            heads, slots = carry
            expert, before = expert_of(i), before_s[i]
            head = (expert >= 0) & (lax.rem(before, jnp.int32(8)) == 0)
            found = []
            for own, (ahead, _), slot in zip(mine, counts, slots, strict=True):
                led = (own == expert) & (ahead >= before) & (ahead < before + 8)
                found.append(choose(led & head, heads, slot))
            return heads + jnp.where(head, 1, 0), found

        used, slots = each(number, (jnp.int32(0), [zero] * chunks))
        for c, slot in enumerate(slots):
            slot_s[pl.ds(c * _LANES, _LANES)] = slot

        @pl.when(cta == 0)
        def _():
            used_g[0] = used
            for flags in flags_g:
                for start in range(0, FLAGS, _LANES):
                    flags[pl.ds(start, _LANES)] = zero

        def copy(t, _):
            i = lax.div(cta + t * ctas, jnp.int32(parts))
            column = lax.rem(cta + t * ctas, jnp.int32(parts))
            expert, slot, before = expert_of(i), slot_s[i], before_s[i]
            r = lax.rem(before, jnp.int32(8))
            row = slot * 8 + r

            @pl.when((expert >= 0) & (column == 0))
            def _():
                pair_g[row] = i
                share_g[row] = weights_g[i]

                @pl.when(r == 0)
                def _():
                    slots_g[slot, 0] = expert
                    slots_g[slot, 1] = row
                    slots_g[slot, 2] = jnp.minimum(count_s[i] - before, 8)

            @pl.when(expert >= 0)
            def _():
                source = x_g.at[lax.div(i, jnp.int32(k)), pl.ds(column * part, part)]
                layout = plgpu.Layout.WG_STRIDED((part,), per)
                values = plgpu.load(source, layout=layout)
                xs_g[row, pl.ds(column * part, part)] = values
                run.put_sums(values, bias_g.at[slot, pl.ds(column * per, per), :, r])

        jobs = pairs * parts
        lax.fori_loop(0, lax.div(jobs - cta + (ctas - 1), jnp.int32(ctas)), copy, None)

    shapes = (
        jax.ShapeDtypeStruct((slot_bound(pairs, experts, 8), 4), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows // 8, inputs // DEPTH, GROUPS, 8), jnp.float32),
        *(jax.ShapeDtypeStruct((FLAGS,), jnp.int32),) * 2,
    )
    kernel = plgpu.kernel(
        body,
        out_type=shapes,
        scratch_types=(plgpu.SMEM((chunks * _LANES,), jnp.int32),) * 3,
        grid=(ctas,),
        grid_names=("cta",),
        kernel_name="expert_sort",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    flat = ids.astype(jnp.int32).reshape(-1), weights.astype(jnp.float32).reshape(-1)
    slots, used, pair, share, values, bias, *flags = kernel(x, *flat, first)
    return Work(slots, used, None, pair, share, tuple(flags)), Rows(values, bias)
