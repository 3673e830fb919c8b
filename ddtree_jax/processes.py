"""One program in many processes, each with its own devices: starting together, and agreeing.

JAX finds its peers itself under Slurm, Kubernetes and Open MPI; elsewhere it is told where the
first process listens. Every process then runs the same calls; results are on all, output is the
first's.
"""

import hashlib
import socket
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from ddtree_jax._version import __version__
from ddtree_jax.checks import is_int, require, show

HEARTBEAT = 30  # seconds without a sign of life after which the others give up


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    timeout: int = 60,
) -> None:
    """Join the other processes; before anything else of jax is used.

    Without arguments the cluster's own variables are read. `coordinator` is HOST:PORT of process 0.
    Raises ValueError for what does not fit together, TimeoutError if nobody answers there.
    """
    given = (coordinator, processes, process)
    if any(g is not None for g in given):
        if any(g is None for g in given):
            raise ValueError("coordinator, processes and process: give all three, or none")
        ok = is_int(processes) and processes >= 1
        require(ok, "processes", processes, "1 or greater")
        ok = is_int(process) and 0 <= process < processes
        require(ok, "process", process, f"from 0 to {processes - 1}")
        host, _, port = coordinator.rpartition(":")
        ok = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
        require(ok, "coordinator", coordinator, "HOST:PORT of process 0")
        if process > 0:  # jax would end the process where it stands
            _wait_for(host, int(port), timeout)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=HEARTBEAT,
    )


def _wait_for(host: str, port: int, timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host.strip("[]"), port), timeout=5).close()
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"coordinator {host}:{port} did not answer for {timeout} s ({error}): is "
                    "process 0 running, is this its address, and may this host reach the port?"
                ) from error
        time.sleep(0.2)


def check_agreement(**values) -> None:
    """Raise ValueError naming what differs between processes: versions, configs, the plan."""
    if jax.process_count() == 1:
        return
    values |= {"ddtree_jax": __version__, "jax": jax.__version__}
    hashes = [hashlib.sha256(repr(v).encode()).digest()[:4] for v in values.values()]
    mine = np.frombuffer(b"".join(hashes), np.uint32)
    every = multihost_utils.process_allgather(mine)
    differ = [name for name, column in zip(values, every.T, strict=True) if len(set(column)) > 1]
    if differ:
        here = ", ".join(f"{name}={show(values[name])}" for name in differ)
        raise ValueError(
            f"the {jax.process_count()} processes differ in {', '.join(differ)} (here: {here}): "
            "start all with the same versions, checkpoint and options"
        )
