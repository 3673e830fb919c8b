"""The benchmark of many devices on a tiny model: what it counts is what the layers need."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from lossless import prompts_of
from tiny import TARGET, tiny_model

from benchmarks import parallel
from benchmarks.collectives import Collective, collectives, in_step
from ddtree_jax.parallel import AXIS
from ddtree_jax.sharding import make_plan, place_weights

FIELDS = {
    "source", "plan", "devices", "requests", "method", "budget", "top_k", "width", "collectives",
    "collectives_per_step", "collective_bytes", "sent_bytes", "weight_bytes", "held_bytes",
    "new_tokens", "passes", "step_ms", "one_device_step_ms", "spread", "repeats", "differ", "dtype",
}  # fmt: skip


@pytest.fixture
def tiny_script(monkeypatch, tmp_path):
    def load(path, dtype, mesh=None, plan="expert"):
        model = tiny_model()
        if mesh is None:
            return model
        return replace(model, weights=place_weights(model.weights, make_plan(plan, mesh)))

    monkeypatch.setattr(parallel, "load_model", load)
    monkeypatch.setattr(parallel.held_out, "load", lambda mix, count: prompts_of((5, 63))[:count])

    def run(*options):
        path = tmp_path / "parallel.json"
        parallel.main(["--new-tokens", "8", "--repeats", "1", "--output", str(path), *options])
        return json.loads(path.read_text())

    return run


@pytest.mark.slow
def test_script(tiny_script):
    result = tiny_script("--plans", "expert", "--widths", "1", "--methods", "ddtree",
                         "--requests", "1")  # fmt: skip
    points, summary = result["points"], result["summary"]
    assert [p["plan"] for p in points] == [None, "expert"]
    assert all(set(p) == FIELDS and p["differ"] == 0 and p["passes"] == 7 for p in points)
    alone, expert = points
    assert not alone["collectives"] and alone["sent_bytes"] == 0
    # Two a layer, an embedding, and the exchange and verdict of a decision.
    layers = TARGET.num_hidden_layers
    assert expert["collectives_per_step"] == 2 * layers + 1 + 2
    sums = next(c for c in expert["collectives"] if c["kind"] == "all-reduce")
    rows = TARGET.hidden_size * 4
    assert sums["count"] == 2 * layers + 1 and sums["bytes"] == sums["count"] * rows
    for point in points:
        assert point["held_bytes"] == [point["weight_bytes"]] * point["devices"]
        assert point["one_device_step_ms"] == alone["step_ms"] > 0
    assert summary["expert_ar_c1_collectives_per_step"] == expert["collectives_per_step"]
    assert summary["expert_weight_bytes"] < summary["one_weight_bytes"] == alone["weight_bytes"]
    assert (summary["requests_run"], summary["requests_differ"]) == (2, 0)
    assert any("CPU" in note for note in result["notes"])


def test_programs_of_a_gpu_are_read():
    """Asynchronous collectives hold their operands before their results; only the loop counts."""
    text = """
%body.1 (arg: (f32[9,4])) -> (f32[9,4]) {
  %r = f32[9,4]{1,0} all-reduce-start(%x), to_apply=%add
  %g = (s32[4]{0}, s32[8]{0}) all-gather-start(%y), dimensions={0}
  %t = ((f32[8,3]{1,0}), f32[4,6]{1,0}) all-to-all-start(%z), dimensions={0}
  %q = ((f32[9,4], f32[8,4], s64[2], s64[2], s64[2], s64[2]), f32[8,4]) ragged-all-to-all-start(%x)
  %b = (f32[5], f32[5]) collective-broadcast-start(%x), replica_groups={{0,1}}
  %d = f32[9,4]{1,0} all-reduce-done(%r)
  ROOT %c = (f32[9,4]) call(%d), to_apply=%command_buffer
}

%command_buffer (p: f32[9,4]) -> f32[2,4] {
  ROOT %s = f32[2,4]{1,0} reduce-scatter(%p), dimensions={0}
}

ENTRY %main.2 (a: f32[9,4]) -> f32[9,4] {
  %flag = s32[] all-reduce(%a), to_apply=%max
  ROOT %w = (f32[9,4]) while(%a), condition=%more, body=%body.1
}
"""
    found = collectives(in_step(text))
    assert {c.op: c.arrays for c in found} == {
        "all-reduce": (("f32", (9, 4)),),
        "all-gather": (("s32", (8,)),),
        "all-to-all": (("f32", (4, 6)),),
        "ragged-all-to-all": (("f32", (8, 4)),),
        "collective-broadcast": (("f32", (5,)),),
        "reduce-scatter": (("f32", (2, 4)),),
    }
    sent = {c.op: c.sent(2) for c in found}
    assert sent == {
        "all-reduce": 144, "all-gather": 16, "all-to-all": 48, "ragged-all-to-all": 64,
        "collective-broadcast": 10, "reduce-scatter": 32,
    }  # fmt: skip


def test_lowered_exchanges_of_rows_are_read():
    """An exchange by sizes that only the program knows is a custom call there."""
    mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,))

    def run(x, to, *sizes):
        return jax.lax.ragged_all_to_all(x, to, *sizes, axis_name=AXIS)

    own = PartitionSpec(AXIS)
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=own, out_specs=own, check_vma=False))
    sizes = np.zeros(4, np.int32)
    text = run.lower(np.zeros((8, 3), "f4"), np.zeros((10, 3), "f4"), *[sizes] * 4).as_text()
    assert collectives(text) == [Collective("ragged-all-to-all", (("f32", (5, 3)),))]


def test_memory_that_tells_is_believed():
    """On a GPU: what each device's memory grew by, padding and all."""

    def device(used):
        return SimpleNamespace(memory_stats=lambda: {"bytes_in_use": used})

    assert parallel.held(tiny_model(), [device(70), device(96)], [6, 0]) == [64, 96]


def test_options_that_cannot_be_honoured(capsys):
    for option in (["--widths", "0"], ["--requests", "-1"], ["--plans", "pipeline"]):
        with pytest.raises(SystemExit):
            parallel.main(option)
    assert "invalid count value: '0'" in capsys.readouterr().err
