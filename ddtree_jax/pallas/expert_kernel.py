"""The grouped expert matmul on Hopper, in Pallas (Mosaic GPU): gate + up + SwiGLU, then down.

A work item is a slot (rows of one expert, at most the largest of `config.tiles`) and a tile of 256
weight rows. Weight rows ride wgmma's M, rows of the batch its N, so that few rows an expert waste
little. Every block of the persistent grid takes each `ctas`-th item: only touched experts are
read, and 8 of them still fill the machine. Within a block one warpgroup feeds a ring of stages
that does not drain between items, and the others multiply:

    feeder     | free[b]? copy weights, x -> b | free[b+1]? ...                 next item ...
    multiplier |        full[b]? acc += W x; free[b]! | full[b+1]? ...  | acc -> staging, finish
    multiplier |        full[b]? acc += W x; free[b]! | full[b+1]? ...  | acc -> staging, finish

Finishing an item turns its [256, n] sums around in shared memory; rows are then written one by one,
contiguously, and rows past the slot's end not at all.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Int32

from ddtree_jax.pallas.expert_config import ExpertConfig
from ddtree_jax.pallas.expert_multiply import INLINE, MASK, STOCK, Functions, zeros
from ddtree_jax.pallas.expert_schedule import MAX_PARTS, dealt_item, schedule
from ddtree_jax.pallas.expert_weights import BLOCK, DEPTH, ROWS, Records, stack_shape
from ddtree_jax.pallas.expert_work import Rows, Work

_BLOCKS = ROWS // BLOCK
HALF = ROWS // 2
_PAD = 4  # words between staged rows: a warp's 32 transposed stores hit 32 banks


@dataclass(frozen=True)
class _Packed:
    """INT4 records: one contiguous copy a stage."""

    config: ExpertConfig
    run: Functions
    depth: int = DEPTH
    copies: int = 1

    def ring(self):
        return plgpu.SMEM((self.config.stages, _BLOCKS, 9, 128), jnp.int32)

    def feed(self, weights, at, ring, barrier):
        plgpu.copy_gmem_to_smem(weights[0].at[at], ring, barrier)

    def multiply(self, acc, block_ref, x_ref, bias_ref, mask):
        scale = self.config.scale_of(acc.shape[1])
        return self.run.multiply(acc, block_ref, x_ref, bias_ref, mask, scale)

    @property
    def swizzle(self) -> int:  # groups of 32 inputs are multiplied alone, or 64 at least
        whole = self.config.scale == "weight" or self.config.tiles[0] > 8
        return 128 if whole else 64


@dataclass(frozen=True)
class _Dense:
    """bf16 matrices [layers, experts, out, in] as they are: one copy a block."""

    config: ExpertConfig
    run: Functions
    depth: int = 64
    copies: int = _BLOCKS
    swizzle: int = 128

    def ring(self):
        shape = (self.config.stages, _BLOCKS, BLOCK, 64)
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=_tiled(128))

    def feed(self, weights, at, ring, barrier):
        layer, expert, tile, step = at
        per = _BLOCKS // len(weights)
        for block in range(_BLOCKS):
            row = pl.multiple_of((tile * per + block % per) * BLOCK, BLOCK)
            source = weights[block // per].at[layer, expert]
            source = source.at[pl.ds(row, BLOCK), pl.ds(step * 64, 64)]
            plgpu.copy_gmem_to_smem(source, ring.at[block], barrier)

    def multiply(self, acc, block_ref, x_ref, bias_ref, mask):
        return self.run.multiply_dense(acc, block_ref, x_ref)


def _tiled(swizzle: int):
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def gate_up(
    rows: Rows,
    gate: Array | Records,
    up: Array | Records,
    layer: Int32[Array, "2"],
    work: Work,
    config: ExpertConfig,
    interpret=None,
) -> Rows:
    """silu(gate x) * (up x) of the sorted rows; what lies outside any slot stays unwritten."""
    packed = isinstance(gate, Records)
    weights = (gate.words,) if packed else (gate, up)
    width, count = stack_shape(gate)[2], rows.values.shape[0]
    biased = packed and config.biased
    run = STOCK if interpret is not None else INLINE

    def finish(sums, outs, row, tile, _):
        gate, up = sums
        value = (gate / (1 + jnp.exp(-gate)) * up).astype(jnp.bfloat16)
        outs[0][row, pl.ds(tile * HALF, HALF)] = value
        if biased:
            eight, r = lax.div(row, jnp.int32(8)), lax.rem(row, jnp.int32(8))
            run.put_sums(value, outs[1].at[eight, pl.ds(tile, 1), :, r])

    outs = [jax.ShapeDtypeStruct((count, width), jnp.bfloat16)]
    if biased:
        outs.append(jax.ShapeDtypeStruct((count // 8, width // HALF, 4, 8), jnp.float32))
    flags = work.flags[0]
    tiles = width // HALF
    made = _grouped(
        "expert_gate_up", rows, weights, layer, work, flags, outs, finish, tiles, config, interpret
    )
    return Rows(made[0], made[1] if biased else None)


def down(
    rows: Rows,
    weight: Array | Records,
    layer: Int32[Array, "2"],
    work: Work,
    pairs: int,
    config: ExpertConfig,
    interpret=None,
) -> BFloat16[Array, "pairs hidden"]:
    """router weight * (down h), each row at the place of its pair; other places stay unwritten."""
    packed = isinstance(weight, Records)
    size = stack_shape(weight)[2]

    def finish(sums, outs, row, tile, of_row):
        pair, share = of_row
        for half, value in enumerate(sums):
            columns = pl.ds(tile * ROWS + half * HALF, HALF)
            outs[0][pair, columns] = (value * share).astype(jnp.bfloat16)

    weights = (weight.words if packed else weight,)
    outs = [jax.ShapeDtypeStruct((pairs, size), jnp.bfloat16)]
    flags = work.flags[1]
    tiles = size // ROWS
    made = _grouped(
        "expert_down", rows, weights, layer, work, flags, outs, finish, tiles, config, interpret
    )
    return made[0]


def _grouped(
    name: str, rows: Rows, weights, layer, work: Work, flags, outs, finish, tiles: int,
    config: ExpertConfig, interpret,
):  # fmt: skip
    """Run `finish` on every row of every slot with its products with 256 weight rows of a tile.

    They come as two halves of 128. `flags` are 0, and 1 once a block's part of an item is there.
    """
    run = STOCK if interpret is not None else INLINE
    form = (_Packed if weights[0].dtype == jnp.int32 else _Dense)(config, run)
    steps, wgs, stages = rows.values.shape[1] // form.depth, config.warpgroups, config.stages
    per_wg, largest, ctas = _BLOCKS // wgs, config.tiles[-1], config.ctas
    chunk = min(largest, 32)
    balance = config.balance and largest <= 16  # beyond, items are many and registers few
    inputs = [rows.values, work.slots, work.used, layer, work.pair, work.share, *weights]
    biased = isinstance(form, _Packed) and config.biased
    if biased:
        inputs.append(rows.bias)
    outs = list(outs)
    if balance:
        inputs.append(jax.new_ref(flags))
        outs.append(jax.ShapeDtypeStruct((ctas, largest, ROWS), jnp.float32))

    def body(*refs):
        x_g, slots_g, used_g, layer_g, pair_g, share_g, *weights_g = refs[: len(inputs)]
        flags_g = weights_g.pop() if balance else None
        bias_g = weights_g.pop() if biased else None
        outs_g = list(refs[len(inputs) : len(inputs) + len(outs)])
        parts_g = outs_g.pop() if balance else None
        ring, xs, biases, staging, full, free, met = refs[len(inputs) + len(outs) :]
        wg = lax.axis_index("wg")
        # The interpreter runs blocks one after another: last first, so that parts are there.
        cta = lax.axis_index("cta") if interpret is None else ctas - 1 - lax.axis_index("cta")
        dealt, rest = schedule(used_g[0] * tiles, steps, cta, ctas, balance)

        def slot_of(item):
            slot, tile = lax.div(item, jnp.int32(tiles)), lax.rem(item, jnp.int32(tiles))
            first = pl.multiple_of(slots_g[slot, 1], 8)
            return tile, slots_g[slot, 0], first, slots_g[slot, 2]

        def by_size(rows, act):
            """act(n) with the smallest tile n that holds the slot."""
            if len(config.tiles) == 1:
                return act(largest)
            which = sum((rows > n).astype(jnp.int32) for n in config.tiles[:-1])
            lax.switch(which, [partial(act, n) for n in config.tiles])

        def each_turn(act):
            """act(segment, its place in the ring) for every segment that is not empty."""

            def whole(t, _):
                act(dealt_item(t, steps, cta, ctas), t * steps)

            def some(u, at):
                found = rest(u)
                pl.when(found.stop > found.start)(lambda: act(found, at))
                return at + jnp.maximum(found.stop - found.start, 0)

            lax.fori_loop(0, dealt, whole, None)
            return lax.fori_loop(0, 2, some, dealt * steps) if rest else dealt * steps

        @pl.when(wg == wgs)
        def _feed():
            plgpu.set_max_registers(config.feeder_registers, action="decrease")

            def feed(found, begin):
                tile, expert, first, rows = slot_of(found.item)

                def sized(n):
                    def step(k, _):
                        at = begin + k - found.start
                        b = lax.rem(at, jnp.int32(stages))
                        pl.when(at >= stages)(lambda: plgpu.barrier_wait(free.at[b]))
                        place, full_b = (layer_g[1], expert, tile, k), full.at[b]
                        form.feed(weights_g, place, ring.at[b], full_b)
                        x = x_g.at[pl.ds(first, n), pl.ds(k * form.depth, form.depth)]
                        plgpu.copy_gmem_to_smem(x, xs.at[b, pl.ds(0, n)], full_b)
                        if biased:
                            eight = lax.div(first, jnp.int32(8))
                            plgpu.copy_gmem_to_smem(bias_g.at[eight, k], biases.at[b], full_b)

                    lax.fori_loop(found.start, found.stop, step, None)

                by_size(rows, sized)

            def drain(at, _):
                plgpu.barrier_wait(free.at[lax.rem(at, jnp.int32(stages))])

            last = each_turn(feed)
            lax.fori_loop(jnp.maximum(last - stages, 0), last, drain, None)

        @pl.when(wg < wgs)
        def _multiply():
            plgpu.set_max_registers(config.multiplier_registers, action="increase")
            mask = layer_g[0]

            def meet():
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)

            def halves(ref):
                return tuple(ref.at[pl.ds(h * HALF, HALF)][...] for h in range(2))

            def multiply(found, begin):
                tile, _, first, rows = slot_of(found.item)

                shared = found.stop is not steps  # of an item that others may work on as well

                def finish_row(start, i):
                    r = i * wgs + wg

                    def with_parts():
                        def add(sums):
                            """In their order, but all read at once: each is a trip to memory."""
                            at = [jnp.minimum(p, found.parts) for p in range(1, MAX_PARTS + 1)]
                            for p, part in enumerate([halves(parts_g.at[cta + i, r]) for i in at]):
                                there = p < found.parts
                                sums = tuple(
                                    jnp.where(there, a + b, a)
                                    for a, b in zip(sums, part, strict=True)
                                )
                            return sums

                        sums, row = halves(staging.at[r]), first + start + r
                        if shared:
                            sums = lax.cond(found.parts > 0, add, lambda sums: sums, sums)
                        finish(sums, outs_g, row, tile, (pair_g[row], share_g[row]))

                    def as_part():
                        for h, part in enumerate(halves(staging.at[r])):
                            parts_g[cta, r, pl.ds(h * HALF, HALF)] = part

                    inside = start + r < rows
                    pl.when(inside & (found.start == 0) if shared else inside)(with_parts)
                    if shared:
                        pl.when(inside & (found.start > 0))(as_part)

                def sized(n):
                    def step(j, sums):
                        b = lax.rem(begin + j, jnp.int32(stages))
                        plgpu.barrier_wait(full.at[b])
                        x, bias = xs.at[b, pl.ds(0, n)], biases.at[b]
                        sums = tuple(
                            form.multiply(s, ring.at[b, wg * per_wg + i], x, bias, mask)
                            for i, s in enumerate(sums)
                        )
                        plgpu.barrier_arrive(free.at[b])
                        return sums

                    sums = (zeros(n),) * per_wg
                    sums = lax.fori_loop(0, found.stop - found.start, step, sums)
                    for start in range(0, n, chunk):
                        size = min(chunk, n)
                        for i, s in enumerate(sums):
                            part = s if size == n else s[:, start : start + size]
                            run.stage(part, staging, (wg * per_wg + i) * BLOCK)
                        meet()
                        if shared:
                            wait = lambda p, _: run.wait(flags_g.at[cta + p])  # noqa: E731
                            lax.fori_loop(1, found.parts + 1, wait, None)
                        for i in range(size // wgs):
                            finish_row(start, i)
                        meet()
                    if shared:
                        pl.when((found.start > 0) & (wg == 0))(lambda: run.signal(flags_g.at[cta]))

                by_size(rows, sized)

            each_turn(multiply)

    scratch = (
        form.ring(),
        plgpu.SMEM((stages, largest, form.depth), jnp.bfloat16, transforms=_tiled(form.swizzle)),
        plgpu.SMEM((stages, 4, 8), jnp.float32),
        plgpu.SMEM((chunk, ROWS + _PAD), jnp.float32),
        plgpu.Barrier(num_arrivals=form.copies + 1 + biased, num_barriers=stages),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        plgpu.Barrier(num_arrivals=wgs),
    )
    kernel = plgpu.kernel(
        body,
        out_type=outs,
        scratch_types=scratch,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=wgs + 1,
        thread_name="wg",
        kernel_name=name,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=256,
        ),
    )
    return kernel(*inputs)


def place_of(layer) -> Int32[Array, "2"]:
    """What a launch reads besides work: a constant it wants from memory, and the layer.

    In this order: of a constant that begins with 0 XLA makes a kernel with an iota.
    """
    return jnp.stack([jnp.int32(MASK), jnp.asarray(layer, jnp.int32)])
