"""How often devices meet in a step, and what each must hold: read off programs and shapes."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from published import DRAFTERS, K25
from tiny import DRAFTER, TARGET

import ddtree_jax as dd
from benchmarks.collectives import collectives, lowered_decode, table
from ddtree_jax.generate import Method
from ddtree_jax.parallel import AXIS
from ddtree_jax.read_config import read_drafter_config, read_target_config
from ddtree_jax.sharding import abstract_weights, leaf_layouts, make_plan, weight_bytes

PLANS = ("expert", *(pytest.param(p, marks=pytest.mark.slow) for p in ("tensor", "data")))
SMALL = replace(TARGET, num_attention_heads=8, n_routed_experts=16)


def found_in(plan, target, drafter, method, compiled, requests=8):
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    plan = make_plan(plan, mesh)
    method = Method(method, dd.Speculation(), abstract_weights(plan, target, drafter, "float32"))
    program = lowered_decode(plan, target, drafter, method, requests, 1, "float32")
    return collectives((program.compile() if compiled else program).as_text())


@pytest.mark.parametrize("plan", PLANS)
def test_collectives_of_a_layer(plan):
    """Compiled: at most two for each layer of the target; none moves a weight."""
    deeper = replace(SMALL, num_hidden_layers=4)
    few = found_in(plan, SMALL, DRAFTER, "ddtree", True)
    more = found_in(plan, deeper, replace(DRAFTER, num_target_layers=4), "ddtree", True)
    assert len(more) - len(few) <= 2 * (4 - SMALL.num_hidden_layers)
    layouts = leaf_layouts(make_plan(plan, AbstractMesh((8,), (AXIS,))), SMALL, "float32")
    weights = {leaf.shape for _, leaf in layouts.values() if len(leaf.shape) > 1}
    assert not {shape for c in few for _, shape in c.arrays} & weights
    # Beyond the layers: an embedding, and the exchange and verdict of a decision, each twice.
    layers = 2 * (SMALL.num_hidden_layers + DRAFTER.num_hidden_layers)
    assert len(few) <= (layers + 2 + 5 if plan != "data" else 2 * SMALL.num_moe_layers + 3)


def test_one_device_says_nothing():
    method = Method("ddtree", dd.Speculation(), abstract_weights(make_plan("expert", None), SMALL,
                                                                DRAFTER, "float32"))  # fmt: skip
    program = lowered_decode(make_plan("expert", None), SMALL, DRAFTER, method, 3, 1, "float32")
    assert not collectives(program.as_text()) and "shard" not in program.as_text()


@pytest.mark.slow
def test_kimi_k26_on_eight_devices():
    """The whole step lowers: two collectives a layer, over rows and never over weights."""
    target = read_target_config(K25)
    drafter = read_drafter_config(next(iter(DRAFTERS.values())))
    found = table(found_in("expert", target, drafter, "ddtree", False))
    rows = ("f32", (72, 7168))
    assert found["all-reduce", (rows,)] == 2 * 61 + 1
    assert sum(n for (op, _), n in found.items() if op != "all-reduce") == 5
    assert found["all-reduce", (("f32", (8, 8, 7168)),)] == 2 * 6 + 1


@pytest.mark.parametrize("plan,most", [("expert", 78e9), ("tensor", 78e9), ("data", 103e9)])
def test_kimi_k26_fits(plan, most):
    drafter = read_drafter_config(next(iter(DRAFTERS.values())))
    for records in (False, True):
        target = replace(read_target_config(K25), expert_records=records)
        placed = make_plan(plan, AbstractMesh((8,), (AXIS,)))
        sizes = [weight_bytes(placed, config, "bfloat16") for config in (target, drafter)]
        assert sum(sum(s.values()) for s in sizes) <= most


@pytest.mark.parametrize(
    "plan,count,gigabytes",
    [("expert", 1, 601.2), ("expert", 8, 77.6), ("tensor", 8, 77.6), ("data", 8, 101.7),
     ("expert", 16, 40.3), ("tensor", 16, 40.3), ("data", 16, 66.1)],
)  # fmt: skip
def test_the_page_says_what_the_shapes_say(plan, count, gigabytes):
    """docs/distributed.md, "Kimi K2.6 on a device"."""
    target = read_target_config(K25)
    drafter = read_drafter_config(next(iter(DRAFTERS.values())))
    placed = make_plan(plan, AbstractMesh((count,), (AXIS,)))
    sizes = [weight_bytes(placed, config, "bfloat16") for config in (target, drafter)]
    assert round(sum(sum(s.values()) for s in sizes) / 1e9, 1) == gigabytes
    page = (Path(__file__).parent.parent / "docs" / "distributed.md").read_text()
    assert f"{gigabytes} GB" in page
