"""Static batches, timed: requests that start together, decoded on the device until all have ended.

Prompts are prefilled once, as a pool; every batch is a copy of a part of it.
"""

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np
from jax import lax

from ddtree_jax import Sampling, Speculation, prefill
from ddtree_jax.cache import identity_tables
from ddtree_jax.generate import Method, decode
from ddtree_jax.loading import Model
from ddtree_jax.prefill import Prompt
from ddtree_jax.state import DecodeState

FOREVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Pool:
    """Prefilled requests of one mix; batches are cut from it, and it is never decoded itself."""

    state: DecodeState
    prompt_tokens: list[int]
    case: dict  # context, mix and temperature


@dataclass
class Clock:
    """How long compilations and cells took so far, to tell whether the next cell fits."""

    budget: float | None = None
    start: float = field(default_factory=time.monotonic)
    compilation: float = 0.0  # the longest, of all programs compiled together
    running: float = 0.0  # the longest cell, without compilation
    programs: set = field(default_factory=set)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def fits(self, programs: set) -> bool:
        """The next cell is taken to run at most twice as long as the longest so far."""
        if self.budget is None:
            return True
        compilation = self.compilation if programs - self.programs else 0.0
        return self.elapsed + compilation + 2 * self.running <= self.budget


def sweep(
    model: Model,
    pools: Sequence[Pool],
    concurrency: Sequence[int],
    methods: dict[tuple, Method],
    prompts: int,
    repeats: int,
    clock: Clock,
    workers: int = 1,
) -> Iterator[list[dict] | str]:
    """Measure cell by cell (a batch size of a pool, all methods); a cell left out is named.

    Programs are compiled `workers` at a time, those of the next batch sizes ahead.
    """
    ahead = max(1, workers // len(methods))
    for index, requests in enumerate(concurrency):
        for pool in pools:
            name = f"{words(pool.case)}, {requests} requests"
            pages = pool.state.block_tables.shape[1]
            programs = {(method, requests, pages) for method in methods.values()}
            if not clock.fits(programs):
                say(f"{name}: left out")
                yield name
                continue
            if not programs <= clock.programs:
                start, coming = clock.elapsed, concurrency[index : index + ahead]
                compile_all(model, pool, coming, methods, workers)
                clock.compilation = max(clock.compilation, clock.elapsed - start)
                clock.programs |= {(m, r, pages) for m in methods.values() for r in coming}
            points = measure(model, pool, requests, methods, prompts, repeats, clock)
            speeds = {name_of(p): round(p["tokens_per_second"], 1) for p in points}
            say(f"{clock.elapsed:.0f} s: {name}: {speeds}")
            yield points


def make_methods(model: Model, names: Sequence[str], settings) -> dict[tuple, Method]:
    """The methods to compare by (method, budget, top-k)."""
    made = {}
    for name in names:
        for budget, top_k in settings if name == "ddtree" else [(8, 4)]:
            method = Method(name, Speculation(budget, top_k), model.weights)
            made[name, method.budget, top_k if name == "ddtree" else 1] = method
    return made


def make_pool(
    model: Model, prompts: Sequence[Prompt], size: int, new_tokens: int, case: dict
) -> Pool:
    """Prefill `size` requests, each with a seed of its own; prompts repeat when they run out.

    One pool serves all batch sizes, so prefill is compiled for one state only, and all sizes
    decode with the same number of pages.
    """
    chosen = [prompts[i % len(prompts)] for i in range(size)]
    samplings = [Sampling(case["temperature"], seed=seed) for seed in range(size)]
    state = jax.block_until_ready(prefill(model, chosen, samplings, new_tokens))
    return Pool(state, state.lengths.tolist(), case)


@partial(jax.jit, static_argnames="count")
def cut(state: DecodeState, start, count: int) -> DecodeState:
    """A copy of requests start .. start+count-1 of a fresh prefill, as if prefilled alone."""
    pages = state.block_tables.shape[1]
    return replace(
        jax.tree.map(
            lambda leaf: lax.dynamic_slice_in_dim(leaf, start, count), replace(state, cache=None)
        ),
        cache=jax.tree.map(
            lambda pool: lax.dynamic_slice_in_dim(pool, start * pages, count * pages, axis=1),
            state.cache,
        ),
        block_tables=identity_tables(count, pages),
    )


def compile_all(
    model: Model, pool: Pool, sizes: Sequence[int], methods: dict[tuple, Method], workers: int = 1
) -> None:
    """Compile every method for every batch size, without running a pass; what is there is kept."""
    x64 = jax.config.jax_enable_x64

    def one(case: tuple[int, Method]) -> None:
        requests, method = case
        with jax.enable_x64(x64):  # a thread does not inherit it
            jax.block_until_ready(decode(model.weights, cut(pool.state, 0, requests), method, 0))

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(one, itertools.product(sizes, methods.values())))


def measure(
    model: Model,
    pool: Pool,
    requests: int,
    methods: dict[tuple, Method],
    prompts: int,
    repeats: int,
    clock: Clock,
) -> list[dict]:
    """One point a method; small batches run `prompts // requests` groups of prompts in turn.

    Within a repeat all methods run one after another. Seconds are the median over repeats of the
    sum over groups; `differ` counts requests whose tokens are not those of the first method.
    """
    compile_all(model, pool, [requests], methods)
    begun = clock.elapsed
    starts = [group * requests for group in range(max(1, prompts // requests))]
    seconds = {key: np.zeros(repeats) for key in methods}
    ends = {key: [None] * len(starts) for key in methods}
    for repeat in range(repeats):
        for group, start in enumerate(starts):
            for key, method in methods.items():
                state = jax.block_until_ready(cut(pool.state, start, requests))
                before = time.perf_counter()
                state = jax.block_until_ready(decode(model.weights, state, method, FOREVER))[0]
                seconds[key][repeat] += time.perf_counter() - before
                ends[key][group] = jax.device_get((state.tokens, state.count, state.passes))
    clock.running = max(clock.running, clock.elapsed - begun)
    first = _tokens(ends[next(iter(methods))])
    points = []
    for key in methods:
        passes = np.concatenate([end[2] for end in ends[key]])
        loop = sum(int(end[2].max()) for end in ends[key])  # a request takes part until it ends
        tokens = _tokens(ends[key])
        committed = sum(max(len(t) - 1, 0) for t in tokens)  # prefill's token left out
        median = float(np.median(seconds[key]))
        points.append(
            {
                "source": model.name,
                "dtype": model.weights.dtype,
                "new_tokens": int(pool.state.limit[0]),
                **pool.case,
                "requests": requests,
                **dict(zip(("method", "budget", "top_k"), key, strict=True)),
                "accept_length": committed / max(int(passes.sum()), 1),
                "passes": loop,
                "step_ms": 1e3 * median / max(loop, 1),
                "tokens_per_second": committed / median,
                "spread": float(np.ptp(seconds[key])) / median,
                "seconds": median,
                "tokens": committed,
                "groups": len(starts),
                "repeats": repeats,
                "prompt_tokens": float(np.mean(pool.prompt_tokens[: len(starts) * requests])),
                "differ": sum(t != f for t, f in zip(tokens, first, strict=True)),
            }
        )
    return points


def _tokens(ends) -> list[list[int]]:
    return [
        row[:n].tolist()
        for tokens, count, _ in ends
        for row, n in zip(tokens, count, strict=True)
    ]  # fmt: skip


def name_of(point: dict) -> str:
    short = {"autoregressive": "ar", "dflash": "chain"}
    return short.get(point["method"], f"ddtree_b{point['budget']}_k{point['top_k']}")


def words(case: dict) -> str:
    warmth = f"T = {case['temperature']:g}" if case["temperature"] else "greedy"
    return f"{case['mix']}, {case['context']}, {warmth}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
