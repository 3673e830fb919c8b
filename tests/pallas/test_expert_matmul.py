"""The routed experts: blocks of touched experts, and every expert, against one row at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.model.quantize import quantize_int4
from ddtree_jax.pallas.expert_matmul import (
    expert_mlp,
    expert_mlp_dense,
    expert_mlp_reference,
)
from ddtree_jax.pallas.expert_weights import Int4, dequantize

LAYERS, EXPERTS, WIDTH, HIDDEN = 2, 6, 32, 64


def weights(rng, packed):
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    full = [rng.normal(size=(LAYERS, EXPERTS, *s)).astype(np.float32) * 0.2 for s in shapes]
    if not packed:
        return full, [jnp.asarray(w) for w in full]
    stored = [Int4(*map(jnp.asarray, quantize_int4(w))) for w in full]
    return [np.asarray(dequantize(*w, jnp.float32)) for w in stored], stored


def by_rows(x, full, layer, ids, gates):
    gate, up, down = (w[layer].astype(np.float64) for w in full)
    out = np.zeros_like(x, dtype=np.float64)
    for m, row in enumerate(x.astype(np.float64)):
        for e, g in zip(ids[m], gates[m], strict=True):
            if 0 <= e < EXPERTS:
                a = gate[e] @ row
                out[m] += g * (down[e] @ (a / (1 + np.exp(-a)) * (up[e] @ row)))
    return out


def routings(rng):
    """(name, ids): uniform, one expert for all, experts without rows, padding rows, one row."""
    uniform = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(23)])
    yield "uniform", uniform
    yield "one expert", np.full((40, 1), 3)
    yield "pairs of two experts", np.stack([rng.permutation([1, 4]) for _ in range(17)])
    yield "padding", np.where(rng.random((23, 1)) < 0.4, EXPERTS, uniform)
    yield "all padding", np.full((5, 2), EXPERTS)
    yield "one row", uniform[:1]
    yield "many rows", np.stack([rng.permutation(EXPERTS)[:2] for _ in range(700)])


@pytest.mark.parametrize("packed", (False, True))
def test_agrees_with_one_row_at_a_time(packed):
    rng = np.random.default_rng(packed)
    full, stored = weights(rng, packed)
    for name, ids in routings(rng):
        x = rng.normal(size=(len(ids), HIDDEN)).astype(np.float32)
        gates = rng.random(ids.shape).astype(np.float32)
        expected = by_rows(x, full, 1, ids, gates)
        for fn in (expert_mlp_reference, expert_mlp_dense, expert_mlp):
            got = jax.jit(fn, static_argnums=4)(
                jnp.asarray(x), *stored, 1, jnp.asarray(ids), jnp.asarray(gates)
            )
            scale = max(np.abs(expected).max(), 1e-6)
            assert np.abs(got - expected).max() <= 2e-5 * scale, (name, fn.__name__)


def test_untouched_experts_are_not_read():
    rng = np.random.default_rng(2)
    full, stored = weights(rng, False)
    poisoned = [w.at[:, 5].set(jnp.nan).at[0].set(jnp.nan) for w in stored]
    ids = rng.integers(0, 5, (9, 2))
    x, gates = rng.normal(size=(9, HIDDEN)).astype(np.float32), np.ones((9, 2), np.float32)
    got = expert_mlp_reference(jnp.asarray(x), *poisoned, 1, jnp.asarray(ids), jnp.asarray(gates))
    assert np.isfinite(got).all()
