"""The router's choice: the kernel in the interpreter against the reference, and its lowering."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas.expert_router import choose, choose_kernel, choose_reference


def inputs(m, experts, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(m, experts)).astype(np.float32)
    bias = (rng.normal(size=experts) * 0.2).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(bias), jnp.asarray(rng.random(m) < 0.8)


@pytest.mark.parametrize(("experts", "k", "normalize"), [(384, 8, True), (128, 3, False)])
def test_kernel_agrees(experts, k, normalize, capsys):
    logits, bias, valid = inputs(5, experts)
    logits = logits.at[3].set(0.5).at[4, 20:30].set(2)  # ties: the lower id first
    bias = bias.at[40:60].set(0.25)
    how = k, normalize, 2.5
    params = plgpu.InterpretGPUParams(detect_races=True)
    ids, weights = choose_kernel(logits, bias, valid, *how, interpret=params)
    expected, shares = choose_reference(logits, bias, valid, *how)
    assert (np.asarray(ids) == np.asarray(expected)).all()
    np.testing.assert_allclose(weights, shares, rtol=1e-6)
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("where", [slice(None), 0, 377])
def test_nan_logits_are_never_silent(where):
    """Not expert 0, not another: the weights of the row say NaN, and only there."""
    logits, bias, _ = inputs(3, 384)
    logits, valid = logits.at[1, where].set(jnp.nan), jnp.ones(3, bool)
    params = plgpu.InterpretGPUParams()
    for ids, weights in (
        choose_reference(logits, bias, valid, 8, True, 1.0),
        choose_kernel(logits, bias, valid, 8, True, 1.0, interpret=params),
    ):
        assert np.isnan(weights).all(axis=1).tolist() == [False, True, False]
        assert ((ids >= 0) & (ids < 384)).all()


@pytest.mark.parametrize("m", [1, 9, 65])
def test_lowers_for_cuda(m):
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs(m, 384)]
    run = jax.jit(lambda *a: choose(*a, 8, True, 2.5))
    text = run.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1 and "top_k" not in text


def test_refuses():
    with pytest.raises(ValueError, match="128"):
        choose_kernel(*inputs(2, 100), 8, True, 1.0)
