"""Two processes of one CPU device each write what one process writes, and end together."""

import json
import os
import socket
import subprocess
import sys
import time

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


def command(folder, *options, new=8):
    """One process with the command line."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    words = ["generate", "the thing", "--model", str(folder), "--json", "--temperature", "1"]
    words += ["--dtype", "float32", "--max-new-tokens", str(new), *options]
    return subprocess.Popen(
        [sys.executable, "-m", "ddtree_jax", *words],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def pair(folder, *options, second=(), new=8):
    port = free_port()
    where = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--devices", "2", *options]
    each = ([], list(second))
    return [command(folder, *where, *each[i], "--process", str(i), new=new) for i in (0, 1)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", ("expert", "data"))
def test_the_same_tokens(folder, plan):
    out, _ = command(folder).communicate(timeout=120)
    wanted = json.loads(out)["tokens"]
    outs = [p.communicate(timeout=120) + (p.returncode,) for p in pair(folder, "--plan", plan)]
    assert [code for *_, code in outs] == [0, 0], outs
    said = [[line for line in out.splitlines() if "[Gloo]" not in line] for out, *_ in outs]
    assert [json.loads(line)["tokens"] for line in said[0]] == [wanted] and not said[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_that_differ_are_refused(folder):
    started = pair(folder, second=("--plan", "data"))
    for process in started:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 2 and "the 2 processes differ in plan" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_process_ends_the_others(folder):
    first, second = pair(folder, new=200)
    time.sleep(15)
    assert first.poll() is None
    second.kill()
    second.communicate(timeout=10)
    _, said = first.communicate(timeout=60)
    assert first.returncode != 0 and said


def test_bad_input():
    refused("give all three, or none", processes.start, "127.0.0.1:1")
    refused("process=2: must be from 0 to 1", processes.start, "127.0.0.1:1", 2, 2)
    refused("coordinator='host': must be HOST:PORT", processes.start, "host", 2, 1)
    said = f"coordinator 127.0.0.1:{(port := free_port())} did not answer for 1 s"
    where = f"127.0.0.1:{port}"
    refused(said, processes.start, where, 2, 1, timeout=1, kind=TimeoutError)
