"""What processes say to each other at the start, and how one ends: most of it in this process."""

import json
import socket
from types import SimpleNamespace

import jax
import pytest
from commands import free_port, script
from refusal import refused

from ddtree_jax import cli, processes


@pytest.mark.timeout(60)
def test_others_that_do_not_come():
    """The one that waits says for whom, where, and what to check; no library ends it before."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cases = [  # this process, the port, what it says
            (0, free_port(), "are all others running"),
            (1, free_port(), "is process 0 running"),
            (1, silent.getsockname()[1], "is process 0 running"),
        ]
        started = [script(START, str(port), str(process)) for process, port, _ in cases]
        for one, (process, port, check) in zip(started, cases, strict=True):
            said, errors = one.communicate(timeout=50)
            wanted = f"coordinator 127.0.0.1:{port}: process {process} did not meet the others"
            assert said.startswith(f"{wanted} for 1 s: {check}") and one.returncode == 2, errors


START = """
import sys
from ddtree_jax import processes
try:
    processes.start(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]), timeout=1)
except TimeoutError as error:
    print(error, flush=True)
    processes.leave(error, 2)
"""


class Store:
    """The coordinator's store, in which the other processes have already answered."""

    def __init__(self, **others):
        self.others = others

    def key_value_set(self, key, value):
        self.own = key, json.loads(value)

    def blocking_key_value_get(self, key, milliseconds):
        name, said = self.own
        round_, process = name.rsplit("/", 1)
        if key == name:
            return json.dumps(said)
        change = self.others.get("p" + key.removeprefix(f"{round_}/"), lambda said: said)
        return json.dumps(change(said))


@pytest.fixture
def among(monkeypatch):
    """`check_agreement` of process 0 of three, the others' words changed by functions."""

    def check(p1=lambda said: said, p2=lambda said: said, **values):
        store = Store(p1=p1, p2=p2)
        joined = SimpleNamespace(client=store, num_processes=3, process_id=0)
        monkeypatch.setattr(processes, "joined", joined)
        processes.check_agreement(**values)

    return check


VALUES = dict(plan="expert", seed=3, prompts=["a" * 1000])


@pytest.mark.parametrize("name", (*VALUES, "ddtree_jax", "jax", "jaxlib"))
def test_every_value_is_compared(among, name):
    """Versions too, and the middle of what is too long to show."""

    def change(said):
        digest, shown = said["values"][name]
        return {"values": said["values"] | {name: [digest[::-1], shown]}}

    among(**VALUES)
    for other in (1, 2):
        changes = {f"p{other}": change}
        said = f"the 3 processes differ in {name} ({name}: "
        refused(said, among, **changes, **VALUES)
        refused(f" on process {other}): start all with the same", among, **changes, **VALUES)


def test_versions_with_other_options_are_refused(among):
    """Nothing rests on all comparing the same."""

    def older(said):
        return {"values": {k: v for k, v in said["values"].items() if k != "seed"}}

    refused("differ in seed (seed: 3 on process 0, not compared on process 2)", among, p2=older,
            **VALUES)  # fmt: skip


def test_an_error_elsewhere_is_named(among):
    gone = {"error": "no model '/nowhere'"}
    refused("process 2 ended: no model '/nowhere'", among, p2=lambda said: gone, **VALUES)


@pytest.mark.parametrize("error", (RuntimeError("out of memory"), KeyboardInterrupt()))
def test_what_nobody_foresaw_ends_the_process_too(monkeypatch, capsys, error):
    def fail(options):
        raise error

    left = []
    monkeypatch.setattr(cli, "_generate", fail)
    monkeypatch.setattr(processes, "leave", lambda *a: left.append(a))
    for count in (1, 2):
        monkeypatch.setattr(processes, "count", lambda count=count: count)
        with pytest.raises(type(error)):
            cli.main(["generate", "x"])
        assert left == [(error, 1)] * (count - 1)
    assert f"{type(error).__name__}" in capsys.readouterr().err


def test_without_a_cluster(monkeypatch):
    def initialize(*_, **__):  # what jax says then
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    refused("no cluster found (coordinator_address should be defined.)", processes.start)
    refused("or give coordinator, processes and process", processes.start)


def told(monkeypatch, counts, process):
    """The count of `process` is compared with what the others were told; those of a higher number
    than is there never speak."""

    class Told(Store):
        def blocking_key_value_get(self, key, milliseconds):
            asked = int(key.rsplit("/", 1)[1])
            asked_for.append(asked)
            return json.dumps({"values": counts[asked]})

    asked_for = []
    joined = SimpleNamespace(client=Told(), num_processes=counts[process], process_id=process)
    monkeypatch.setattr(processes, "joined", joined)
    try:
        processes._check_count(1)
    finally:
        assert joined.client.own == (
            f"ddtree_jax/processes/{process}", {"values": counts[process]}
        )  # fmt: skip
    return asked_for


def test_counts_are_compared_first(monkeypatch):
    """By all, and nobody asks one that is not there."""
    assert told(monkeypatch, [3, 3, 3], 1) == [0, 1, 2]
    said = "processes=3: process 0 was started with processes=2, start all with the same"
    refused(said, told, monkeypatch, [2, 3], 1)
    refused("processes=2: process 1 was started with processes=3", told, monkeypatch, [2, 3], 0)
    refused("processes=3: process 1 was started with processes=2", told, monkeypatch, [3, 2, 3], 2)


def test_bad_input():
    refused("processes=0: must be 1 or greater", processes.start, "127.0.0.1:1", 0, 0)
    refused("processes=2.0: must be 1 or greater", processes.start, "127.0.0.1:1", 2.0, 0)
    refused("coordinator=1234: must be HOST:PORT", processes.start, 1234, 2, 0)
    refused("give all three, or none", processes.start, "127.0.0.1:1")
    refused("process=2: must be from 0 to 1", processes.start, "127.0.0.1:1", 2, 2)
    refused("coordinator='host': must be HOST:PORT", processes.start, "host", 2, 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        refused(f"coordinator='{where}': must be a free port", processes.start, where, 2, 0)
