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

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.pallas.expert_config import ExpertConfig
from ddtree_jax.pallas.expert_multiply import GROUPS, INLINE, MASK, OFFSET, STOCK, Functions, zeros
from ddtree_jax.pallas.expert_weights import BLOCK, DEPTH, GROUP, ROWS, Records, stack_shape
from ddtree_jax.pallas.expert_work import Work

_BLOCKS = ROWS // BLOCK
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


class Rows(NamedTuple):
    """Sorted rows as a launch reads them. `bias` [rows/8, inputs/128, 4, 8] serves scale="bias"."""

    values: BFloat16[Array, "rows inputs"]
    bias: Float[Array, "eights steps 4 8"] | None


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
    tiles = width // 128
    splits = config.splits(work.slots.shape[0] * tiles, rows.values.shape[1] // DEPTH)
    biased = packed and config.biased and splits == 1
    run = STOCK if interpret is not None else INLINE

    def keep(staged, outs, row, tile, split, _):
        outs[0][split, row, pl.ds(tile * ROWS, ROWS)] = staged.at[pl.ds(0, ROWS)][...]

    def finish(staged, outs, row, tile, split, _):
        gate, up = staged.at[pl.ds(0, 128)][...], staged.at[pl.ds(128, 128)][...]
        value = (gate / (1 + jnp.exp(-gate)) * up).astype(jnp.bfloat16)
        outs[0][row, pl.ds(tile * 128, 128)] = value
        if biased:
            eight, r = lax.div(row, jnp.int32(8)), lax.rem(row, jnp.int32(8))
            run.put_sums(value, outs[1].at[eight, pl.ds(tile, 1), :, r])

    if splits > 1:  # a second launch, of XLA's, adds the parts: still shorter than idle blocks
        outs = [jax.ShapeDtypeStruct((splits, count, tiles * ROWS), jnp.float32)]
        (parts,) = _grouped(
            rows, weights, layer, work, outs, keep, tiles, config, interpret, splits
        )
        sums = parts.sum(axis=0).reshape(count, tiles, 2, 128)
        value = jax.nn.silu(sums[:, :, 0]) * sums[:, :, 1]
        return Rows(value.reshape(count, width).astype(jnp.bfloat16), None)
    outs = [jax.ShapeDtypeStruct((count, width), jnp.bfloat16)]
    if biased:
        outs.append(jax.ShapeDtypeStruct((count // 8, tiles, 4, 8), jnp.float32))
    made = _grouped(rows, weights, layer, work, outs, finish, tiles, config, interpret)
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

    def finish(staged, outs, row, tile, split, of_row):
        pair, share = of_row
        value = staged.at[pl.ds(0, ROWS)][...] * share
        outs[0][pair, pl.ds(tile * ROWS, ROWS)] = value.astype(jnp.bfloat16)

    weights = (weight.words if packed else weight,)
    if packed and config.scale == "bias" and rows.bias is None:
        config = replace(config, scale="group")
    outs = [jax.ShapeDtypeStruct((pairs, size), jnp.bfloat16)]
    return _grouped(rows, weights, layer, work, outs, finish, size // ROWS, config, interpret)[0]


def _grouped(
    rows: Rows, weights, layer, work: Work, outs, finish, tiles, config, interpret, splits=1
):
    """Run `finish` on every row of every slot with its products with 256 weight rows of a tile.

    With `splits`, products are over one part of the inputs, and `finish` runs for every part.
    """
    run = STOCK if interpret is not None else INLINE
    form = (_Packed if weights[0].dtype == jnp.int32 else _Dense)(config, run)
    steps = rows.values.shape[1] // form.depth // splits  # of an item
    wgs, stages = config.warpgroups, config.stages
    per_wg, largest = _BLOCKS // wgs, config.tiles[-1]
    chunk = min(largest, 32)
    inputs = [rows.values, work.slots, work.used, layer, work.pair, work.share, *weights]
    biased = isinstance(form, _Packed) and config.biased
    if biased:
        inputs.append(rows.bias)

    def body(*refs):
        x_g, slots_g, used_g, layer_g, pair_g, share_g, *weights_g = refs[: len(inputs)]
        bias_g = weights_g.pop() if biased else None
        outs_g = refs[len(inputs) : len(inputs) + len(outs)]
        ring, xs, biases, staging, full, free, met = refs[len(inputs) + len(outs) :]
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        items = used_g[0] * (tiles * splits)
        mine = lax.div(items - cta + (config.ctas - 1), jnp.int32(config.ctas))

        def item(t):
            i = cta + t * config.ctas
            i, split = lax.div(i, jnp.int32(splits)), lax.rem(i, jnp.int32(splits))
            slot, tile = lax.div(i, jnp.int32(tiles)), lax.rem(i, jnp.int32(tiles))
            first = pl.multiple_of(slots_g[slot, 1], 8)
            return (tile, split), slots_g[slot, 0], first, slots_g[slot, 2]

        def by_size(rows, act):
            """act(n) with the smallest tile n that holds the slot."""
            if len(config.tiles) == 1:
                return act(largest)
            which = sum((rows > n).astype(jnp.int32) for n in config.tiles[:-1])
            lax.switch(which, [partial(act, n) for n in config.tiles])

        @pl.when(wg == wgs)
        def _feed():
            plgpu.set_max_registers(config.feeder_registers, action="decrease")

            def feed(t, _):
                (tile, split), expert, first, rows = item(t)

                def sized(n):
                    def step(j, _):
                        at = t * steps + j
                        b = lax.rem(at, jnp.int32(stages))
                        pl.when(at >= stages)(lambda: plgpu.barrier_wait(free.at[b]))
                        k, full_b = split * steps + j, full.at[b]
                        place = layer_g[0], expert, tile, k
                        form.feed(weights_g, place, ring.at[b], full_b)
                        x = x_g.at[pl.ds(first, n), pl.ds(k * form.depth, form.depth)]
                        plgpu.copy_gmem_to_smem(x, xs.at[b, pl.ds(0, n)], full_b)
                        if biased:
                            eight = lax.div(first, jnp.int32(8))
                            plgpu.copy_gmem_to_smem(bias_g.at[eight, k], biases.at[b], full_b)

                    lax.fori_loop(0, steps, step, None)

                by_size(rows, sized)

            def drain(at, _):
                plgpu.barrier_wait(free.at[lax.rem(at, jnp.int32(stages))])

            lax.fori_loop(0, mine, feed, None)
            last = mine * steps
            lax.fori_loop(jnp.maximum(last - stages, 0), last, drain, None)

        @pl.when(wg < wgs)
        def _multiply():
            plgpu.set_max_registers(config.multiplier_registers, action="increase")
            mask = layer_g[1]

            def meet():
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)

            def multiply(t, _):
                place, _, first, rows = item(t)

                def finish_row(start, i):
                    r = i * wgs + wg

                    @pl.when(start + r < rows)
                    def _():
                        row = first + start + r
                        finish(staging.at[r], outs_g, row, *place, (pair_g[row], share_g[row]))

                def sized(n):
                    def step(j, sums):
                        b = lax.rem(t * steps + j, jnp.int32(stages))
                        plgpu.barrier_wait(full.at[b])
                        x, bias = xs.at[b, pl.ds(0, n)], biases.at[b]
                        sums = tuple(
                            form.multiply(s, ring.at[b, wg * per_wg + i], x, bias, mask)
                            for i, s in enumerate(sums)
                        )
                        plgpu.barrier_arrive(free.at[b])
                        return sums

                    sums = lax.fori_loop(0, steps, step, (zeros(n),) * per_wg)
                    for start in range(0, n, chunk):
                        size = min(chunk, n)
                        for i, s in enumerate(sums):
                            part = s if size == n else s[:, start : start + size]
                            run.stage(part, staging, (wg * per_wg + i) * BLOCK)
                        meet()
                        for i in range(size // wgs):
                            finish_row(start, i)
                        meet()

                by_size(rows, sized)

            lax.fori_loop(0, mine, multiply, None)

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
        grid=(config.ctas,),
        grid_names=("cta",),
        num_threads=wgs + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=256,
        ),
    )
    return kernel(*inputs)


def place_of(layer) -> Int32[Array, "2"]:
    """What a launch reads besides work: the layer, and a constant it wants from memory."""
    return jnp.stack([jnp.asarray(layer, jnp.int32), jnp.int32(MASK)])


def sorted_rows(x: BFloat16[Array, "m inputs"], work: Work, config: ExpertConfig) -> Rows:
    """The rows of x in the order of the work list, and the bias that goes with them."""
    values = x[work.row]
    if not config.biased:
        return Rows(values, None)
    groups = values.astype(jnp.float32).reshape(-1, 8, x.shape[1] // DEPTH, GROUPS, GROUP)
    return Rows(values, -OFFSET * groups.sum(axis=-1).transpose(0, 2, 3, 1))
