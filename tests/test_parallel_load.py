"""Loading straight onto devices, and decoding text with a mesh: API and command line."""

import json
from collections import Counter

import jax
import numpy as np
import pytest
from checkpoint import write_checkpoint
from jax.sharding import AbstractMesh, Mesh
from refusal import refused

import ddtree_jax as dd
from ddtree_jax import cli, loading, processes
from ddtree_jax.checkpoint import load_target
from ddtree_jax.cli import main
from ddtree_jax.loading import BUNDLED
from ddtree_jax.sharding import make_mesh, make_plan, place_weights, placed_leaves, weight_bytes
from ddtree_jax.shards import Shards

PROMPT = "def fibonacci(n):\n"


def mesh_of(count):
    return Mesh(np.array(jax.devices()[:count]), ("anything",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("plan,count", [("expert", 2), ("data", 4), ("data", 1)])
def test_leaves_are_those_of_one_device(folder, plan, count):
    """INT4 as published, with padded experts: 6 on 4 devices."""
    alone, many = dd.load(folder), dd.load(folder, mesh=mesh_of(count), plan=plan)
    compare(place_weights(alone.weights, make_plan(plan, mesh_of(count))), many.weights)


@pytest.mark.slow
def test_groups_that_do_not_divide(tmp_path):
    """Three groups of 32 on two devices: the second has one, and one of zeros."""
    folder, plan = write_checkpoint(tmp_path, moe_intermediate_size=96), "tensor"
    alone, many = dd.load(folder), dd.load(folder, mesh=mesh_of(2), plan=plan)
    compare(place_weights(alone.weights, make_plan(plan, mesh_of(2))), many.weights)
    wanted, found = (dd.generate(m, ["the thing", "x"], max_new_tokens=12) for m in (alone, many))
    assert [w.tokens for w in wanted] == [f.tokens for f in found]


def test_width_is_split_by_groups():
    plan = make_plan("tensor", mesh_of(4))
    alone = dd.load("kimi-nano")
    compare(place_weights(alone.weights, plan), dd.load(mesh=mesh_of(4), plan="tensor").weights)


def compare(wanted, found):
    assert wanted.plan == found.plan
    leaves = [jax.tree.leaves((w.target, w.drafter)) for w in (wanted, found)]
    for a, b in zip(*leaves, strict=True):
        assert a.sharding == b.sharding and a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("plan,count", [("expert", 8), ("tensor", 2)])
def test_records_are_packed_where_they_stay(plan, count):
    """Five places of 40 hold no expert; or each device packs a half of every expert."""
    plan = make_plan(plan, mesh_of(count))
    nano = BUNDLED / "kimi-nano"
    config, alone = load_target(nano, "bfloat16", True)
    weights = dd.Weights(alone, None, config, None, "bfloat16")
    found, many = load_target(
        nano, "bfloat16", True, lambda config: placed_leaves(plan, config, "bfloat16")
    )
    assert found == config and config.expert_records
    compare(place_weights(weights, plan), dd.Weights(many, None, config, None, "bfloat16", plan))


@pytest.fixture
def read_by_first(monkeypatch):
    """Loads as the host of the mesh's first device does: bytes read of every tensor."""
    read, original = Counter(), Shards.read

    def counted(shards, key, *part):
        tensor = original(shards, key, *part)
        read[key] += tensor.nbytes
        return tensor

    def first_alone(sharding, shape):
        first = sharding.mesh.devices.flat[0]
        return {first: sharding.devices_indices_map(shape)[first]}

    def load(*where, **how):
        read.clear()
        sharding = jax.sharding.NamedSharding
        with monkeypatch.context() as patch:
            patch.setattr(Shards, "read", counted)
            patch.setattr(sharding, "addressable_devices_indices_map", first_alone)
            patch.setattr(jax, "make_array_from_single_device_arrays", lambda *a: a[2][0])
            return dd.load(*where, **how), read

    return load


def test_a_device_reads_only_its_experts(folder, read_by_first):
    """What the first of two devices holds takes no tensor of the second one's experts."""
    _, read = read_by_first(folder, mesh=mesh_of(2))
    experts = {int(k.split("experts.")[1].split(".")[0]) for k in read
               if ".experts." in k and not k.endswith("weight_shape")}  # fmt: skip
    assert experts == {0, 1, 2}


@pytest.mark.parametrize("plan", ("expert", "tensor", "data"))
def test_a_device_reads_only_its_bytes(read_by_first, plan):
    """All that it holds, once; only of `kv_b_proj` the keys between its values too, and back."""
    model, read = read_by_first("kimi-nano", mesh=mesh_of(2), plan=plan)
    config, placed = model.config, model.weights.plan
    kept = {key: size for key, size in read.items() if not key.endswith("weight_shape")}
    held = sum(
        sum(weight_bytes(placed, c, "bfloat16").values()) for c in (config, model.drafter_config)
    )
    heads = config.num_attention_heads // (2 if placed.splits("heads") else 1)
    head = (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank * 2
    between = config.num_hidden_layers * (heads - 1) * head
    assert sum(kept.values()) == held + between


def test_what_processes_compare(folder, monkeypatch):
    """All of both configs before weights, and all options of the command line but a few."""
    compared = []
    monkeypatch.setattr(loading, "check_agreement", lambda **values: compared.append(values))
    model = dd.load(folder, mesh=mesh_of(2))
    for config, values in zip((model.config, model.drafter_config), compared[:2], strict=True):
        fields = {f"{type(config).__name__}.{name}": v for name, v in vars(config).items()}
        assert values == fields | dict(drafter=True, plan="expert", dtype="float32", mesh=[0, 1])
    assert [*compared[2]] == ["tiktoken.model"]

    class Enough(Exception):
        pass

    def options_of(**values):
        compared.append(values)
        raise Enough

    for name, stub in (("start", lambda *_: None), ("check_agreement", options_of)):
        monkeypatch.setattr(processes, name, stub)
    monkeypatch.setattr(cli, "_keep_output_apart", lambda: None)
    with pytest.raises(Enough):
        main(["generate", PROMPT, "--distributed", "--devices", "2"])
    said = vars(cli._parser().parse_args(["generate", PROMPT, "--distributed", "--devices", "2"]))
    assert said.keys() - compared[-1].keys() == {"process", "run", "model"}
    assert compared[-1].items() <= said.items()


@pytest.mark.slow
@pytest.mark.parametrize("plan", ("expert", "data"))
def test_text_on_eight_devices(plan):
    """Stop strings, streaming, counters; nano in float32."""
    sampling = dd.Sampling(0.6, seed=1, stop=("return",))
    alone, many = dd.load(), dd.load(mesh=mesh_of(8), plan=plan)
    wanted = dd.generate(alone, [PROMPT, "class A:"], sampling=sampling, max_new_tokens=40)
    found = dd.generate(many, [PROMPT, "class A:"], sampling=sampling, max_new_tokens=40)
    for a, b in zip(wanted, found, strict=True):
        assert (a.text, a.tokens, a.finish_reason) == (b.text, b.tokens, b.finish_reason)
    pieces = list(dd.stream(many, PROMPT, sampling=sampling, max_new_tokens=40))
    assert "".join(pieces) == wanted[0].text


@pytest.mark.slow
def test_command_line(capsys):
    def said(*options):
        assert main(["generate", PROMPT, "--max-new-tokens", "12", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)["tokens"]

    assert said("--devices", "2", "--plan", "tensor") == said()


def test_all_processes_have_devices(folder, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    said = "mesh of 4 devices: none is of process 1, and all 2 processes must take part"
    refused(said, dd.load, folder, mesh=mesh_of(4))


def test_devices_of_all_processes(monkeypatch):
    assert len(jax.devices()) == 8  # jax has started, or `make_mesh` would make fewer
    refused("devices=5: must be a multiple of the 2 processes", make_mesh, 5, 2)
    refused("devices=0: must be a multiple of the 3 processes", make_mesh, 0, 3)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    refused("devices=4: must be all 8 of the processes", make_mesh, 4, 2)
    assert make_mesh(8, 2).size == 8


def test_bad_input(folder, capsys):
    refused("mesh='all': must be a jax.sharding.Mesh", dd.load, folder, mesh="all")
    refused("plan='pipeline': must be one of", dd.load, folder, mesh=mesh_of(2), plan="pipeline")
    refused("plan=['expert']: must be one of", dd.load, folder, mesh=mesh_of(2), plan=["expert"])
    refused("plan=['expert']: must be one of", dd.load, folder, plan=["expert"])
    refused("must be a jax.sharding.Mesh of devices", dd.load, folder,
            mesh=AbstractMesh((2,), ("devices",)))  # fmt: skip
    refused("num_attention_heads=2 gives 2 parts", dd.load, folder, mesh=mesh_of(8))
    refused("devices=0: must be 1 or greater", make_mesh, 0)
    refused("devices=9: only 8 here", make_mesh, 9)
    refused("devices=2.0: must be an integer", make_mesh, 2.0)
    refused("devices=True: must be an integer", make_mesh, True)
    refused("devices=4097: must be at most 4096 a process", make_mesh, 4097)
    refused("devices=8194: must be at most 4096 a process", make_mesh, 8194, 2)
    refused("devices=4096: only 8 here", make_mesh, 4096)
    refused("processes=0: must be 1 or greater", make_mesh, 2, 0)
    refused("processes=True: must be 1 or greater", make_mesh, 2, True)
    refused("mesh with axes ('x',): must have the one axis 'devices'", make_plan, "expert",
            AbstractMesh((2,), ("x",)))  # fmt: skip
    assert main(["generate", PROMPT, "--plan", "data"]) == 2
    assert "plan='data': without a mesh (on the command line --devices)" in capsys.readouterr().err
    for count in ("9", "10000000", "10000000000"):
        assert main(["generate", PROMPT, "--devices", count]) == 2
        assert f"devices={count}: " in capsys.readouterr().err
