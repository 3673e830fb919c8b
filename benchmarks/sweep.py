"""Tokens per second of static batches: requests x method x mix.

    python -m benchmarks.sweep [--concurrency 1,2,4] [--context short,long] [--plot]

Writes results/sweep.json. A static batch starts together and is decoded on the device until its
last request ends, so it empties towards the end: tokens/s is over the whole loop. Prefill and
compilation are not timed.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax import lax

from benchmarks import prompts as held_out
from benchmarks import results_file, tables
from ddtree_jax import Sampling, Speculation, prefill
from ddtree_jax import load as load_model
from ddtree_jax.cache import identity_tables
from ddtree_jax.generate import METHODS, Method, Model, Prompt, decode
from ddtree_jax.state import DecodeState

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128)
SETTINGS = ((8, 4), (16, 8))  # (budget, top-k) of the trees
FOREVER = np.iinfo(np.int32).max
CASE = ("source", "context", "mix", "temperature", "requests", "method", "budget", "top_k")


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
    compilation: float = 0.0  # the longest
    running: float = 0.0  # the longest cell, without compilation
    programs: set = field(default_factory=set)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def fits(self, programs: set) -> bool:
        """The next cell is taken to run at most twice as long as the longest so far."""
        if self.budget is None:
            return True
        wanted = len(programs - self.programs) * self.compilation + 2 * self.running
        return self.elapsed + wanted <= self.budget


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    clock = Clock(args.budget_seconds)
    model = load_model(args.model, dtype=args.dtype)
    methods = make_methods(model, args.methods, args.settings)
    kept = _kept(args.output) if args.append else []
    size, points, left_out, notes = max(*args.concurrency, args.prompts), [], [], {}
    for context in args.context:
        pools = []
        for mix in args.mixes:
            texts = held_out.load(f"{mix}_{context}", min(size, held_out.EACH))
            for temperature in args.temperature:
                case = {"context": context, "mix": mix, "temperature": temperature}
                begun = clock.elapsed
                pools.append(make_pool(model, texts, size, args.new_tokens, case))
                took = f"{clock.elapsed - begun:.0f} s, compilation counted"
                _say(f"{_words(case)}: {size} prompts prefilled in {took}")
        for found in sweep(
            model, pools, args.concurrency, methods, args.prompts, args.repeats, clock
        ):
            if isinstance(found, str):
                left_out.append(found)
                continue
            points += found
            notes = make_notes(model, args, left_out)
            everything = _merged(kept, points)
            results_file.write(args.output, summarise(everything), everything, notes)
    everything, notes = _merged(kept, points), make_notes(model, args, left_out)
    summary = summarise(everything)
    results_file.write(args.output, summary, everything, notes)
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        print(tables.sweep({"points": everything}), end="")
    if args.plot:
        plot(everything, args.output.with_suffix(".png"))


def sweep(
    model: Model,
    pools: Sequence[Pool],
    concurrency: Sequence[int],
    methods: dict[tuple, Method],
    prompts: int,
    repeats: int,
    clock: Clock,
) -> Iterator[list[dict] | str]:
    """Measure cell by cell (a batch size of a pool, all methods); a cell left out is named."""
    for requests in concurrency:
        for pool in pools:
            name = f"{_words(pool.case)}, {requests} requests"
            pages = pool.state.block_tables.shape[1]
            programs = {(method, requests, pages) for method in methods.values()}
            if not clock.fits(programs):
                _say(f"{name}: left out")
                yield name
                continue
            points = measure(model, pool, requests, methods, prompts, repeats, clock)
            clock.programs |= programs
            speeds = {_name(p): round(p["tokens_per_second"], 1) for p in points}
            _say(f"{clock.elapsed:.0f} s: {name}: {speeds}")
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
    samplings = [Sampling(case["temperature"], seed) for seed in range(size)]
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
    for method in methods.values():
        start = clock.elapsed
        jax.block_until_ready(decode(model.weights, cut(pool.state, 0, requests), method, 0))
        clock.compilation = max(clock.compilation, clock.elapsed - start)
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


def summarise(points: list[dict]) -> dict:
    """Tokens/s, and over autoregression's, at the smallest and largest batch that all mixes ran.

    Keys without a mix hold all mixes together: their tokens over their seconds. Short contexts and
    greedy decoding have no suffix.
    """
    summary, cells = {}, {}
    for point in points:
        suffix = "" if point["context"] == "short" else f"_{point['context']}"
        suffix += f"_t{point['temperature']:g}" if point["temperature"] else ""
        cells.setdefault((suffix, point["requests"]), {}).setdefault(point["mix"], []).append(point)
    for suffix in dict.fromkeys(suffix for suffix, _ in cells):
        mixes = {mix for (s, _), cell in cells.items() if s == suffix for mix in cell}
        whole = [c for (s, c), cell in cells.items() if s == suffix and set(cell) == mixes]
        for requests in sorted({min(whole), max(whole)}) if whole else ():
            cell = cells[suffix, requests]
            for mix, here in {"": sum(cell.values(), []), **cell}.items():
                end = f"_c{requests}{mix and '_' + mix}{suffix}"
                speeds = {}
                for name in dict.fromkeys(map(_name, here)):
                    same = [p for p in here if _name(p) == name]
                    speeds[name] = sum(p["tokens"] for p in same) / sum(p["seconds"] for p in same)
                summary |= {name + end: speed for name, speed in speeds.items()}
                if "ar" in speeds:
                    summary |= {
                        f"{name}_over_ar{end}": speed / speeds["ar"]
                        for name, speed in speeds.items()
                        if name != "ar"
                    }
    summary["requests_run"] = sum(p["requests"] * p["groups"] for p in points)
    summary["requests_differ"] = sum(p["differ"] for p in points)
    return summary


def make_notes(model: Model, args, left_out: list[str]) -> list[str]:
    """What a reader must know beside the figures."""
    device, largest = jax.devices()[0], max(args.concurrency)
    notes = [
        f"{device.device_kind}; weights of {model.name}, dtype {model.weights.dtype}, held-out "
        f"text; {args.new_tokens} new tokens, {args.repeats} repeats, medians",
        "static batch: all requests start together and the batch empties as they end; tokens/s "
        "over the whole loop; prefill and compilation left out",
        f"batches below {args.prompts} requests run groups of the first {args.prompts} prompts "
        "in turn; accept lengths of larger batches are over more prompts",
        "accept length: committed tokens per verify pass, the bonus counted, prefill's token not; "
        f"differ: requests whose tokens are not those of {args.methods[0]}",
    ]
    if largest > held_out.EACH:
        notes.append(
            f"batches above {held_out.EACH} requests repeat prompts, with other seeds: greedily "
            "the repeats write the same text"
        )
    if device.platform == "cpu":
        notes.append("timed on a CPU: these figures are no results, and say nothing about a GPU")
    if left_out:
        notes.append("left out, as the time given would not do: " + "; ".join(left_out))
    return notes


def plot(points: list[dict], path: Path) -> None:
    """Tokens/s over requests, a line for each method, a panel for each mix."""
    from matplotlib import pyplot

    def panel(point):
        return tuple(point[name] for name in ("context", "temperature", "mix"))

    panels = list(dict.fromkeys(map(panel, points)))
    columns = len({p["mix"] for p in points})
    shape = (-(-len(panels) // columns), columns)
    size = (5 * columns, 3.6 * shape[0])
    figure, axes = pyplot.subplots(*shape, figsize=size, squeeze=False, sharex=True, sharey=True)
    for axis, key in zip(axes.flat, panels, strict=False):
        here = sorted((p for p in points if panel(p) == key), key=lambda p: p["requests"])
        for name in dict.fromkeys(map(_name, here)):
            line = [(p["requests"], p["tokens_per_second"]) for p in here if _name(p) == name]
            axis.plot(*zip(*line, strict=True), "o-", ms=3, label=name)
        axis.set_title(_words(here[0]))
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = sorted({p["requests"] for p in points})
        axis.set_xticks(ticks, ticks)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("requests")
    for axis in axes[:, 0]:
        axis.set_ylabel("tokens/s, all requests")
    axes[0, 0].legend(fontsize=8)
    figure.suptitle(f"{points[0]['source']}, static batches on {jax.devices()[0].device_kind}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _name(point: dict) -> str:
    short = {"autoregressive": "ar", "dflash": "chain"}
    return short.get(point["method"], f"ddtree_b{point['budget']}_k{point['top_k']}")


def _words(case: dict) -> str:
    warmth = f"T = {case['temperature']:g}" if case["temperature"] else "greedy"
    return f"{case['mix']}, {case['context']}, {warmth}"


def _kept(path: Path) -> list[dict]:
    """Points of an earlier run on the same machine."""
    if not path.exists():
        return []
    old = json.loads(path.read_text())
    for name, now in (
        ("machine", results_file.machine()), ("versions", results_file.versions())
    ):  # fmt: skip
        if old[name] != now:
            raise ValueError(f"--append: {path.name} has {name} {old[name]}, here it is {now}")
    return old["points"]


def _merged(old: list[dict], new: list[dict]) -> list[dict]:
    """Old and new points; of two with the same case, the new one."""
    return list({tuple(p[name] for name in CASE): p for p in old + new}.values())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _list(kind, allowed=None):
    """An option type: comma-separated values, each one of `allowed`."""

    def parse(text: str) -> list:
        values = [kind(part) for part in text.split(",")]
        if allowed and not set(values) <= set(allowed):
            raise ValueError(text)
        return values

    parse.__name__ = "list of " + ("|".join(allowed) if allowed else kind.__name__)
    return parse


def _setting(text: str) -> tuple[int, int]:
    budget, top_k = text.split("x")
    return int(budget), int(top_k)


def _parser():
    parser = results_file.parser(__doc__.split("\n")[0], "sweep")
    add = parser.add_argument
    add("--concurrency", type=_list(int), default=list(CONCURRENCY), metavar="1,2,4")
    methods = list(reversed(METHODS))
    add("--methods", type=_list(str, METHODS), default=methods, metavar=",".join(methods))
    add("--settings", type=_list(_setting), default=list(SETTINGS), metavar="8x4,16x8",
        help="budget x top-k of the trees")  # fmt: skip
    add("--mixes", type=_list(str, ("code", "prose")), default=["code", "prose"],
        metavar="code,prose")  # fmt: skip
    add("--context", type=_list(str, ("short", "long")), default=["short"], metavar="short,long")
    add("--temperature", type=_list(float), default=[0.0], metavar="0,1")
    add("--new-tokens", type=int, default=128)
    add("--prompts", type=int, default=16, help="of a point, at least: small batches run in turn")
    add("--repeats", type=int, default=3)
    add("--budget-seconds", type=float, help="start nothing that would take longer than this")
    add("--append", action="store_true", help="keep the other points of the output file")
    add("--plot", action="store_true")
    add("--json", action="store_true", help="print the summary as JSON instead of a table")
    return parser


if __name__ == "__main__":
    main()
