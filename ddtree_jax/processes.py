"""One program in many processes, each with its own devices: starting together, agreeing, ending.

JAX finds its peers itself under Slurm, Kubernetes and Open MPI; elsewhere it is told where the
first process listens. Every process then runs the same calls; results are on all, output is the
first's.

What processes say to each other here goes through the store of the coordinator, not through
collectives: it needs no devices, nor equally many everywhere, and words of any length.
"""

import hashlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress

import jax
import jaxlib
from jax._src.distributed import global_state as joined  # its store has no public name

from ddtree_jax._version import __version__
from ddtree_jax.checks import is_int, require, show

HEARTBEAT = 30  # seconds without a sign of life after which the others give up
_DAY = 86_400  # where only a peer's heartbeat, or our own clock, says when to give up
_FAREWELL = 5  # seconds in which the others can still ask process 0 what happened

_rounds = itertools.count()  # of comparing: the same on all
_met = threading.Event()  # all others were there once


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    timeout: int = 60,
) -> None:
    """Join the other processes; before anything else of jax is used.

    Without arguments the cluster's own variables are read. `coordinator` is HOST:PORT of process 0.
    Raises ValueError for what does not fit together, TimeoutError if the others do not come.
    """
    given = (coordinator, processes, process)
    if any(g is not None for g in given):
        if any(g is None for g in given):
            raise ValueError("coordinator, processes and process: give all three, or none")
        ok = is_int(processes) and processes >= 1
        require(ok, "processes", processes, "1 or greater")
        ok = is_int(process) and 0 <= process < processes
        require(ok, "process", process, f"from 0 to {processes - 1}")
        host, _, port = coordinator.rpartition(":") if isinstance(coordinator, str) else ("",) * 3
        ok = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
        require(ok, "coordinator", coordinator, "HOST:PORT of process 0")
        if process == 0:  # jaxlib may crash where it cannot listen
            require(_is_free(int(port)), "coordinator", coordinator, "a free port of this host")
    failed: list[Exception] = []

    def join():
        try:
            jax.distributed.initialize(
                coordinator,
                processes,
                process,
                initialization_timeout=_DAY,
                heartbeat_timeout_seconds=HEARTBEAT,
            )
        except Exception as error:
            failed.append(error)

    # At its own time-out jax would end the process where it stands: we look at the clock.
    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    joining.join(timeout)
    if joining.is_alive():
        raise TimeoutError(_nobody_came(timeout))
    if failed:
        raise _could_not_join(coordinator, failed[0]) from failed[0]
    _met.set()
    _check_count(timeout)
    check_agreement(timeout=timeout)  # versions first: the same ones compare the same hereafter


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def _nobody_came(timeout: int) -> str:
    where, process = joined.coordinator_address, joined.process_id
    if where is None:
        return (
            f"the cluster did not name its processes for {timeout} s: give coordinator, processes "
            "and process"
        )
    check = (
        "are all others running, with this address, as many processes and numbers of their own, "
        "and may their hosts reach the port?"
        if process == 0
        else "is process 0 running, is this its address, may this host reach the port, and are "
        "all others running?"
    )
    return (
        f"coordinator {where}: process {process} did not meet the others for {timeout} s: {check}"
    )


def _could_not_join(coordinator: str | None, error: Exception) -> Exception:
    if coordinator is None and isinstance(error, ValueError):
        return ValueError(
            f"no cluster found ({error}): start under Slurm, Open MPI or Kubernetes, or give "
            "coordinator, processes and process"
        )
    return error


def count() -> int:
    """How many processes have joined; unlike jax's, asks for no devices."""
    return 1 if joined.client is None else joined.num_processes


def _check_count(timeout: int) -> None:
    """Raise ValueError if processes were told different counts: process 0's, which all have, first,
    for who was told too many would wait for words of those that are not there."""
    _tell("processes", {"values": count()})
    for process in range(count()):
        theirs = _ask("processes", process, timeout)
        if theirs != count():
            raise ValueError(
                f"processes={count()}: process {process} was started with processes={theirs}, "
                "start all with the same"
            )


def check_agreement(timeout: int = _DAY, **values) -> None:
    """Raise ValueError naming what differs between processes: versions, configs, the plan.

    All must compare equally often. A process that ended with an error is named too.
    """
    if count() == 1:
        return
    values |= {
        "ddtree_jax": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,  # compiles, and may be another than jax's
    }
    mine = {
        name: [hashlib.sha256(repr(value).encode()).hexdigest(), show(value)]
        for name, value in values.items()
    }
    number = next(_rounds)
    _tell(number, {"values": mine})
    every = [_ask(number, process, timeout) for process in range(count())]
    names = dict.fromkeys(name for said in every for name in said)
    absent = [None, "not compared"]
    differ = {}
    for name in names:
        of_each = [said.get(name, absent) for said in every]
        if len({digest for digest, _ in of_each}) > 1:
            other = next(p for p, said in enumerate(of_each) if said[0] != of_each[0][0])
            shown = f"{of_each[0][1]} on process 0, {of_each[other][1]} on process {other}"
            differ[name] = f"{name}: {shown}"
    if differ:
        raise ValueError(
            f"the {count()} processes differ in {', '.join(differ)} ({'; '.join(differ.values())}):"
            " start all with the same versions, checkpoint and options"
        )


def _tell(number: int | str, said: dict) -> None:
    joined.client.key_value_set(f"ddtree_jax/{number}/{joined.process_id}", json.dumps(said))


def _ask(number: int | str, process: int, timeout: int) -> dict:
    """What a process compares this time; waits for it."""
    try:
        key = f"ddtree_jax/{number}/{process}"
        said = json.loads(joined.client.blocking_key_value_get(key, timeout * 1000))
    except jax.errors.JaxRuntimeError as error:
        why = str(error).splitlines()[0]
        raise TimeoutError(
            f"process {process} did not say for {timeout} s what it runs ({why}): is it the same "
            "version of ddtree_jax?"
        ) from error
    if "error" in said:
        raise ValueError(f"process {process} ended: {said['error']}")
    return said["values"]


def leave(error: BaseException, status: int) -> int:
    """End this process after an error, or return `status` if it is alone.

    At once, for jax would wait for the others to end, while these wait for this one: in a
    comparison, where they are told, or in a collective, where they miss its heartbeat.
    """
    if joined.client is None:
        return status
    told = _met.is_set()  # else there is no store, and using it would end in an abort
    if told:
        with suppress(jax.errors.JaxRuntimeError):  # the store went away with process 0
            _tell(next(_rounds), {"error": str(error) or type(error).__name__})
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    if told and joined.process_id == 0:
        time.sleep(_FAREWELL)
    os._exit(status)
