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
from jaxtyping import Array, BFloat16, Float

from ddtree_jax.pallas import expert_multiply as product
from ddtree_jax.pallas.expert_config import ExpertConfig
from ddtree_jax.pallas.expert_weights import BLOCK, DEPTH, ROWS, Records
from ddtree_jax.pallas.expert_work import Work

_BLOCKS = ROWS // BLOCK
_PAD = 4  # words between staged rows: a warp's 32 transposed stores hit 32 banks


@dataclass(frozen=True)
class _Packed:
    """INT4 records: one contiguous copy a stage."""

    scale: str
    interpret: bool
    depth: int = DEPTH
    copies: int = 1

    def ring(self, stages: int):
        return plgpu.SMEM((stages, _BLOCKS, 9, 128), jnp.int32)

    def feed(self, weights, at, ring, barrier):
        plgpu.copy_gmem_to_smem(weights[0].at[at], ring, barrier)

    def multiply(self, acc, block_ref, x_ref):
        run = product.multiply_stock if self.interpret else product.multiply
        return run(acc, block_ref, x_ref, self.scale)

    @property
    def swizzle(self) -> int:  # groups of 32 inputs are multiplied alone, or 64 at least
        return 128 if self.scale == "weight" else 64


@dataclass(frozen=True)
class _Dense:
    """bf16 matrices [layers, experts, out, in] as they are: one copy a block."""

    gated: bool
    interpret: bool
    depth: int = 64
    copies: int = _BLOCKS
    swizzle: int = 128

    def ring(self, stages: int):
        return plgpu.SMEM((stages, _BLOCKS, BLOCK, 64), jnp.bfloat16, transforms=_tiled(128))

    def feed(self, weights, at, ring, barrier):
        layer, expert, tile, step = at
        per = _BLOCKS // len(weights)
        for block in range(_BLOCKS):
            row = (tile * per + block % per) * BLOCK
            source = weights[block // per].at[
                layer, expert, pl.ds(pl.multiple_of(row, BLOCK), BLOCK), pl.ds(step * 64, 64)
            ]
            plgpu.copy_gmem_to_smem(source, ring.at[block], barrier)

    def multiply(self, acc, block_ref, x_ref):
        run = product.multiply_dense_stock if self.interpret else product.multiply_dense
        return run(acc, block_ref, x_ref)


def _tiled(swizzle: int):
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def gate_up(
    x: BFloat16[Array, "rows hidden"],
    gate: Array | Records,
    up: Array | Records,
    layer: Array,
    work: Work,
    config: ExpertConfig,
    interpret=None,
) -> BFloat16[Array, "rows width"]:
    """silu(gate x) * (up x) of the sorted, padded rows; rows outside any slot stay unwritten."""
    if isinstance(gate, Records):
        weights, width = (gate.words,), gate.out
    else:
        weights, width = (gate, up), gate.shape[2]

    def finish(staged, out, row, tile, _):
        gate, up = staged.at[pl.ds(0, 128)][...], staged.at[pl.ds(128, 128)][...]
        value = gate / (1 + jnp.exp(-gate)) * up
        out[row, pl.ds(tile * 128, 128)] = value.astype(jnp.bfloat16)

    shape = (x.shape[0], width)
    return _grouped(x, weights, layer, work, shape, finish, width // 128, config, interpret)


def down(
    hidden: BFloat16[Array, "rows width"],
    weight: Array | Records,
    layer: Array,
    work: Work,
    pairs: int,
    config: ExpertConfig,
    interpret=None,
) -> BFloat16[Array, "pairs hidden"]:
    """router weight * (down h), each row at the place of its pair; other places stay unwritten."""
    packed = isinstance(weight, Records)
    size = weight.out if packed else weight.shape[2]

    def finish(staged, out, row, tile, of_row):
        pair, share = of_row
        value = staged.at[pl.ds(0, ROWS)][...] * share
        out[pair, pl.ds(tile * ROWS, ROWS)] = value.astype(jnp.bfloat16)

    weights = (weight.words if packed else weight,)
    return _grouped(
        hidden, weights, layer, work, (pairs, size), finish, size // ROWS, config, interpret
    )


def _grouped(x, weights, layer, work: Work, shape, finish, tiles, config, interpret):
    """Run `finish` on every row of every slot with its products with 256 weight rows of a tile."""
    packed, simulated = weights[0].dtype == jnp.int32, interpret is not None
    form = _Packed(config.scale, simulated) if packed else _Dense(len(weights) == 2, simulated)
    steps, wgs = x.shape[1] // form.depth, config.warpgroups
    stages, per_wg = config.stages, _BLOCKS // wgs
    stage = product.stage_stock if simulated else product.stage
    largest, chunk = config.tiles[-1], min(config.tiles[-1], 32)

    def body(x_g, *refs):
        weights_g = refs[: len(weights)]
        slots_g, used_g, layer_g, pair_g, share_g, out_g = refs[len(weights) : len(weights) + 6]
        ring, xs, staging, full, free, met = refs[len(weights) + 6 :]
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        items = used_g[0] * tiles
        mine = lax.div(items - cta + (config.ctas - 1), jnp.int32(config.ctas))

        def item(t):
            i = cta + t * config.ctas
            slot, tile = lax.div(i, jnp.int32(tiles)), lax.rem(i, jnp.int32(tiles))
            return tile, slots_g[slot, 0], pl.multiple_of(slots_g[slot, 1], 8), slots_g[slot, 2]

        def by_size(rows, run):
            """run(n) with the smallest tile that holds the slot."""
            which = sum((rows > n).astype(jnp.int32) for n in config.tiles[:-1])
            if len(config.tiles) == 1:
                run(largest)
            else:
                lax.switch(which, [partial(run, n) for n in config.tiles])

        @pl.when(wg == wgs)
        def _feed():
            plgpu.set_max_registers(config.feeder_registers, action="decrease")

            def feed(t, _):
                tile, expert, first, rows = item(t)

                def sized(n):
                    def step(j, _):
                        at = t * steps + j
                        b = lax.rem(at, jnp.int32(stages))

                        @pl.when(at >= stages)
                        def _():
                            plgpu.barrier_wait(free.at[b])

                        form.feed(weights_g, (layer_g[0], expert, tile, j), ring.at[b], full.at[b])
                        plgpu.copy_gmem_to_smem(
                            x_g.at[pl.ds(first, n), pl.ds(j * form.depth, form.depth)],
                            xs.at[b, pl.ds(0, n)],
                            full.at[b],
                        )

                    lax.fori_loop(0, steps, step, None)

                by_size(rows, sized)

            lax.fori_loop(0, mine, feed, None)

            def drain(at, _):
                plgpu.barrier_wait(free.at[lax.rem(at, jnp.int32(stages))])

            last = mine * steps
            lax.fori_loop(jnp.maximum(last - stages, 0), last, drain, None)

        @pl.when(wg < wgs)
        def _multiply():
            plgpu.set_max_registers(config.multiplier_registers, action="increase")

            def meet():
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)

            def multiply(t, _):
                tile, _, first, rows = item(t)

                def sized(n):
                    def step(j, sums):
                        b = lax.rem(t * steps + j, jnp.int32(stages))
                        plgpu.barrier_wait(full.at[b])
                        x = xs.at[b, pl.ds(0, n)]
                        sums = tuple(
                            form.multiply(s, ring.at[b, wg * per_wg + i], x)
                            for i, s in enumerate(sums)
                        )
                        plgpu.barrier_arrive(free.at[b])
                        return sums

                    sums = lax.fori_loop(0, steps, step, (product.zeros(n),) * per_wg)
                    for start in range(0, n, chunk):
                        size = min(chunk, n)
                        for i, s in enumerate(sums):
                            part = s if size == n else s[:, start : start + size]
                            stage(part, staging, (wg * per_wg + i) * BLOCK)
                        meet()
                        for i in range(size // wgs):
                            r = i * wgs + wg

                            @pl.when(start + r < rows)
                            def _():
                                row = first + start + r
                                finish(staging.at[r], out_g, row, tile, (pair_g[row], share_g[row]))

                        meet()

                by_size(rows, sized)

            lax.fori_loop(0, mine, multiply, None)

    copies = form.copies + 1
    scratch = (
        form.ring(stages),
        plgpu.SMEM((stages, largest, form.depth), jnp.bfloat16, transforms=_tiled(form.swizzle)),
        plgpu.SMEM((chunk, ROWS + _PAD), jnp.float32),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        plgpu.Barrier(num_arrivals=wgs),
    )
    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
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
    return run(x, *weights, work.slots, work.used, layer, work.pair, work.share)
