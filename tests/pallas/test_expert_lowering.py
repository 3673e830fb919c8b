"""Every shipped configuration lowers for CUDA, at the shapes it serves, without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from ddtree_jax.pallas.expert_config import DENSE, PACKED, choose_config
from ddtree_jax.pallas.expert_matmul import expert_mlp, expert_mlp_kernel
from ddtree_jax.pallas.expert_weights import Records, records_shape

KIMI = (3, 384, 2048, 7168)  # layers, experts, width, hidden
RANK = (3, 384, 256, 7168)  # one of eight ranks that split the width
NANO = (5, 24, 256, 256)
SHAPES = {"kimi": KIMI, "rank": RANK, "nano": NANO}


def abstract(shape, packed):
    layers, experts, width, hidden = shape
    if not packed:
        one = jax.ShapeDtypeStruct((layers, experts, width, hidden), jnp.bfloat16)
        return one, one, jax.ShapeDtypeStruct((layers, experts, hidden, width), jnp.bfloat16)
    parts = (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width))
    return tuple(
        Records(jax.ShapeDtypeStruct((layers, experts, *records_shape(p, *sizes)), jnp.int32), p)
        for p, *sizes in parts
    )


def lowered(fn, shape, m, k, packed, layer=1, dtype=jnp.bfloat16):
    struct = jax.ShapeDtypeStruct
    routing = struct((m, k), jnp.int32), struct((m, k), jnp.float32)
    rows = struct((m, shape[-1]), dtype)
    run = jax.jit(lambda x, weights, *r: fn(x, *weights, layer, *r))
    return run.trace(rows, abstract(shape, packed), *routing).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "name", ["nano", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kimi", "rank"))]
)
def test_every_shipped_configuration(name, packed):
    layers, experts, *_ = SHAPES[name]
    limits = [limit for limit, _ in (PACKED if packed else DENSE)]
    for limit in limits:
        each = limits[-2] * 2 if limit == limits[-1] else limit
        m, k = int(each * experts) // 8, 8
        assert choose_config(m * k, experts, packed) is dict(PACKED if packed else DENSE)[limit]
        lowered(expert_mlp_kernel, SHAPES[name], m, k, packed)


@pytest.mark.parametrize("m", [1, 9, 17, 65, 80, 81])
def test_small_batches_take_four_launches(m):
    """The list and rows in one kernel, two products, one fusion; from 81 rows on, XLA sorts."""
    text = lowered(expert_mlp_kernel, KIMI, m, 8, True).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == (3 if m <= 80 else 2)
    assert ("stablehlo.sort" in text) == (m > 80)


@pytest.mark.parametrize("packed", [True, False])
def test_stacks_enter_the_kernels_whole(packed):
    """Layer and expert are indices inside the kernel: nothing slices or copies a stack."""
    text = lowered(expert_mlp_kernel, KIMI, 9, 8, packed).as_text()
    shapes = {w.words.shape if packed else w.shape for w in abstract(KIMI, packed)}
    for shape in shapes:
        kind = f"tensor<{'x'.join(map(str, shape))}x{'i32' if packed else 'bf16'}>"
        lines = [line.strip() for line in text.splitlines() if kind in line]
        uses = [line for line in lines if not line.startswith("func.func")]
        assert any("custom_call @mosaic_gpu" in line for line in uses)
        assert all(re.search(r"custom_call @mosaic_gpu| call @_run", line) for line in uses)


def test_layers_share_their_kernels():
    """Lowered once, however many layers: a compilation of each kernel took seconds."""

    def two_layers(x, gate, up, down, layer, ids, weights):
        x = expert_mlp_kernel(x, gate, up, down, layer, ids, weights)
        return expert_mlp_kernel(x, gate, up, down, layer + 1, ids, weights)

    text = lowered(two_layers, NANO, 9, 4, True).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3 and text.count("call @_run") == 2


def test_wiring():
    """bf16 rows and records reach the kernel on CUDA; what it refuses stays dense."""
    assert "mosaic_gpu" in lowered(expert_mlp, NANO, 9, 4, True).as_text()
    assert "mosaic_gpu" in lowered(expert_mlp, NANO, 9, 4, False).as_text()
    odd = (5, 24, 96, 256)
    assert "mosaic_gpu" not in lowered(expert_mlp, odd, 9, 4, False).as_text()
    assert "mosaic_gpu" not in lowered(expert_mlp, NANO, 9, 4, True, dtype=jnp.float32).as_text()
