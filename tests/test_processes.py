"""Processes with CPU devices of their own write what one process writes, and end together."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest
from checkpoint import write_checkpoint
from refusal import refused

from ddtree_jax import processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(folder, *options):
    """One process with the command line."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    words = ["generate", "the thing", "--model", str(folder), "--dtype", "float32"]
    return subprocess.Popen(
        [sys.executable, "-m", "ddtree_jax", *words, "--temperature", "1", *options],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@contextmanager
def group(folder, count, devices, *options, last=()):
    """`count` processes, `devices` in all; the last one may have options of its own."""
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count)]
    where += ["--devices", str(devices), *options]
    own = [[]] * (count - 1) + [list(last)]
    with ExitStack() as stack:
        started = []
        for i in range(count):
            process = command(folder, *where, *own[i], "--process", str(i))
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield started


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("count,devices,plan", [(2, 2, "expert"), (2, 4, "data"), (4, 4, "data")])
def test_the_same_tokens(folder, count, devices, plan):
    """And nothing but them on any output, though the libraries below write what they like."""
    short = "--json", "--max-new-tokens", "8"
    with command(folder, *short) as alone:
        wanted = json.loads(alone.communicate(timeout=120)[0])["tokens"]
    with group(folder, count, devices, "--plan", plan, *short) as started:
        ends = [p.communicate(timeout=300) for p in started]
    assert [p.returncode for p in started] == [0] * count, ends
    said = [out for out, _ in ends]
    assert json.loads(said[0])["tokens"] == wanted and not any(said[1:])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_that_differ_are_refused(folder):
    with group(folder, 2, 2, "--json", last=("--plan", "data")) as started:
        for process in started:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 2 and "the 2 processes differ in plan" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_without_the_drafter_is_found(folder, tmp_path):
    """Copies may lie elsewhere, but must hold the same."""
    copy = shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("dflash"))
    with group(folder, 2, 2, "--json", last=("--model", str(copy))) as started:
        for process in started:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 2 and "the 2 processes differ in drafter" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_process_ends_the_others(folder):
    """In the middle of decoding: the first process has begun to write, and has far to go."""
    words = "--method", "autoregressive", "--max-new-tokens", "250"
    with group(folder, 2, 2, *words) as (first, second):
        shown = ""
        while len(shown) <= len("the thing"):
            assert (piece := first.stdout.read(1)), first.communicate()
            shown += piece
        second.kill()
        assert first.poll() is None
        _, said = first.communicate(timeout=60)
    assert first.returncode != 0 and "Error" in said, (first.returncode, said)


def test_bad_input():
    refused("give all three, or none", processes.start, "127.0.0.1:1")
    refused("process=2: must be from 0 to 1", processes.start, "127.0.0.1:1", 2, 2)
    refused("coordinator='host': must be HOST:PORT", processes.start, "host", 2, 1)
    said = f"coordinator 127.0.0.1:{(port := free_port())} did not answer for 1 s"
    where = f"127.0.0.1:{port}"
    refused(said, processes.start, where, 2, 1, timeout=1, kind=TimeoutError)
