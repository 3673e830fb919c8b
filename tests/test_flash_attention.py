"""Prefill's flash attention: its padding and scale on a CPU, cuDNN's numerics on a GPU."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import ceilings, prefill
from ddtree_jax.model import attention
from ddtree_jax.model.attention import causal_attention, flash_attention, flash_serves

SCALE = 0.11


def draw(t, heads, d, v, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(t + d), 3)
    sizes = zip(keys, (d, d, v), strict=True)
    return [jax.random.normal(key, (t, heads, n), dtype) for key, n in sizes]


@pytest.mark.parametrize("d,v", [(192, 128), (96, 32), (64, 64)])
def test_equals_the_plain_form(monkeypatch, d, v):
    xla = jax.nn.dot_product_attention

    def without_cudnn(*args, implementation, **keywords):
        assert implementation == "cudnn"
        with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
            return xla(*args, implementation="xla", **keywords)

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)
    args = draw(64, 3, d, v)
    found = flash_attention(*args, SCALE)
    np.testing.assert_allclose(found, causal_attention(*args, SCALE), atol=1e-5)


def test_serves_only_what_it_can(monkeypatch):
    class Card:
        compute_capability = "9.0"

    def serves(t=2048, d=192, v=128, dtype=jnp.bfloat16):
        return flash_serves(*(jax.ShapeDtypeStruct((t, 64, n), dtype) for n in (d, v)))

    assert not serves()  # no GPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [Card])
    assert serves() and serves(d=96, v=32)
    assert not serves(t=512) and not serves(dtype=jnp.float32)
    assert not serves(v=200) and not serves(d=320) and not serves(d=100)
    Card.compute_capability = "8.9"
    assert not serves()
    Card.compute_capability = "gfx942"  # not NVIDIA's
    assert not serves()
    Card.compute_capability = "10.0"
    assert serves()


@pytest.mark.gpu
@pytest.mark.parametrize("t,heads,d,v", [(1024, 8, 96, 32), (2048, 64, 192, 128)])
def test_on_a_gpu(t, heads, d, v):
    args = draw(t, heads, d, v, jnp.bfloat16)
    assert flash_serves(args[0], args[2])
    found = jax.jit(partial(flash_attention, scale=SCALE))(*args)
    exact = causal_attention(*(a.astype(jnp.float32) for a in args), SCALE)
    error = jnp.linalg.norm(found.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert found.dtype == jnp.bfloat16 and error < 1e-2


@pytest.mark.gpu
def test_block_on_a_gpu():
    """The whole attention block of prefill, which must take the flash form."""
    mla = attention.MLA(prefill.LAYER, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (1024, prefill.LAYER.hidden_size), jnp.bfloat16)
    assert prefill.forms(1024) == (False, True)
    plain, fused = (prefill.compile_block(mla, 1024, flash) for flash in (False, True))
    assert "fmha" in fused.func.as_text() and "fmha" not in plain.func.as_text()
    wanted, found = (run(x)[0].astype(jnp.float32) for run in (plain, fused))
    assert jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted) < 1e-2


def test_benchmark(monkeypatch, tmp_path):
    """A CPU has the plain form only; and XLA counts the operations the benchmark states."""
    small = dict(hidden_size=64, num_attention_heads=4, q_lora_rank=32, kv_lora_rank=64)
    monkeypatch.setattr(prefill, "LAYER", replace(prefill.LAYER, **small))
    monkeypatch.setattr(ceilings, "measure", lambda: {"matmul_tflops": 785.0})
    prefill.main(["--tokens", "128", "--samples", "1", "--output", str(tmp_path / "a.json")])
    found = json.loads((tmp_path / "a.json").read_text())
    [plain] = found["points"]
    assert not plain["flash"] and plain["norm"] > 0 and found["summary"] == {}
    both = [plain | {"flash": flash, "us": us} for flash, us in ((False, 30.0), (True, 10.0))]
    assert prefill.summarise(both)["plain_over_flash_128"] == 3
    mla = attention.MLA(prefill.LAYER, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    counted = prefill.compile_block(mla, 128, False).func.cost_analysis()["flops"]
    whole = 4 * (192 + 128) * 128 * 127  # what the mask takes away, the plain form does
    assert counted == pytest.approx(prefill.operations(prefill.LAYER, 128) + whole, rel=0.1)
