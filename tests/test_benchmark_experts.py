"""The expert benchmark's own arithmetic, on a CPU: the kernel's place is taken by the reference."""

import json
import sys

import numpy as np
import pytest

from benchmarks import ceilings, expert_matmul, results_file
from ddtree_jax.pallas.expert_matmul import expert_mlp_reference

NAMES = [f"share_m{m}" for m in (1, 9, 17, 33, 65, 288, 1152)]
NAMES += ["share_w256_m1", "share_w256_m9", "skew_ratio_min", "prefill_8192"]


@pytest.fixture
def small(monkeypatch):
    def reference(x, gate, up, down, layer, ids, weights, *, config):
        return expert_mlp_reference(x, gate, up, down, layer, ids, weights)

    for name, value in {"HIDDEN": 256, "EXPERTS": 12, "CHECKED": 4}.items():
        monkeypatch.setattr(expert_matmul, name, value)
    monkeypatch.setattr(expert_matmul, "expert_mlp_kernel", reference)
    measured = {"read_tb_s": 4.5, "matmul_tflops": 785.0}
    monkeypatch.setattr(ceilings, "measure", lambda: measured)


def test_points_and_summary(small, monkeypatch, tmp_path):
    widths, draw = [], expert_matmul.draw_records

    def narrow(seed, experts, width, hidden):
        widths.append(width)
        return draw(seed, experts, 128, hidden)

    def quick(case, *rest):  # one case is measured and stands for all
        if not measured:
            measured.update(measure(case, *rest))
        named = {"expert_width": case.expert_width, "routing": case.routing}
        return measured | {"rows": case.rows} | named

    measure, measured = expert_matmul.measure, {}
    monkeypatch.setattr(expert_matmul, "draw_records", narrow)
    monkeypatch.setattr(expert_matmul, "measure", quick)
    output = tmp_path / "expert_matmul.json"
    monkeypatch.setattr(sys, "argv", ["x", "--samples", "1", "--output", str(output)])
    expert_matmul.main()
    found = json.loads(output.read_text())
    assert set(found["summary"]) == set(NAMES) and widths == [2048, 256]
    assert found["machine"]["ceilings_after"]["matmul_tflops"] == 785
    wanted = {"rows", "distinct_experts", "expert_width", "routing", "us", "max_rel_error"}
    assert all(wanted <= set(p) and p["max_rel_error"] < 2e-2 for p in found["points"])
    assert {p["routing"] for p in found["points"]} == {"uniform", "skewed"}


def test_limits():
    assert expert_matmul.expert_bytes(2048) == pytest.approx(24.77e6, rel=1e-3)
    rng = np.random.default_rng(0)

    def distinct(routing):
        drawn = [expert_matmul.draw_routing(rng, 33, routing) for _ in range(20)]
        return np.mean([len(np.unique(ids)) for ids in drawn])

    assert distinct("uniform") == pytest.approx(192, abs=4)
    assert distinct("skewed") == pytest.approx(157, abs=6)
    ids = expert_matmul.draw_routing(rng, 50, "skewed")
    assert all(len(set(row)) == 8 for row in ids) and ids.max() < 384


def test_write_keeps_old_callers(tmp_path):
    results_file.write(tmp_path / "a.json", {}, [], [])
    assert "ceilings_before" not in json.loads((tmp_path / "a.json").read_text())["machine"]
