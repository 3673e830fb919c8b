"""Processes with CPU devices of their own write what one process writes, and end together."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import jax
import pytest
from checkpoint import write_checkpoint
from refusal import refused

import ddtree_jax as dd
from ddtree_jax import cli, processes
from ddtree_jax.tokenizer import RANKS

RAGGED = ("the thing", "x", "in the thing " * 9, "你好, \n world", "ing")
NEW = "24"  # tokens of each


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Heads and experts for four devices; five groups of width, which divide by none."""
    changes = dict(num_attention_heads=4, moe_intermediate_size=160)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), **changes)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(folder, *options, prompts=("the thing",)):
    """One process with the command line."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    words = ["generate", *prompts, "--model", str(folder), "--dtype", "float32"]
    return subprocess.Popen(
        [sys.executable, "-m", "ddtree_jax", *words, "--temperature", "1", *options],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def script(text, *arguments):
    """One process with a script of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@contextmanager
def group(folder, count, devices, *options, last=(), **how):
    """`count` processes, `devices` in all; the last one may have options of its own."""
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count)]
    where += ["--devices", str(devices), *options]
    own = [[]] * (count - 1) + [list(last)]
    with ExitStack() as stack:
        started = []
        for i in range(count):
            process = command(folder, *where, *own[i], "--process", str(i), **how)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield started


@pytest.fixture(scope="module")
def alone(folder):
    """What one process writes to ragged prompts, and a stop string that ends just one of them."""
    model = dd.load(folder, dtype="float32")

    def said(*stop):
        sampling = dd.Sampling(1.0, stop=stop)
        return dd.generate(model, RAGGED, sampling=sampling, max_new_tokens=int(NEW))

    texts = [done.text for done in said()]
    # The last first: it is not the first process that has it.
    pairs = [text[i : i + 2] for text in reversed(texts) for i in range(4, len(text) - 4)]
    stop = next(
        pair
        for pair in pairs
        if pair.isascii() and pair.isprintable() and [pair in t for t in texts].count(True) == 1
    )
    wanted = said(stop)
    cut = [w for w, text in zip(wanted, texts, strict=True) if w.text != text]
    assert len(cut) == 1 and cut[0].finish_reason == "stop" and len(cut[0].text) >= 3
    return stop, [(done.text, done.tokens, done.finish_reason) for done in wanted]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "count,devices,plan",
    [(2, 2, "expert"), (2, 4, "tensor"), (2, 4, "data"),
     (4, 4, "expert"), (4, 4, "tensor"), (4, 4, "data")],
)  # fmt: skip
def test_the_same_tokens(folder, alone, count, devices, plan):
    """And nothing but them on any output, though the libraries below write what they like.

    Five prompts: `data` has live requests in every process.
    """
    stop, wanted = alone
    words = "--json", "--max-new-tokens", NEW, f"--stop={stop}", "--plan", plan
    with group(folder, count, devices, *words, prompts=RAGGED) as started:
        both = [p.communicate(timeout=300) for p in started]
    assert [p.returncode for p in started] == [0] * count, both
    said = [[json.loads(line) for line in out.splitlines()] for out, _ in both]
    assert [(o["text"], o["tokens"], o["finish_reason"]) for o in said[0]] == wanted
    assert not any(out for out, _ in both[1:])


def copy_of(folder, to, leave_out=(), **config):
    """A host's own copy, with something else in it."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns(*leave_out))
    published = json.loads((to / "config.json").read_text())
    published["text_config"] |= config
    (to / "config.json").write_text(json.dumps(published))
    return to


def ends(started, seconds=60):
    """Exit status and errors of each process, all within the time."""
    end = time.monotonic() + seconds
    said = [p.communicate(timeout=max(end - time.monotonic(), 0))[1] for p in started]
    return [(p.returncode, errors) for p, errors in zip(started, said, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "what,said",
    [
        ("plan", "in plan (plan: 'expert' on process 0, 'data' on process 1)"),
        ("devices", "in devices (devices: 2 on process 0, 4 on process 1)"),
        ("drafter", "in drafter (drafter: True on process 0, False on process 1)"),
        ("config", "in KimiConfig.rms_norm_eps ("),
        ("tokenizer", "in tiktoken.model ("),
    ],
    ids=("plan", "devices", "drafter", "config", "tokenizer"),
)
def test_processes_that_differ_are_refused(folder, tmp_path, what, said):
    """By all of them, with the values. Copies may lie elsewhere, but must hold the same."""
    last = {"plan": ("--plan", "data"), "devices": ("--devices", "4")}.get(what)
    if last is None:
        leave_out = ["dflash"] if what == "drafter" else []
        config = dict(rms_norm_eps=1e-3) if what == "config" else {}
        copy = copy_of(folder, tmp_path / "copy", leave_out, **config)
        if what == "tokenizer":
            lines = (copy / RANKS).read_bytes().splitlines()
            tokens = [line.split()[0] for line in lines]
            tokens[-1], tokens[-2] = tokens[-2], tokens[-1]
            lines = [b"%s %d\n" % (token, rank) for rank, token in enumerate(tokens)]
            (copy / RANKS).write_bytes(b"".join(lines))
        last = "--model", str(copy)
    with group(folder, 2, 2, "--json", last=last) as started:
        for status, errors in ends(started):
            assert status == 2 and f"the 2 processes differ {said}" in errors, errors


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bad", ("model", "shard", "tokenizer"))
def test_an_error_of_one_ends_all(folder, tmp_path, bad):
    """It says what is wrong and does not wait for the others; these are told."""
    last, said = ("--model", "/nowhere"), "no model '/nowhere'"
    if bad == "shard":
        last = "--model", str(copy := copy_of(folder, tmp_path / "copy"))
        shard = min(copy.glob("model-*"))
        shard.write_bytes(shard.read_bytes()[:-100])
        said = f"{shard}: truncated"
    elif bad == "tokenizer":  # found after all weights
        last = "--model", str(copy := copy_of(folder, tmp_path / "copy"))
        (copy / RANKS).unlink()
        said = f"{copy / RANKS}: no such"
    with group(folder, 2, 2, "--json", last=last) as started:
        first, second = ends(started)
    assert second[0] == 2 and f"error: {said}" in second[1], second
    assert first[0] == 2 and f"process 1 ended: {said}" in first[1], first


def wait_for(stream, word):
    """Read until the word is there."""
    shown = ""
    while word not in shown:
        assert (piece := stream.read(1)), shown
        shown += piece


# What jax, or gloo below it, says of a process that is no longer there.
GONE = re.compile(
    "Connection (closed|reset) by peer|stopped sending heartbeats|leader task was preempted/died"
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "count,plan,victim,while_",
    [(2, "expert", 0, "decoding"), (2, "expert", 1, "decoding"), (4, "data", 2, "decoding"),
     (2, "tensor", 1, "prefilling")],
)  # fmt: skip
def test_a_killed_process_ends_the_others(folder, count, plan, victim, while_):
    """All of them, within a minute, and they say that it is gone."""
    words = "--method", "autoregressive", "--max-new-tokens", "200", "--plan", plan
    with group(folder, count, count, *words, prompts=("the thing",)) as started:
        if while_ == "decoding":  # it has begun to write, and has far to go
            wait_for(started[0].stdout, "the thing")
            assert started[0].stdout.read(1)
        else:  # gloo says so when the first program with a collective runs
            wait_for(started[0].stderr, "[Gloo] Rank 0 is connected")
        assert all(process.poll() is None for process in started)
        started.pop(victim).kill()
        for status, errors in ends(started):
            assert status != 0 and GONE.search(errors), (status, errors)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", (0, 1))
def test_a_process_killed_in_loading_ends_the_other(folder, victim):
    """It has joined, and said nothing yet of what it runs: the other waits for that."""
    where = f"127.0.0.1:{free_port()}"
    options = "--coordinator", where, "--processes", "2", "--devices", "2", "--process"
    with ExitStack() as stack:
        started = []
        for start in (
            lambda: command(folder, *options, str(1 - victim)),
            lambda: script(JOINS, where, str(victim)),
        ):
            started.append(stack.enter_context(start()))
            stack.callback(started[-1].kill)
        other, killed = started
        wait_for(killed.stdout, "joined")
        assert other.poll() is None
        killed.kill()
        ((status, errors),) = ends([other])
    assert status != 0 and GONE.search(errors), (status, errors)


JOINS = """
import sys, time
from ddtree_jax import processes
processes.start(sys.argv[1], 2, int(sys.argv[2]))
print("joined", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "devices,said",
    [
        ("jax.local_devices()", "the 2 processes differ in mesh (mesh: ["),
        ("jax.devices()[:1]", "mesh of 1 devices: none is of process 1"),
    ],
    ids=("own", "first"),
)
def test_meshes_that_leave_one_out_are_refused(folder, devices, said):
    """From Python; by all, also where each has a mesh that would do for it alone."""
    where = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        started = [
            stack.enter_context(script(LOADS % devices, where, str(i), str(folder)))
            for i in range(2)
        ]
        for status, errors in ends(started):
            assert status == 2 and said in errors, errors


LOADS = """
import sys
import jax
import ddtree_jax as dd
from ddtree_jax import processes
try:
    processes.start(sys.argv[1], 2, int(sys.argv[2]))
    dd.load(sys.argv[3], mesh=jax.sharding.Mesh(%s, ("devices",)))
except ValueError as error:
    print(error, file=sys.stderr)
    processes.leave(error, 2)
"""


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


def test_bad_input():
    refused("give all three, or none", processes.start, "127.0.0.1:1")
    refused("process=2: must be from 0 to 1", processes.start, "127.0.0.1:1", 2, 2)
    refused("coordinator='host': must be HOST:PORT", processes.start, "host", 2, 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        refused(f"coordinator='{where}': must be a free port", processes.start, where, 2, 0)
