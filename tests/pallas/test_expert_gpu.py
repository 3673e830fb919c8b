"""The grouped matmul on an NVIDIA GPU, at Kimi's sizes. By hand: pytest -m gpu tests/pallas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.expert_matmul import draw_records, draw_routing
from ddtree_jax import loading
from ddtree_jax.checkpoint import load_target
from ddtree_jax.model.attention import expanded_attention
from ddtree_jax.model.kimi import merge_kimi
from ddtree_jax.pallas.expert_config import DENSE, ExpertConfig
from ddtree_jax.pallas.expert_matmul import (
    expert_mlp,
    expert_mlp_dense,
    expert_mlp_kernel,
    expert_mlp_reference,
)
from ddtree_jax.pallas.expert_weights import expert_matrix

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, WIDTH = 384, 7168, 2048
run = jax.jit(expert_mlp_kernel, static_argnames="config")
reference = jax.jit(expert_mlp_reference)


@pytest.fixture(scope="module")
def weights():
    return draw_records(0, EXPERTS, WIDTH, HIDDEN)


@pytest.fixture(scope="module")
def few():
    """Two layers of 16 experts, one rank's slice of the width."""
    return draw_records(1, 16, 256, HIDDEN, layers=2)


def case(m, routing="uniform", experts=EXPERTS, seed=0):
    rng = np.random.default_rng(seed)
    ids = draw_routing(rng, m, routing) % experts
    share = rng.uniform(0.2, 1, ids.shape).astype(np.float32)
    x = jax.random.normal(jax.random.key(m), (m, HIDDEN), jnp.bfloat16)
    return x, jnp.asarray(ids), jnp.asarray(share)


def error(got, weights, x, ids, share, layer=0, first=0):
    """Largest |row - reference| / |reference|."""
    wide = [w.astype(jnp.float32) if isinstance(w, jax.Array) else w for w in weights]
    expected = reference(x.astype(jnp.float32), *wide, layer, ids, share, first)
    off = jnp.linalg.norm(got.astype(jnp.float32) - expected, axis=1)
    return float((off / jnp.maximum(jnp.linalg.norm(expected, axis=1), 1e-6)).max())


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
@pytest.mark.parametrize("m", [1, 9, 33, 65, 80, 81, 288, 1152])
def test_shipped_configurations(m, routing, weights):
    x, ids, share = case(m, routing)
    got = run(x, *weights, 0, ids, share)
    assert error(got, weights, x, ids, share) < 1e-2


@pytest.mark.parametrize("scale", ["weight", "group", "bias"])
@pytest.mark.parametrize(
    "tiles", [(8,), (8, 16), (8, 16, 32), (16, 24, 40), (32, 96), (64,), (128,)]
)
def test_configurations(tiles, scale, few):
    config = ExpertConfig(tiles, stages=3, scale=scale)
    x, ids, share = case(200, experts=16)
    got = run(x, *few, 1, ids, share, config=config)
    assert error(got, few, x, ids, share, layer=1) < 1e-2


@pytest.mark.parametrize("warpgroups", [2, 4])
def test_warpgroups(warpgroups, few):
    x, ids, share = case(40, experts=16)
    config = ExpertConfig((8, 32), stages=4, warpgroups=warpgroups)
    assert error(run(x, *few, 0, ids, share, config=config), few, x, ids, share) < 1e-2


@pytest.mark.parametrize("config", [c for _, c in DENSE])
def test_dense_weights(config, few):
    dense = [
        jnp.stack([jnp.stack([expert_matrix(w, 1, e, jnp.bfloat16) for e in range(16)])])
        for w in few
    ]
    x, ids, share = case(60, experts=16)
    assert error(run(x, *dense, 0, ids, share, config=config), dense, x, ids, share) < 1e-2


@pytest.mark.parametrize(
    "ids",
    [
        np.full((70, 8), 3),
        np.full((5, 8), 16),
        np.where(np.arange(40).reshape(5, 8) == 17, 15, 16),
        np.repeat(np.arange(16), np.arange(16))[:, None],
    ],
)
def test_awkward_routings(ids, few):
    x, _, _ = case(len(ids))
    share = jnp.ones(ids.shape)
    got = run(x, *few, 0, jnp.asarray(ids), share)
    assert error(got, few, x, jnp.asarray(ids), share) < 1e-2
    assert (got[(ids == 16).all(axis=1)] == 0).all()


def test_shards_add_up(weights):
    x, ids, share = case(9)
    whole = run(x, *weights, 0, ids, share).astype(jnp.float32)
    for first in (0, 192):
        shard = [type(w)(w.words[:, first : first + 192], w.part) for w in weights]
        part = run(x, *shard, 0, ids, share, first)
        assert error(part, shard, x, ids, share, first=first) < 1e-2
        whole = whole - part.astype(jnp.float32)
    assert float(jnp.abs(whole).max()) < 0.05


@pytest.mark.parametrize("m", [1, 65, 288, 1152])
def test_same_input_same_bits(m, weights):
    given = case(m)
    first = run(given[0], *weights, 0, *given[1:])
    for _ in range(20):
        assert (run(given[0], *weights, 0, *given[1:]) == first).all()


def test_a_row_does_not_depend_on_its_batch(weights):
    """True with one tile size and without balance."""
    x, ids, share = case(65)
    config = ExpertConfig((8,), balance=False)
    whole = run(x, *weights, 0, ids, share, config=config)
    for some in (slice(0, 1), slice(3, 12), slice(30, 63)):
        got = run(x[some], *weights, 0, ids[some], share[some], config=config)
        assert (got == whole[some]).all()


def test_nan_stays_in_its_row(few):
    x, ids, share = case(9, experts=16)
    got = run(x, *few, 0, ids, share.at[4].set(jnp.nan))
    nan = jnp.isnan(got).all(axis=1)
    assert nan.tolist() == [i == 4 for i in range(9)] and not jnp.isnan(got[:4]).any()


@pytest.mark.parametrize("m", [9, 288])
def test_no_copy_of_the_stack(m, weights):
    x, ids, share = case(m)
    text = run.lower(x, *weights, 0, ids, share).compile().as_text()
    for w in weights:
        kind = f"s32[{','.join(map(str, w.words.shape))}]"
        lines = [line for line in text.splitlines() if kind in line]
        assert not any(" copy(" in line or "slice(" in line or "fusion(" in line for line in lines)


def test_small_batches_take_four_launches(weights):
    """With the layer a constant, as in the model; as an argument it costs a launch more."""
    x, ids, share = case(65)
    layer_0 = jax.jit(lambda x, w, *routing: expert_mlp_kernel(x, *w, 0, *routing))
    text = layer_0.lower(x, weights, ids, share).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    assert entry.count(" custom-call(") == 3 and entry.count(" fusion(") == 1


def test_nano_teacher_forced():
    """The model's logits through the kernel and through the dense path; bf16 near-ties aside."""
    folder = loading.BUNDLED / "kimi-nano"
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 2048, 96))
    logits = []
    for records, mlp in ((True, expert_mlp), (False, expert_mlp_dense)):
        config, leaves = load_target(folder, "bfloat16", records)
        assert config.expert_records == records

        def forward(leaves, config=config, mlp=mlp):
            model = merge_kimi(config, leaves, "bfloat16")
            rows = model(
                tokens, jnp.arange(96), jnp.ones(96, bool), expanded_attention, expert_mlp=mlp
            )
            return model.lm_head(rows.hidden).astype(jnp.float32)

        logits.append(np.asarray(jax.jit(forward)(leaves)))
    kernel, dense = logits
    top = np.sort(dense, axis=1)[:, -2:]
    near = top[:, 1] - top[:, 0] < 1.0  # of logits up to 21
    assert ((kernel.argmax(axis=1) == dense.argmax(axis=1)) | near).all()
    assert np.abs(kernel - dense).max() < 2.5
