"""The grouped matmul in the interpreter, with race detection, against the float32 reference."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from pallas.experts import (
    HIDDEN,
    LAYERS,
    WIDTH,
    counted,
    published,
    records,
    routings,
    rows,
    shares,
)

from ddtree_jax.pallas.expert_config import ExpertConfig
from ddtree_jax.pallas.expert_matmul import check_routing, expert_mlp_kernel, expert_mlp_reference
from ddtree_jax.pallas.expert_weights import Int4, expert_matrix, records_shape

SMALL = ExpertConfig((8,), stages=2, ctas=2, balance=False)


@pytest.fixture
def interpret(capsys):
    """Parameters of the interpreter; no race may be reported by the end of the test."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def weights():
    return records(*published(np.random.default_rng(0)))


run = jax.jit(expert_mlp_kernel, static_argnames=("config", "interpret"))


def agree(weights, ids, interpret, config=SMALL, first=0, x=None, layer=1):
    """Run the kernel; what it gives must be the reference's up to bf16 rounding of h and y."""
    rng = np.random.default_rng(1)
    x = rows(rng, len(ids)) if x is None else x
    ids, share = jnp.asarray(ids, jnp.int32), jnp.asarray(shares(rng, ids))
    got = run(x, *weights, layer, ids, share, first, config=config, interpret=interpret)
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    got = np.asarray(got.astype(jnp.float32))
    wide = [w.astype(jnp.float32) if isinstance(w, jax.Array) else w for w in weights]
    expected = expert_mlp_reference(x.astype(jnp.float32), *wide, layer, ids, share, first)
    np.testing.assert_allclose(got, expected, atol=0.012 * max(np.abs(expected).max(), 1e-6))
    return got


@pytest.mark.parametrize("name", routings())
def test_routings(name, weights, interpret):
    agree(weights, routings()[name], interpret)


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["weight", "group"])
def test_where_scales_are_applied(scale, weights, interpret):
    agree(
        weights,
        counted(1, 9),
        interpret,
        ExpertConfig((8,), stages=3, scale=scale, ctas=1, balance=False),
    )


@pytest.mark.slow
def test_tiles_of_several_sizes(weights, interpret):
    config = ExpertConfig((8, 16), stages=2, ctas=2, balance=False)
    agree(weights, counted(3, 0, 13, 18), interpret, config)


@pytest.mark.parametrize("ctas", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_items_shared_out_by_steps(ctas):
    """Two items of four steps over three blocks: both are finished with parts of the next.

    Races between blocks are beyond the interpreter, which knows no order of blocks; all other tests
    run without balance for that reason, and test_expert_schedule.py has who waits for whom.
    """
    interpret = plgpu.InterpretGPUParams()
    wide = records(*published(np.random.default_rng(4), hidden=512))
    x = rows(np.random.default_rng(0), 2, hidden=512)
    config = ExpertConfig((8,), stages=2, ctas=ctas)
    agree(wide, np.array([[4, 1], [4, 1]]), interpret, config, x=x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        ExpertConfig((8, 16, 32), stages=2, ctas=3, balance=False),
        ExpertConfig((8, 16), stages=3, warpgroups=2, ctas=2, balance=False),
        ExpertConfig((16,), stages=2, ctas=5, scale="group", balance=False),
        ExpertConfig((32, 96), stages=2, ctas=2, balance=False),
        ExpertConfig((16, 24, 40), stages=2, ctas=2, balance=False),
    ],
)
def test_other_configurations(config, weights, interpret):
    agree(weights, counted(1, 0, 40, 9, 100, 6), interpret, config)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [(8,), (8, 32)])
def test_dense_weights(tiles, interpret):
    dense = [
        jnp.stack([jnp.stack([expert_matrix(w, l, e, jnp.bfloat16) for e in range(3)])
                   for l in range(LAYERS)])
        for w in published(np.random.default_rng(2), experts=3)
    ]  # fmt: skip
    agree(dense, counted(1, 9, 2), interpret, ExpertConfig(tiles, stages=2, ctas=1, balance=False))


def test_shards_at_both_ends(weights, interpret):
    stored = published(np.random.default_rng(0))
    ids, parts, count = routings()["uniform"], 0, 3
    whole = agree(weights, ids, interpret)
    for first in (0, 3):
        shard = [Int4(*(a[:, first : first + count] for a in w)) for w in stored]
        parts = parts + agree(records(*shard), ids, interpret, first=first)
    np.testing.assert_allclose(parts, whole, atol=0.02 * np.abs(whole).max())


@pytest.mark.slow
def test_width_slices(interpret):
    gate, up, down = published(np.random.default_rng(3), width=2 * WIDTH)
    ids, total = routings()["uniform"], 0
    whole = agree(records(gate, up, down), ids, interpret)
    for i in range(2):
        out = slice(i * WIDTH, (i + 1) * WIDTH)
        inner = (slice(i * n, (i + 1) * n) for n in (WIDTH // 8, WIDTH // 32))
        cut = [Int4(*(a[:, :, out] for a in w)) for w in (gate, up)]
        cut.append(Int4(*(a[..., s] for a, s in zip(down, inner, strict=True))))
        total = total + agree(records(*cut), ids, interpret)
    np.testing.assert_allclose(total, whole, atol=0.02 * np.abs(whole).max())


def test_reads_only_touched_experts_of_the_layer(weights, interpret):
    nan = jnp.asarray(np.float32("nan"), jnp.bfloat16)
    stored = published(np.random.default_rng(0))
    poisoned = [
        Int4(w.words, w.scales.at[0].set(nan).at[:, np.array([0, 2, 5])].set(nan)) for w in stored
    ]
    got = agree(records(*poisoned), np.array([[1, 3]] * 6 + [[4, 1]] * 5), interpret)
    assert np.isfinite(got).all()


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_batch(weights, interpret):
    x, ids = rows(np.random.default_rng(7), 11), routings()["uniform"]
    whole = agree(weights, ids, interpret, x=x)
    share = shares(np.random.default_rng(1), ids)
    some = slice(7, 10)  # three rows: the program of the test below
    alone = run(
        x[some], *weights, 1, jnp.asarray(ids[some]), jnp.asarray(share[some]),
        config=SMALL, interpret=interpret,
    )  # fmt: skip
    assert (np.asarray(alone.astype(jnp.float32)) == whole[some]).all()


def test_nan_share_makes_its_row_nan_and_no_other(weights, interpret):
    x = rows(np.random.default_rng(8), 3)
    ids, share = jnp.asarray([[1, 3], [1, 2], [3, 2]]), jnp.ones((3, 2)).at[1].set(jnp.nan)
    got = run(x, *weights, 0, ids, share, config=SMALL, interpret=interpret)
    nan = np.isnan(np.asarray(got.astype(jnp.float32))).all(axis=1)
    assert nan.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tiles", ()), ("tiles", (16, 8)), ("tiles", (12,)), ("tiles", (512,)), ("stages", 1),
        ("stages", 13), ("scale", "row"), ("warpgroups", 3), ("ctas", 0),
    ],
)  # fmt: skip
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=field):
        ExpertConfig(**{field: value})


def test_refuses_before_tracing(weights):
    stored = published(np.random.default_rng(0), experts=1)
    x, ids, share = rows(np.random.default_rng(0), 2), jnp.zeros((2, 1), int), jnp.ones((2, 1))
    gate, up, down = weights
    cases = [
        (x.astype(jnp.float32), weights, "float32"),
        (x, stored, "records"),
        (x, (gate, down, up), "order"),
        (x, (gate, up, records(*published(np.random.default_rng(0), width=256))[2]), "do not fit"),
        (x[:, :128], weights, "do not fit"),
        (x, [jnp.zeros((1, 1, 96, HIDDEN), jnp.bfloat16)] * 2
            + [jnp.zeros((1, 1, HIDDEN, 96), jnp.bfloat16)], "multiples"),
        (x[:1], weights, "must agree"),
    ]  # fmt: skip
    for rows_, given, said in cases:
        with pytest.raises(ValueError, match=said):
            expert_mlp_kernel(rows_, *given, 0, ids, share)
    with pytest.raises(ValueError, match="stages"):
        dense = [jnp.zeros((1, 1, *s), jnp.bfloat16) for s in ((128, 256), (128, 256), (256, 128))]
        expert_mlp_kernel(
            x, *dense, 0, ids, share, config=ExpertConfig((8,), stages=8, balance=False)
        )
    for sizes, said in (((100, 256), "outputs"), ((128, 96), "inputs")):
        with pytest.raises(ValueError, match=said):
            records_shape("gate", *sizes)


def test_checked_routing():
    check = checkify.checkify(lambda ids, share: check_routing(ids, share, 6))
    good = jnp.asarray([[0, 5], [6, 6]])
    assert check(good, jnp.ones((2, 2)))[0].get() is None
    assert "from -1 to 5" in check(good.at[1].set(-1), jnp.ones((2, 2)))[0].get()
    assert "from 0 to 7" in check(good.at[1, 1].set(7), jnp.ones((2, 2)))[0].get()
    assert "NaN" in check(good, jnp.ones((2, 2)).at[0, 0].set(jnp.nan))[0].get()
    check_routing(good, jnp.ones((2, 2)), 6)
    with pytest.raises(Exception, match="router ids"):
        check_routing(good - 1, jnp.ones((2, 2)), 6)
