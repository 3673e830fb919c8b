"""Processes of their own for tests: alone with the command line or a script, or in a group."""

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager


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


def ends(started, seconds=60):
    """Exit status and errors of each process, all within the time."""
    end = time.monotonic() + seconds
    said = [p.communicate(timeout=max(end - time.monotonic(), 0))[1] for p in started]
    return [(p.returncode, errors) for p, errors in zip(started, said, strict=True)]


def wait_for(stream, word):
    """Read until the word is there."""
    shown = ""
    while word not in shown:
        assert (piece := stream.read(1)), shown
        shown += piece
