"""How often devices meet in a step, and what each must hold: read off programs and shapes."""

from collections import Counter
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
from ddtree_jax.sharding import abstract_weights, make_plan, weight_bytes

PLANS = ("expert", *(pytest.param(p, marks=pytest.mark.slow) for p in ("tensor", "data")))
SMALL = replace(TARGET, num_attention_heads=8, n_routed_experts=16, num_hidden_layers=4)
OVER = replace(DRAFTER, num_target_layers=4)


def F32(*shape):
    return (("f32", shape),)


def found_in(plan, target, drafter, method, compiled, requests=8, acceptance="coupled"):
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    plan = make_plan(plan, mesh)
    speculation = dd.Speculation(acceptance=acceptance)
    method = Method(method, speculation, abstract_weights(plan, target, drafter, "float32"))
    program = lowered_decode(plan, target, drafter, method, requests, 1, "float32")
    return collectives((program.compile() if compiled else program).as_text())


# What devices say in a step of eight requests, nine rows each, all at the size of rows: the dense
# and the MoE layer of the target, and the others of the drafter and of decisions.
MOE = {
    "expert": {("all-reduce", F32(72, 32)): 2},  # after attention, after the experts
    "tensor": {("all-reduce", F32(72, 32)): 2},
    "data": {("all-gather", F32(72, 32)): 1, ("reduce-scatter", F32(9, 32)): 1},
}
REST = {
    ("all-reduce", F32(72, 32)): 2 + 1,  # the dense layer, the embedding
    ("all-reduce", F32(8, 8, 32)): 2 * 2 + 1,  # the drafter's layers, its embedding
    ("all-to-all", F32(7, 2) * 8): 1,  # logits of seven drafted places, and of nine rows, each:
    ("all-to-all", F32(9, 2) * 8): 1,  # two of the padded vocabulary's columns from every device
    ("all-gather", F32(56, 1, 4)): 1,  # the drafts' four best, and their tokens
    ("all-gather", (("s32", (56, 1, 4)),)): 1,
    ("all-gather", (("s32", (72, 1)),)): 1,  # the rows' tokens
}
OWN = {  # requests decide for themselves
    ("all-reduce", (("s32", ()),)): 2,  # does any request run: before the loop and in it
    ("all-gather", (("pred", (72,)),)): 1,  # which rows are valid
}


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("plan", PLANS)
def test_collectives_of_a_layer(plan):
    """Compiled: these and no others, so none of weights, of any shape."""
    layers = {said: SMALL.num_moe_layers * count for said, count in MOE[plan].items()}
    wanted = Counter(OWN if plan == "data" else REST) + Counter(layers)
    assert table(found_in(plan, SMALL, OVER, "ddtree", True)) == wanted


@pytest.mark.parametrize(
    "method,acceptance,traded,told",
    [
        ("autoregressive", "coupled", 1, 1),
        ("ddtree", "rejection", 2, 5),
        pytest.param("dflash", "coupled", 2, 3, marks=pytest.mark.slow),
        pytest.param("dflash", "rejection", 2, 5, marks=pytest.mark.slow),
    ],
)
def test_decisions_of_other_methods(method, acceptance, traded, told):
    """docs/distributed.md gives these numbers; and an all-reduce for each embedding."""
    found = Counter()
    for (op, _), count in table(
        found_in("expert", SMALL, OVER, method, False, acceptance=acceptance)
    ).items():
        found[op] += count
    layers, embeddings = SMALL.num_hidden_layers, 1
    if method != "autoregressive":
        layers, embeddings = layers + OVER.num_hidden_layers, 2
    sums = 2 * layers + embeddings
    assert found == {"all-reduce": sums, "all-to-all": traded, "all-gather": told}


def test_one_device_says_nothing():
    plan = make_plan("expert", None)
    weights = abstract_weights(plan, SMALL, OVER, "float32")
    method = Method("ddtree", dd.Speculation(), weights)
    program = lowered_decode(plan, SMALL, OVER, method, 3, 1, "float32")
    assert not collectives(program.as_text()) and "shard" not in program.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("plan", ("expert", "tensor", "data"))
def test_kimi_k26_on_eight_devices(plan):
    """The whole step lowers: two collectives a layer, over rows and never over weights."""
    target = read_target_config(K25)
    drafter = read_drafter_config(next(iter(DRAFTERS.values())))
    found = table(found_in(plan, target, drafter, "ddtree", False))
    if plan == "data":
        layers = {("all-gather", F32(72, 7168)): 60, ("reduce-scatter", F32(9, 7168)): 60}
        assert found == Counter(OWN) + Counter(layers)
        return
    assert found["all-reduce", F32(72, 7168)] == 2 * 61 + 1
    assert found["all-reduce", F32(8, 8, 7168)] == 2 * 6 + 1
    rest = {said: n for said, n in found.items() if said[0] != "all-reduce"}
    whole = {("all-to-all", F32(u, target.vocab_size)): 1 for u in (7, 9)}  # lowered: whole rows
    assert rest == {said: n for said, n in REST.items() if said[0] == "all-gather"} | whole


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
