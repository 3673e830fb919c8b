"""The slices of Kimi K2.6, their memory and limits, and a step of small ones."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published import DRAFTERS, PUBLISHED
from tiny import DRAFTER, TARGET

from benchmarks import slices, step
from benchmarks.slices import Part, Slice, slice_of
from ddtree_jax.read_config import read_drafter_config, read_target_config
from ddtree_jax.step import autoregressive_step

NAMES = ("k1", "k12", "k61-tp8", "k61-ep8", "k30-ep4")


def small(**changes):
    """A target whose experts fit the kernel's records."""
    sizes = dict(hidden_size=256, moe_intermediate_size=128, n_routed_experts=8)
    return replace(TARGET, **sizes, expert_bits=4, expert_records=True, **changes)


SMALL = small()
SMALL_DRAFTER = replace(DRAFTER, hidden_size=256)


def test_configs_are_the_published_ones():
    target = read_target_config(PUBLISHED["Kimi-K2.6"])
    assert replace(target, expert_records=True, eos_token_ids=()) == slices.KIMI
    assert read_drafter_config(DRAFTERS["Kimi-K2.6-DFlash"]) == slices.DRAFTER
    for name in NAMES:
        part = slice_of(name)
        assert part.drafter is None or part.drafter.check_target(part.target) is None


def test_bytes_of_the_slices():
    """Experts of 24.77 MB each, and a device's share of the 571 GB of them."""
    expert = 3 * 2048 * 7168 * 0.5625
    assert expert == pytest.approx(24.77e6, rel=1e-3)
    experts = {
        "k1": 384,
        "k12": 11 * 384,
        "k61-tp8": 60 * 48,
        "k61-ep8": 60 * 48,
        "k30-ep4": 29 * 96,
    }
    for name, count in experts.items():
        found = slices.foreseen(slice_of(name), 1, 8192, 64)
        assert found["experts"] == count * expert
        assert sum(found.values()) < 139 * 2**30 * 15 / 16
    cache = slices.foreseen(slice_of("k61-tp8"), 2, 8192, 64)["cache"]
    latents = 2 * (8192 + 128) * 61 * 576 * 2
    assert cache == latents + 2 * (8192 + 128) * 6 * 2 * 128 * 2


@pytest.mark.parametrize("plan", (slices.ALONE, Part(devices=2)))
def test_what_is_foreseen_is_allocated(plan):
    part = Slice(SMALL, SMALL_DRAFTER, plan)
    weights, state = slices.make_weights(part), slices.make_state(part, 2, 100, 64)
    found = slices.foreseen(part, 2, 100, 64)
    leaves = jax.tree.leaves((weights.target, weights.drafter))
    assert found.pop("cache") == sum(x.nbytes for x in jax.tree.leaves(state.cache))
    assert sum(found.values()) == sum(x.nbytes for x in leaves)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in leaves if x.dtype != jnp.int32)


def test_too_much_is_refused_with_what_would_fit():
    part = Slice(SMALL, SMALL_DRAFTER)
    three = sum(slices.foreseen(part, 3, 100, 64).values())
    slices.check_memory(part, 3, 100, 64, three * 16 // 15 + 16)
    with pytest.raises(
        ValueError, match=r"requests=8, context=100: experts .* requests=3 would fit"
    ):
        slices.check_memory(part, 8, 100, 64, three * 16 // 15 + 16)
    with pytest.raises(ValueError, match="slice 'k2': must be one of k1, k12"):
        slice_of("k2")


def test_a_part_alone_is_the_whole():
    """One device's part gives what a model without a plan gives."""
    states = []
    for plan in (slices.ALONE, Part(devices=1)):
        part = Slice(SMALL, None, plan)
        state = slices.make_state(part, 3, 70, 8)
        weights = slices.make_weights(part)
        for _ in range(3):
            state = autoregressive_step(weights, state)
        states.append(np.asarray(state.tokens))
    np.testing.assert_array_equal(*states)


def test_a_part_sees_the_rows_of_all():
    """Its own come first; the others' differ, and their sums are left out."""
    part = Part(devices=4)
    x = jnp.arange(24.0).reshape(3, 8)
    rows = part.all_rows(x)
    assert rows.shape == (12, 8) and (rows[:3] == x).all() and (rows[3, 2:] == x[0, :6]).all()
    assert len({tuple(row) for row in rows.tolist()}) == 12
    assert part.all_rows(jnp.array([True, False])).tolist() == [True, False] * 4
    assert (part.own_rows(rows) == x).all() and part.splits("experts")
    assert not any(part.splits(name) for name in ("heads", "requests", "vocab", "width"))
    assert (part.sum_experts(rows, x) == 2 * x).all() and (part.sum_experts(rows, None) == x).all()


def test_limits():
    """Those the issue of the whole step names for an eighth of the model at 8k."""
    tensor, expert = slice_of("k61-tp8"), slice_of("k61-ep8")
    assert step.limit_ms(tensor, 1, 8192, 1) == pytest.approx(1.5, abs=0.1)
    verify = step.stages(tensor, 1, 8192, 9)
    drafter = verify.pop("drafter").ms
    assert sum(work.ms for work in verify.values()) == pytest.approx(3.9, abs=0.1)
    assert step.limit_ms(tensor, 1, 8192, 9) - drafter == pytest.approx(3.9, abs=0.1)
    found = step.stages(expert, 4, 8192, 9)  # 32 requests on eight devices
    assert found["experts"].bytes == pytest.approx(60 * 48 * 24.77e6, rel=0.01)  # nearly all
    assert found["attention"].ms == pytest.approx(61 * 0.052, rel=0.02)
    assert step.distinct(384, 8, 9) == pytest.approx(66, abs=0.5)
    assert "drafter" not in step.stages(tensor, 1, 8192, 1)


@pytest.mark.slow
def test_step_script(monkeypatch, tmp_path, capsys):
    parts = {
        "whole": Slice(SMALL, SMALL_DRAFTER),
        "part": Slice(SMALL, SMALL_DRAFTER, Part(devices=2)),
    }
    monkeypatch.setattr(step, "slice_of", parts.__getitem__)
    output = tmp_path / "step.json"
    step.main(
        ["--slice", "whole", "part", "--requests", "2", "--context", "70", "--widths", "1", "3",
         "--passes", "2", "--repeats", "2", "--output", str(output)]
    )  # fmt: skip
    points = json.loads(output.read_text())["points"]
    assert [(p["source"], p["width"], p["requests"]) for p in points] == [
        ("whole", 1, 2), ("whole", 3, 2), ("part", 1, 2), ("part", 3, 2)
    ]  # fmt: skip
    for p in points:
        assert p["share"] == p["limit_ms"] / p["step_ms"] and p["accept_length"] >= 1
        assert p["accept_length"] == 1 or p["width"] > 1
        assert sum(p["stages_ms"].values()) == pytest.approx(p["limit_ms"])
    for options, error in (
        (["--slice", "part", "--requests", "3"], "requests=3: must be a multiple of the slice's 2"),
        (["--slice", "whole", "--widths", "0"], "invalid count value: '0'"),
    ):
        with pytest.raises(SystemExit):
            step.main(options)
        assert error in capsys.readouterr().err
