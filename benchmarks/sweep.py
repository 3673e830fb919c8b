"""Tokens per second of static batches: requests x method x mix.

    python -m benchmarks.sweep [--concurrency 1,2,4] [--context short,long] [--plot]

Writes results/sweep.json. A static batch starts together and is decoded on the device until its
last request ends, so it empties towards the end: tokens/s is over the whole loop. Prefill and
compilation are not timed.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path

import jax

from benchmarks import prompts as held_out
from benchmarks import results_file, tables
from benchmarks.static_batch import (
    Clock,
    Pool,
    make_methods,
    make_pool,
    name_of,
    say,
    sweep,
    words,
)
from ddtree_jax import load as load_model
from ddtree_jax.generate import METHODS
from ddtree_jax.loading import Model

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128)
SETTINGS = ((8, 4), (16, 8))  # (budget, top-k) of the trees
CASE = ("source", "context", "mix", "temperature", "requests", "method", "budget", "top_k")


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    clock = Clock(args.budget_seconds)
    model = load_model(args.model, dtype=args.dtype)
    methods = make_methods(model, args.methods, args.settings)
    points = _kept(args.output, model, args.new_tokens) if args.append else {}
    kept, left_out, summary = len(points), [], {}
    for context in args.context:
        pools = make_pools(model, context, args)
        cells = sweep(
            model, pools, args.concurrency, methods, args.prompts, args.repeats, clock, args.workers
        )
        for found in cells:
            if isinstance(found, str):
                left_out.append(found)
            else:
                points |= {_case(point): point for point in found}
            summary = summarise(points.values())
            notes = make_notes(model, args, kept, left_out)
            results_file.write(args.output, summary, list(points.values()), notes)
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        print(tables.sweep({"points": list(points.values())}), end="")
    if args.plot:
        plot(list(points.values()), args.output.with_suffix(".png"))


def make_pools(model: Model, context: str, args) -> list[Pool]:
    """Held-out prompts of every mix and temperature, prefilled."""
    pools, size = [], max(*args.concurrency, args.prompts)
    for mix in args.mixes:
        texts = held_out.load(f"{mix}_{context}", min(size, held_out.EACH))
        for temperature in args.temperature:
            case = {"context": context, "mix": mix, "temperature": temperature}
            start = time.monotonic()
            pools.append(make_pool(model, texts, size, args.new_tokens, case))
            took = f"{time.monotonic() - start:.0f} s, compilation counted"
            say(f"{words(case)}: {size} prompts prefilled in {took}")
    return pools


def summarise(points: Iterable[dict]) -> dict:
    """Tokens/s, and over autoregression's, at the smallest and largest batch that all mixes ran.

    Keys without a mix hold all mixes together: their tokens over their seconds. Short contexts and
    greedy decoding have no suffix.
    """
    points, summary, groups = list(points), {}, {}
    for point in points:
        suffix = "" if point["context"] == "short" else f"_{point['context']}"
        suffix += f"_t{point['temperature']:g}" if point["temperature"] else ""
        groups.setdefault(suffix, []).append(point)
    for suffix, group in groups.items():
        mixes = {p["mix"] for p in group}
        whole = [c for c in {p["requests"] for p in group}
                 if mixes == {p["mix"] for p in group if p["requests"] == c}]  # fmt: skip
        for requests in sorted({min(whole), max(whole)}) if whole else ():
            for mix in ("", *sorted(mixes)):
                here = [p for p in group if p["requests"] == requests and mix in ("", p["mix"])]
                end = f"_c{requests}{mix and '_' + mix}{suffix}"
                summary |= {name + end: speed for name, speed in _speeds(here).items()}
    compared = [p for p in points if p["method"] != "autoregressive"]
    summary["requests_compared"] = sum(p["requests"] * p["groups"] for p in compared)
    summary["requests_differ"] = sum(p["differ"] for p in compared)
    return summary


def _speeds(points: list[dict]) -> dict[str, float]:
    """Tokens/s by method, and ratios to autoregression's, if that ran."""
    speeds = {}
    for name in dict.fromkeys(map(name_of, points)):
        same = [p for p in points if name_of(p) == name]
        speeds[name] = sum(p["tokens"] for p in same) / sum(p["seconds"] for p in same)
    plain = speeds.get("ar")
    ratios = {f"{n}_over_ar": s / plain for n, s in speeds.items() if plain and n != "ar"}
    return speeds | ratios


def make_notes(model: Model, args, kept: int, left_out: list[str]) -> list[str]:
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
    if kept:
        notes.append(f"--append: up to {kept} points are of earlier runs; these notes are not")
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
        for name in dict.fromkeys(map(name_of, here)):
            line = [(p["requests"], p["tokens_per_second"]) for p in here if name_of(p) == name]
            axis.plot(*zip(*line, strict=True), "o-", ms=3, label=name)
        axis.set_title(words(here[0]))
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


def _case(point: dict) -> tuple:
    return tuple(point[name] for name in CASE)


def _kept(path: Path, model: Model, new_tokens: int) -> dict[tuple, dict]:
    """Points of an earlier run of the same machine, versions, model and length, by case."""
    if not path.exists():
        return {}
    old = json.loads(path.read_text())
    now = {"machine": results_file.machine(), "versions": results_file.versions()}
    point = {"source": model.name, "dtype": model.weights.dtype, "new_tokens": new_tokens}
    for found, wanted in ((old, now), *((p, point) for p in old["points"])):
        for name, value in wanted.items():
            if found[name] != value:
                raise ValueError(f"--append: {path.name} has {name}={found[name]}, not {value}")
    return {_case(p): p for p in old["points"]}


def _list(kind, allowed=None):
    """An option type: comma-separated values, each one of `allowed`."""

    def parse(text: str) -> list:
        values = [kind(part) for part in text.split(",")]
        if allowed and not set(values) <= set(allowed):
            raise ValueError(text)
        return values

    parse.__name__ = "list"
    return parse


def _setting(text: str) -> tuple[int, int]:
    budget, top_k = text.split("x")
    return int(budget), int(top_k)


def _parser():
    parser = results_file.parser(__doc__.split("\n")[0], "sweep")
    add = parser.add_argument
    add("--concurrency", type=_list(results_file.count), default=list(CONCURRENCY), metavar="1,2,4")
    methods = list(reversed(METHODS))
    add("--methods", type=_list(str, METHODS), default=methods, metavar=",".join(methods))
    add("--settings", type=_list(_setting), default=list(SETTINGS), metavar="8x4,16x8",
        help="budget x top-k of the trees")  # fmt: skip
    add("--mixes", type=_list(str, ("code", "prose")), default=["code", "prose"],
        metavar="code,prose")  # fmt: skip
    add("--context", type=_list(str, ("short", "long")), default=["short"], metavar="short,long")
    add("--temperature", type=_list(float), default=[0.0], metavar="0,1")
    add("--new-tokens", type=results_file.count, default=128)
    add(
        "--prompts",
        type=results_file.count,
        default=16,
        help="of a point, at least: small batches run in turn",
    )
    add("--repeats", type=results_file.count, default=3)
    add("--workers", type=results_file.count, default=4, help="programs compiled at a time")
    add("--budget-seconds", type=float, help="start nothing that would take longer than this")
    add("--append", action="store_true", help="keep the other points of the output file")
    add("--plot", action="store_true")
    add("--json", action="store_true", help="print the summary as JSON instead of a table")
    return parser


if __name__ == "__main__":
    main()
