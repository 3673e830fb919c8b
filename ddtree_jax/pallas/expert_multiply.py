"""One block's product inside the kernel: 64 weight rows by 128 inputs, times a tile of n rows.

`multiply` is what a GPU runs: stock Pallas cannot say that the nibbles a thread has loaded are its
share of wgmma's left operand, `inline_mgpu` can. `multiply_stock` is the same function in stock
operations, for the interpreter, which knows neither `inline_mgpu` nor operands in registers.

A nibble u = value + 8 becomes bf16 without a conversion: (word >> 4 i) & 0x000F000F | 0x43004300
is the pair (128 + u, 128 + u'), because 0x4300 is 128 and its last mantissa bit counts 1.
"""

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from ddtree_jax.pallas.expert_weights import BLOCK, DEPTH, GROUP, block_values, scaled

SCALES = ("weight", "group", "bias")
_GROUPS = DEPTH // GROUP
_OFFSET = 136  # of a nibble made bf16: 128 of the exponent, 8 of the storage
_WGMMA = plgpu.Layout.WGMMA


def zeros(n: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((BLOCK, n), jnp.float32), _WGMMA)


def multiply(acc, block_ref, x_ref, scale: str):
    """acc + W x^T: acc [64, n] float32, block_ref [9, 128] words, x_ref [n, 128] bf16.

    `scale` says where scales are applied: to every bf16 "weight" (rounded as the published
    decompression rounds), to the partial product of each "group", or likewise with weights left
    at 136 + value and a "bias" of -136 times the sum of the inputs, which is itself a product.
    """
    if scale == "weight":
        weights = _unpack(block_ref, offset=True, scaled=True)
        return _product(acc, ((weights, x_ref),))
    weights = _unpack(block_ref, offset=scale == "group", scaled=False)
    n, parts = acc.shape[1], []
    bias = jnp.full((BLOCK, GROUP), -_OFFSET, jnp.bfloat16)
    bias = plgpu.layout_cast(bias, _WGMMA) if scale == "bias" else None

    def products(*accs):
        for g, part in enumerate(accs):
            x = x_ref.at[:, pl.ds(g * GROUP, GROUP)].T
            if bias is not None:
                plgpu.wgmma(part, bias, x)
            plgpu.wgmma(part, weights[:, g * GROUP : (g + 1) * GROUP], x)
        plgpu.wgmma_wait(0)

    start = tuple(plgpu.ACC.init(zeros(n)) for _ in range(_GROUPS))
    parts = pl.run_state(lambda refs: products(*refs))(start)
    return _fold(acc, tuple(parts), block_ref)


def multiply_dense(acc, weight_ref, x_ref):
    """acc + W x^T of bf16 weights [64, k] in shared memory."""
    return _product(acc, ((weight_ref, x_ref),))


def _product(acc, terms):
    def run(ref):
        for a, x in terms:
            plgpu.wgmma(ref, a, x.T)
        plgpu.wgmma_wait(0)

    return pl.run_state(run)(plgpu.ACC.init(acc))


def multiply_stock(acc, block_ref, x_ref, scale: str):
    """`multiply` in operations the interpreter knows."""
    nibbles, scales = block_values(block_ref[...])
    dtype = jnp.bfloat16 if scale == "weight" else jnp.float32
    return _product_stock(acc, scaled(nibbles, scales, dtype), x_ref[...])


def multiply_dense_stock(acc, weight_ref, x_ref):
    return _product_stock(acc, weight_ref[...], x_ref[...])


def _product_stock(acc, weights, x):
    # The interpreter orders these plain loads before the stage's next copy only by a fence. On a
    # GPU x is read by the tensor cores, in the copies' own order, and words have arrived by then.
    plgpu.commit_smem()
    wide = weights.astype(jnp.float32), x.astype(jnp.float32).T
    return acc + jnp.dot(*wide, precision="highest")


def stage(sums, staging_ref, first):
    """Write sums [64, n] turned around: staging_ref[r, first + row] of every row."""
    n, pitch = sums.shape[1], staging_ref.shape[-1]

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType(), plgpu.Layout.WG_SPLAT()))
    def store(_, sums, staging, first):
        (first,) = first.registers.flat
        f32, thread = ir.F32Type.get(), _thread()
        lane = arith.shrui(arith.andi(thread, _i32(31)), _i32(2))
        row = arith.addi(arith.muli(arith.shrui(thread, _i32(5)), _i32(16)), lane)
        column = arith.muli(arith.andi(thread, _i32(3)), _i32(2 * pitch))
        place = arith.addi(arith.addi(row, first), column)
        for (_, at, _, _, half, *_), pair in np.ndenumerate(sums.registers):
            for e in range(2):
                offset = arith.addi(place, _i32((8 * at + e) * pitch + 8 * half))
                pointer = utils.getelementptr(utils.memref_ptr(staging), [offset], f32)
                llvm.store(llvm.extractelement(pair, _i32(e)), pointer)

    store(sums, staging_ref, first)


def stage_stock(sums, staging_ref, first):
    n = sums.shape[1]
    staging_ref[pl.ds(0, n), pl.ds(first, BLOCK)] = sums.T


# ---- what stock Pallas cannot say: registers by hand ------------------------------------------


def _i32(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _thread() -> ir.Value:
    return arith.andi(utils.thread_idx(), _i32(127))


def _load_words(ref: ir.Value, first: ir.Value) -> list[ir.Value]:
    """Four consecutive words of a shared-memory block, in one 16-byte load."""
    i32 = ir.IntegerType.get_signless(32)
    pointer = utils.getelementptr(utils.memref_ptr(ref), [first], i32)
    four = llvm.load(ir.VectorType.get((4,), i32), pointer, alignment=16)
    return [llvm.extractelement(four, _i32(i)) for i in range(4)]


def _scale_words(ref: ir.Value) -> list[ir.Value]:
    """This thread's scales: a word a group, row h in half h."""
    first = arith.muli(arith.shrui(_thread(), _i32(2)), _i32(4))
    return _load_words(ref, arith.addi(first, _i32(8 * 128)))


def _unpack(block_ref, *, offset: bool, scaled: bool):
    """The block as wgmma's left operand [64, 128] bf16: values, or 136 + value without `offset`."""
    bf16 = ir.BF16Type.get
    pair = lambda: ir.VectorType.get((2,), bf16())  # noqa: E731

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((BLOCK, DEPTH), jnp.bfloat16, layout=_WGMMA),
    )
    def unpack(_, block):
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((BLOCK, DEPTH)), dtype=object)
        minus = vector.broadcast(pair(), utils.c(-float(_OFFSET), bf16()))
        first = arith.muli(_thread(), _i32(4))
        words = [w for j in range(2) for w in _load_words(block, arith.addi(first, _i32(512 * j)))]
        scales = [_halves(word) for word in _scale_words(block)] if scaled else None
        for j, word in enumerate(words):  # word j: inputs 16 j .. 16 j + 15
            for i in range(4):  # nibbles i and i + 4: half i // 2 of the inputs, row i % 2
                value = arith.shrui(word, _i32(4 * i)) if i else word
                value = arith.andi(value, _i32(0x000F000F))
                value = utils.bitcast(arith.ori(value, _i32(0x43004300)), pair())
                if offset:
                    value = arith.addf(value, minus)
                if scaled:
                    value = arith.mulf(value, scales[j // 2][i % 2])
                registers[0, 2 * j + i // 2, 0, 0, i % 2, 0, 0, 0, 0] = value
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    def _halves(word):
        """Both scales of a word, each as a pair of itself."""
        low, high = arith.andi(word, _i32(0xFFFF)), arith.shrui(word, _i32(16))
        double = lambda half: arith.ori(half, arith.shli(half, _i32(16)))  # noqa: E731
        return [utils.bitcast(double(half), pair()) for half in (low, high)]

    return unpack(block_ref)


def _fold(acc, parts, block_ref):
    """acc + sum over groups of part * scale, in fused multiply-adds."""
    n = acc.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, (_WGMMA,) * len(parts), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((BLOCK, n), jnp.float32, layout=_WGMMA),
    )
    def fold(_, acc, parts, block):
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        registers = acc.registers.copy()
        for part, word in zip(parts, _scale_words(block), strict=True):
            for row in range(2):  # a bf16 is the upper half of a float32
                bits = arith.andi(word, _i32(-65536)) if row else arith.shli(word, _i32(16))
                scale = vector.broadcast(pair, utils.bitcast(bits, f32))
                for column in range(n // 8):
                    at = (0, column, 0, 0, row, 0, 0, 0, 0)
                    registers[at] = math.fma(part.registers[at], scale, registers[at])
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return fold(acc, tuple(parts), block_ref)
