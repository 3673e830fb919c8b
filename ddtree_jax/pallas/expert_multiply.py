"""One block's product inside the kernel: 64 weight rows by 128 inputs, times a tile of n rows.

What a GPU runs needs `inline_mgpu`: stock Pallas cannot say that the nibbles a thread has loaded
are its share of wgmma's left operand. The interpreter knows neither `inline_mgpu` nor operands in
registers; it runs the same functions in stock operations (`STOCK`), around the same kernel.

A nibble u = value + 8 becomes bf16 without a conversion: (word >> 4 i) & 0x000F000F | 0x43004300
is the pair (128 + u, 128 + u'), because 0x4300 is 128 and its last mantissa bit counts 1. The issue
of instructions limits the loop: count them in the machine code before and after a change.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from ddtree_jax.pallas.expert_weights import BLOCK, DEPTH, GROUP, OFFSET, block_values, scaled

GROUPS = DEPTH // GROUP
# Kept in memory: as an immediate it would be moved into a register again for every pair.
MASK = 0x000F000F
_WGMMA, _SCALAR = plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT()


class Functions(NamedTuple):
    """What differs between a GPU and the interpreter, and nothing else does."""

    multiply: Callable  # (acc, block_ref, x_ref, bias_ref, mask, scale) -> acc of INT4 weights
    multiply_dense: Callable  # (acc, weight_ref, x_ref) -> acc of bf16 weights
    stage: Callable  # (sums, staging_ref, first): turn sums around into shared memory
    wait: Callable  # (flag_ref): until another block has set it
    signal: Callable  # (flag_ref): what this block has written is there
    put_sums: Callable  # (values [128 v], bias_ref [v, 4]): bias of the product they go into


def zeros(n: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((BLOCK, n), jnp.float32), _WGMMA)


def _multiply(acc, block_ref, x_ref, bias_ref, mask, scale: str):
    """acc + W x^T: acc [64, n] float32, block_ref [9, 128] words, x_ref [n, 128] bf16.

    `scale` says where scales are applied: to every bf16 "weight" (rounded as the published
    decompression rounds), to the partial product of each "group", or likewise with weights left
    at 136 + value and products starting from the "bias", -136 times the sum of their inputs.
    """
    n = acc.shape[1]
    if scale == "weight":
        # Large tiles leave no registers for a whole left operand.
        for halves in ((0, 1),) if n < 96 else ((0,), (1,)):
            weights = _unpack(block_ref, mask, halves, offset=True, scaled=True)
            x = x_ref.at[:, pl.ds(64 * halves[0], 64 * len(halves))]
            acc = _multiply_dense(acc, weights, x)
        return acc
    weights = _unpack(block_ref, mask, (0, 1), offset=scale == "group", scaled=False)

    def products(parts):
        for g, part in enumerate(parts):
            here = slice(g * GROUP, (g + 1) * GROUP)
            plgpu.wgmma(part, weights[:, here], x_ref.at[:, pl.ds(g * GROUP, GROUP)].T)
        plgpu.wgmma_wait(0)

    start = _biases(bias_ref, n) if scale == "bias" else (zeros(n),) * GROUPS
    parts = pl.run_state(products)(tuple(plgpu.ACC.init(s) for s in start))
    return _fold(acc, tuple(parts), block_ref)


def _multiply_dense(acc, weights, x_ref):
    """acc + W x^T of bf16 weights [64, k], in registers or in shared memory."""

    def product(ref):
        plgpu.wgmma(ref, weights, x_ref.T)
        plgpu.wgmma_wait(0)

    return pl.run_state(product)(plgpu.ACC.init(acc))


def _multiply_stock(acc, block_ref, x_ref, bias_ref, mask, scale: str):
    nibbles, scales = block_values(block_ref[...])
    x, bias = x_ref[...], bias_ref[...]
    if scale != "bias":
        dtype = jnp.bfloat16 if scale == "weight" else jnp.float32
        return _product_stock(acc, scaled(nibbles, scales, dtype), x)
    acc = _product_stock(acc, scaled(nibbles + OFFSET, scales, jnp.float32), x)
    return acc + jnp.dot(scales.astype(jnp.float32), bias, precision="highest")


def _multiply_dense_stock(acc, weight_ref, x_ref):
    return _product_stock(acc, weight_ref[...], x_ref[...])


def _product_stock(acc, weights, x):
    # The interpreter orders these plain loads before the stage's next copy only by a fence. On a
    # GPU x is read by the tensor cores, in the copies' own order, and words have arrived by then.
    plgpu.commit_smem()
    wide = weights.astype(jnp.float32), x.astype(jnp.float32).T
    return acc + jnp.dot(*wide, precision="highest")


def _stage_stock(sums, staging_ref, first):
    staging_ref[pl.ds(0, sums.shape[1]), pl.ds(first, BLOCK)] = sums.T


def _put_sums_stock(values, bias_ref):
    groups = values.astype(jnp.float32).reshape(-1, GROUPS, GROUP)
    bias_ref[...] = -OFFSET * groups.sum(axis=-1)


def _wait_stock(flag_ref):
    """Blocks run one after another, those that are waited for first."""


def _signal_stock(flag_ref):
    flag_ref[...] = jnp.int32(1)


STOCK = Functions(
    multiply=_multiply_stock, multiply_dense=_multiply_dense_stock, stage=_stage_stock,
    wait=_wait_stock, signal=_signal_stock, put_sums=_put_sums_stock,
)  # fmt: skip

# ---- what stock Pallas cannot say: registers by hand ------------------------------------------


def _i32(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _thread() -> ir.Value:
    return arith.andi(utils.thread_idx(), _i32(127))


def _pointer(ref: ir.Value, index: ir.Value, element: ir.Type) -> ir.Value:
    return utils.getelementptr(utils.memref_ptr(ref), [index], element)


def _array(registers) -> mgpu.FragmentedArray:
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _registers(*shape: int) -> np.ndarray:
    return np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)


def _load_words(ref: ir.Value, first: ir.Value) -> list[ir.Value]:
    """Four consecutive words of a shared-memory block, in one 16-byte load."""
    i32 = ir.IntegerType.get_signless(32)
    four = llvm.load(ir.VectorType.get((4,), i32), _pointer(ref, first, i32), alignment=16)
    return [llvm.extractelement(four, _i32(i)) for i in range(4)]


def _scale_words(ref: ir.Value) -> list[ir.Value]:
    """This thread's scales: a word a group, row h in half h."""
    first = arith.muli(arith.shrui(_thread(), _i32(2)), _i32(4))
    return _load_words(ref, arith.addi(first, _i32(8 * 128)))


def _doubled(word: ir.Value, pair: ir.Type) -> list[ir.Value]:
    """Both 16-bit halves of a word, each twice, as pairs."""
    i32 = ir.IntegerType.get_signless(32)
    texts = (f"prmt.b32 $0, $1, $1, {how};" for how in (0x1010, 0x3232))
    return [utils.bitcast(llvm.inline_asm(i32, [word], text, "=r,r"), pair) for text in texts]


def _unpack(block_ref, mask, halves, *, offset: bool, scaled: bool):
    """Halves of the block as wgmma's left operand in bf16: values, or 136 + value sans `offset`."""
    shape = (BLOCK, 64 * len(halves))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=_WGMMA),
    )
    def unpack(_, block, mask):
        (mask,), registers = mask.registers.flat, _registers(*shape)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        minus = vector.broadcast(pair, utils.c(-float(OFFSET), ir.BF16Type.get()))
        first = arith.muli(_thread(), _i32(4))
        words = [w for j in halves for w in _load_words(block, arith.addi(first, _i32(512 * j)))]
        scales = [_doubled(word, pair) for word in _scale_words(block)] if scaled else ()
        for s, word in enumerate(words):  # inputs 16 s .. of the halves
            for i in range(4):  # nibbles i and i + 4: inputs 8 (i // 2) .. of these, row i % 2
                value = arith.shrui(word, _i32(4 * i)) if i else word
                value = arith.ori(arith.andi(value, mask), _i32(0x43004300))
                value = utils.bitcast(value, pair)
                if offset:
                    value = arith.addf(value, minus)
                if scaled:
                    value = arith.mulf(value, scales[2 * halves[0] + s // 2][i % 2])
                registers[0, 2 * s + i // 2, 0, 0, i % 2, 0, 0, 0, 0] = value
        return _array(registers)

    return unpack(block_ref, mask)


def _biases(bias_ref, n: int):
    """For each group [64, n] float32, every row the group's row of bias_ref [4, n]."""
    one = plgpu.ShapeDtypeStruct((BLOCK, n), jnp.float32, layout=_WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(one,) * GROUPS)
    def load(_, bias):
        f32, parts = ir.F32Type.get(), []
        pair = ir.VectorType.get((2,), f32)
        column = arith.muli(arith.andi(utils.thread_idx(), _i32(3)), _i32(2))
        for g in range(GROUPS):
            registers = _registers(BLOCK, n)
            for j in range(n // 8):
                place = _pointer(bias, arith.addi(column, _i32(g * n + 8 * j)), f32)
                registers[:, j] = llvm.load(pair, place, alignment=8)
            parts.append(_array(registers))
        return tuple(parts)

    return load(bias_ref)


def _fold(acc, parts, block_ref):
    """acc + sum over groups of part * scale, in fused multiply-adds."""
    one = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=_WGMMA)
    types = (_WGMMA, (_WGMMA,) * GROUPS, plgpu.RefType())

    @plgpu.inline_mgpu(arg_types=types, return_type=one)
    def fold(_, acc, parts, block):
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        registers = acc.registers.copy()
        for part, word in zip(parts, _scale_words(block), strict=True):
            for row in range(2):  # a bf16 is the upper half of a float32
                bits = arith.andi(word, _i32(-65536)) if row else arith.shli(word, _i32(16))
                scale = vector.broadcast(pair, utils.bitcast(bits, f32))
                for j in range(acc.shape[1] // 8):
                    at = (0, j, 0, 0, row, 0, 0, 0, 0)
                    registers[at] = math.fma(part.registers[at], scale, registers[at])
        return _array(registers)

    return fold(acc, parts, block_ref)


def _stage(sums, staging_ref, first):
    """staging_ref[r, first + row] = sums[row, r]."""
    pitch = staging_ref.shape[-1]

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType(), _SCALAR))
    def store(_, sums, staging, first):
        (first,), thread, f32 = first.registers.flat, _thread(), ir.F32Type.get()
        lane = arith.shrui(arith.andi(thread, _i32(31)), _i32(2))
        row = arith.addi(arith.muli(arith.shrui(thread, _i32(5)), _i32(16)), lane)
        column = arith.muli(arith.andi(thread, _i32(3)), _i32(2 * pitch))
        place = arith.addi(arith.addi(row, first), column)
        for (_, j, _, _, half, *_), pair in np.ndenumerate(sums.registers):
            for e in range(2):
                index = arith.addi(place, _i32((8 * j + e) * pitch + 8 * half))
                llvm.store(llvm.extractelement(pair, _i32(e)), _pointer(staging, index, f32))

    store(sums, staging_ref, first)


def _put_sums(values, bias_ref):
    """bias_ref[i, g] = -136 * the sum of values 128 i + 32 g ..; a thread holds v neighbours."""
    per = values.shape[0] // DEPTH

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_STRIDED(values.shape, per), plgpu.RefType()))
    def store(_, values, bias):
        (vector_,), f32 = values.registers.flat, ir.F32Type.get()
        i32 = ir.IntegerType.get_signless(32)
        own = [arith.extf(f32, llvm.extractelement(vector_, _i32(i))) for i in range(per)]
        total = functools.reduce(arith.addf, own)
        distance = GROUP // per // 2  # neighbouring threads share a group
        while distance:
            text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
            bits = utils.bitcast(total, i32)
            bits = llvm.inline_asm(i32, [bits], text, "=r,r", has_side_effects=True)
            total, distance = arith.addf(total, utils.bitcast(bits, f32)), distance // 2
        total = arith.mulf(total, utils.c(-float(OFFSET), f32))
        # All threads of a group hold its sum and store it to one place.
        group = arith.divui(_thread(), _i32(GROUP // per))
        (rows, columns), _ = ir.MemRefType(bias.type).get_strides_and_offset()
        index = arith.muli(arith.shrui(group, _i32(2)), _i32(rows))
        index = arith.addi(index, arith.muli(arith.andi(group, _i32(3)), _i32(columns)))
        llvm.store(total, _pointer(bias, index, f32))

    store(values, bias_ref)


def _address(flag: ir.Value) -> ir.Value:
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    return llvm.ptrtoint(i64, _pointer(flag, _i32(0), i32))


def _wait(flag_ref):
    """Every thread looks until the flag is set; what was written before is then visible to it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_, flag):
        text = """{
            .reg .pred again;
            .reg .b32 seen;
            look:
            ld.acquire.gpu.b32 seen, [$0];
            setp.eq.u32 again, seen, 0;
            @again bra look;
        }"""
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [_address(flag)], text, "l,~{memory}", has_side_effects=True)

    wait(flag_ref)


def _signal(flag_ref):
    """After a barrier of all writers: one thread publishes, at the scope of the card."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_, flag):
        text = """{
            .reg .pred one;
            setp.eq.u32 one, $1, 0;
            @one fence.acq_rel.gpu;
            @one st.release.gpu.b32 [$0], 1;
        }"""
        void = ir.Type.parse("!llvm.void")
        operands = [_address(flag), _thread()]
        llvm.inline_asm(void, operands, text, "l,r,~{memory}", has_side_effects=True)

    signal(flag_ref)


INLINE = Functions(
    multiply=_multiply, multiply_dense=_multiply_dense, stage=_stage,
    wait=_wait, signal=_signal, put_sums=_put_sums,
)  # fmt: skip
