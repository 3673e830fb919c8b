"""Processes with CPU devices of their own write what one process writes, and end together."""

import json
import re
import shutil
from contextlib import ExitStack

import pytest
from checkpoint import write_checkpoint
from commands import command, ends, free_port, group, script, wait_for

import ddtree_jax as dd
from ddtree_jax.tokenizer import RANKS

RAGGED = ("the thing", "x", "in the thing " * 9, "你好, \n world", "a", "thin ing", "ing")
NEW = "24"  # tokens of each


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Heads and experts for four devices; five groups of width, which divide by none."""
    changes = dict(num_attention_heads=4, moe_intermediate_size=160)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), **changes)


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

    Seven prompts, padded to eight: `data` has live requests in every process.
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_counts_that_differ_are_refused(folder):
    """By both, and before the one that was told three waits for the third."""
    with group(folder, 2, 2, "--json", last=("--processes", "3")) as started:
        first, second = ends(started, 40)
    assert first[0] == 2 and "processes=2: process 1 was started with processes=3" in first[1]
    assert second[0] == 2 and "processes=3: process 0 was started with processes=2" in second[1]


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
