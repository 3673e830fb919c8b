"""Clock of a training run: chunks of steps, their number fixed from measured speed, resuming.

A run is given seconds, not steps. The first chunks are timed, the number of steps that fits is
decided once and kept in the checkpoint, and from then on the schedule depends on the step alone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

UNDECIDED = 10**9
TIMED = 3  # chunks before the decision; the first is warm-up
SAVE_EVERY = 150.0  # seconds


@dataclass
class Pace:
    """`seconds` of training in all, counting compilation; `deadline` ends this process early."""

    seconds: float
    started: float  # time.monotonic() when the process's work began
    stop_after: float | None = None
    steps: int | None = None  # fixes the number of steps instead of `seconds`
    reserve: float = 30.0  # of `seconds`, for a later compilation and the evaluation
    slower: float = 1.0  # mean cost of a step over the run, measured steps being 1
    _times: list[float] = field(default_factory=list)

    def decide(self, chunk: int, step: int) -> int | None:
        """The number of steps, a multiple of `chunk`, once it can be told; `step` are done."""
        if self.steps is not None:
            return max(1, self.steps // chunk) * chunk
        if len(self._times) < TIMED:
            return None
        spent = time.monotonic() - self.started
        each = 1.02 * min(self._times[1:]) * self.slower  # a compilation may be among them
        return step + chunk * max(1, int((self.seconds - spent - self.reserve) / each))

    def took(self, seconds: float) -> None:
        self._times.append(seconds)

    def now(self) -> float:
        """Seconds since the work began."""
        return time.monotonic() - self.started

    def must_stop(self, needed: float) -> bool:
        """Whether the process would outlast its deadline by working `needed` seconds more."""
        if self.stop_after is None:
            return False
        return time.monotonic() - self.started + needed > self.stop_after


def drive(
    state: dict[str, Any],
    work: Callable[[dict[str, Any], int], tuple[dict[str, Any], Any]],
    save: Callable[[dict[str, Any]], None],
    report: Callable[[int, int | None, float, Any], None],
    pace: Pace,
    chunk: int,
    compiling: Callable[[int, int], bool],
) -> tuple[dict[str, Any], bool]:
    """Chunks of `work(state, step)` until `state["total"]` steps are done, or the deadline.

    Saves every SAVE_EVERY seconds and at the end; returns the state and whether it is finished.
    `compiling(step, total)` tells that the next chunk has to be compiled first.
    """
    step, total = int(state["step"]), int(state["total"])
    saved = time.monotonic()
    while step < total:
        if total == UNDECIDED and (decided := pace.decide(chunk, step)):
            total = max(decided, step)
            state = {**state, "total": jnp.int32(total)}
            continue
        compile_first = compiling(step, total)
        recent = pace._times[-1] if pace._times else 0.0
        if pace.must_stop((90.0 if compile_first else 0.0) + recent + 12.0) and recent:
            save(state)
            return state, False
        begun = time.monotonic()
        state, metrics = work(state, step)
        jax.block_until_ready(metrics)
        step += chunk
        took = time.monotonic() - begun
        pace.took(took)
        report(step, None if total == UNDECIDED else total, took, metrics)
        if time.monotonic() - saved > SAVE_EVERY:
            save(state)
            saved = time.monotonic()
    save(state)
    return state, True
