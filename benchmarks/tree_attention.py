"""Tree attention alone: microseconds a call and shares of the limit, on an NVIDIA GPU.

    python -m benchmarks.tree_attention                 # choose configs, measure all points
    python -m benchmarks.tree_attention --stage check   # two small points, a minute

A call is all that a layer needs beside the plan: the gather of the trees' latents and both kernels.
Plans are made before, once a pass, as engines make their metadata. Calls run in one jitted
program, one after the other over as many layers of a random pool as exceed the L2 cache several
times, which XLA replays as a CUDA graph.
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ceilings, results_file
from benchmarks.ahead import build
from ddtree_jax.pallas.tree_attention import BEST, Config, make_plan, tree_attention
from ddtree_jax.pallas.tree_attention_reference import tree_attention_reference

D, VALUE, PAGE, SCALE = 576, 512, 64, 192**-0.5
L2 = 60 << 20
CALLS = 4, 48  # of a program: as many as last a millisecond, so that no call waits for the host


@dataclass(frozen=True)
class Point:
    """A measured shape."""

    requests: int
    context: int
    width: int
    heads: int = 64

    @property
    def limit_us(self) -> float:
        rows = self.requests * self.width
        size = self.requests * self.context * 2 * D + rows * self.heads * 2 * (D + VALUE)
        work = 2 * rows * self.heads * (D + VALUE) * (self.context + self.width)
        return 1e6 * max(size / ceilings.READ, work / ceilings.MATMUL)

    @property
    def kind(self) -> tuple[int, bool]:
        """The class of shapes one config serves: a key of `BEST`."""
        return self.heads, self.width == 1


def points(shapes: Sequence[tuple[int, int]], widths: Sequence[int], heads: int) -> list[Point]:
    return [Point(r, s, n, heads) for r, s in shapes for n in widths]


LARGE = ((1, 32768), (8, 8192), (32, 2048), (32, 8192), (128, 2048))
TREES = points(LARGE, (9, 17, 33), 64)
SMALL = points(((1, 8192),), (9, 17, 33), 64)
ONE_ROW = points(((32, 8192), (128, 2048), (8, 8192), (32, 2048), (1, 8192)), (1,), 64)
EIGHT_HEADS = points(((32, 8192), (1, 8192)), (1, 9, 17, 33), 8)
ALL = TREES + SMALL + ONE_ROW + EIGHT_HEADS
MASK = Point(32, 8192, 17)
CHECKED = [Point(1, 8192, 9), Point(1, 8192, 9, 8)]
SCREENED = [
    Point(1, 8192, 9), Point(1, 8192, 33), Point(8, 8192, 17), Point(32, 8192, 9),
    Point(1, 8192, 1), Point(32, 8192, 1), Point(1, 8192, 9, 8), Point(32, 8192, 9, 8),
    Point(1, 8192, 1, 8), Point(32, 8192, 1, 8),
]  # fmt: skip
CONFIGS = [
    Config(least_share=share, merge_together=together)
    for share in (1, 2, 4, 8)
    for together in (8, 16, 32)
]


def random_words(rng: np.random.Generator, requests: int, width: int) -> np.ndarray:
    """Ancestor words of random trees of depth at most 7, a different one for every request."""
    words = np.zeros((requests, width, -(-width // 32)), np.uint32)
    depth = np.zeros((requests, width), int)
    every = np.arange(requests)
    for i in range(width):
        if i:
            order = rng.permuted(np.tile(np.arange(i), (requests, 1)), axis=1)
            fits = np.take_along_axis(depth, order, 1) < 7
            parent = order[every, fits.argmax(axis=1)]
            depth[:, i] = depth[every, parent] + 1
            words[:, i] = words[every, parent]
        words[:, i, i // 32] |= np.uint32(1 << (i % 32))
    return words.reshape(requests * width, -1)


def inputs(point: Point, seed: int = 0) -> tuple:
    """Arguments of attention without the layer: random data, pages in random order."""
    r, n = point.requests, point.width
    pages = point.context // PAGE
    layers = max(2, -(-4 * L2 // (r * point.context * 2 * D)))
    calls = calls_of(point, layers)
    rng = np.random.default_rng([seed, r, n, point.context])
    keys = jax.random.split(jax.random.key(seed), 3)
    draw = jax.jit(partial(jax.random.normal, dtype=jnp.bfloat16), static_argnums=1)
    return (
        draw(keys[0], (r * n, point.heads, D)),
        draw(keys[1], (calls, r * n, D)),  # no two calls alike: XLA would make them one
        draw(keys[2], (layers, r * pages, PAGE, D)),
        jnp.asarray(rng.permutation(r * pages).reshape(r, pages), jnp.int32),
        jnp.full(r, point.context, jnp.int32),
        jnp.arange(r + 1, dtype=jnp.int32) * n,
        jnp.asarray(random_words(rng, r, n)),
    )


def planner(point: Point, config: Config) -> Callable:
    """The plan of block tables' width, lengths, rows and words."""

    def run(*arguments):
        _, _, _, tables, lengths, row_start, words = arguments
        return make_plan(
            lengths, row_start, words, heads=point.heads, pages=tables.shape[1],
            max_rows=point.width, config=config,
        )  # fmt: skip

    return jax.jit(run, keep_unused=True)


def calls_of(point: Point, layers: int) -> int:
    """Attentions of a program: every layer at least once."""
    least, most = CALLS
    return max(layers, least, min(most, int(1000 / point.limit_us)))


def program(point: Point, config: Config, masked: bool) -> Callable:
    """An attention with each of `latents`, over the layers of the pool in turn; all are kept."""

    def run(plan, queries, latents, pool, *rest):
        keywords = dict(max_rows=point.width, config=config, plan=plan, masked=masked)
        keywords |= dict(scale=SCALE, value_size=VALUE)
        return [
            tree_attention(queries, own, pool, i % pool.shape[0], *rest, **keywords)[0]
            for i, own in enumerate(latents)
        ]

    return jax.jit(run)


@dataclass
class Timed:
    """A compiled program with its inputs."""

    point: Point
    config: Config
    run: Callable
    arguments: tuple
    calls: int

    def sample(self, seconds: float = 0.02) -> float:
        """Microseconds a call, mean over about `seconds`."""
        once = self.point.limit_us * self.calls * 1e-6
        times = max(2, round(seconds / once))
        start = time.perf_counter()
        for _ in range(times):
            out = self.run(*self.arguments)
        jax.block_until_ready(out)
        return 1e6 * (time.perf_counter() - start) / (times * self.calls)

    def warm_up(self) -> None:
        """The first runs launch kernel by kernel, then the graph is made."""
        for _ in range(6):
            jax.block_until_ready(self.run(*self.arguments))


def name_of(kind: str, point: Point, config: Config | None = None, masked: bool = True) -> str:
    """The file of a program that was compiled ahead."""
    sizes = f"{kind}_r{point.requests}_s{point.context}_n{point.width}_h{point.heads}"
    settings = "" if config is None else "_" + "_".join(map(str, dataclasses.astuple(config)))
    return sizes + settings + ("" if masked else "_bare")


def prepare(
    point: Point, config: Config, arguments: tuple, masked: bool = True, folder: Path | None = None
) -> Timed:
    plan = build(planner(point, config), arguments, name_of("plan", point, config), folder)
    plan = plan(*arguments)
    run = program(point, config, masked)
    run = build(run, (plan, *arguments), name_of("calls", point, config, masked), folder)
    return Timed(point, config, run, (plan, *arguments), calls=len(arguments[1]))


def prepare_both(
    point: Point, config: Config, arguments: tuple, folder: Path | None
) -> tuple[Timed, Callable]:
    """The program and the reference's: many are compiled side by side."""
    expected = build(reference(point), arguments, name_of("reference", point), folder)
    return prepare(point, config, arguments, folder=folder), expected


def in_turn(programs: Sequence[Timed], samples: int) -> list[list[float]]:
    """Samples of all programs, taken forwards and backwards in turn."""
    for timed in programs:
        timed.warm_up()
    taken = [[] for _ in programs]
    for i in range(samples):
        order = range(len(programs))
        for k in order if i % 2 == 0 else reversed(order):
            taken[k].append(programs[k].sample())
    return taken


def reference(point: Point) -> Callable:
    """The reference in float32, of the first layer and the first latents."""

    def run(queries, latents, pool, *rest):
        wide = [x.astype(jnp.float32) for x in (queries, latents[0], pool[:1])]
        keywords = dict(scale=SCALE, value_size=VALUE, max_rows=point.width)
        return tree_attention_reference(wide[0], wide[1], wide[2], 0, *rest, **keywords)[0]

    return jax.jit(run)


def max_rel_error(timed: Timed, reference: Callable) -> float:
    """Largest error of a row's head over the row's norm, against the reference in float32."""
    out = timed.run(*timed.arguments)[0].astype(jnp.float32)
    wanted = reference(*timed.arguments[1:])
    error = jnp.linalg.norm(out - wanted, axis=-1) / jnp.linalg.norm(wanted, axis=-1)
    return float(error.max())  # NaN stays NaN


def as_point(timed: Timed, samples: list[float], error: float) -> dict:
    us = statistics.median(samples)
    if us < 0.95 * timed.point.limit_us:
        raise RuntimeError(f"{timed.point}: {us} us is below the limit, so work was left out")
    return dataclasses.asdict(timed.point) | {
        "us": us,
        "max_rel_error": error,
        "limit_us": timed.point.limit_us,
        "share": timed.point.limit_us / us,
        "spread": (max(samples) - min(samples)) / us,
        "config": dataclasses.asdict(timed.config),
    }


def choose(
    configs: Iterable[Config], workers: int, log: Callable, enough: Callable[[], bool]
) -> dict[tuple, Config]:
    """The config with the least product of times over the screened points of each class.

    No point is begun once `enough()`.
    """
    configs, product = list(configs), {}
    for point in SCREENED:
        if enough():
            log(point, None, "and what follows: left out")
            break
        arguments = inputs(point)

        def attempt(config, point=point, arguments=arguments):
            try:
                return prepare(point, config, arguments)
            except Exception as problem:  # a config may not fit a shape; say so and go on
                return f"{type(problem).__name__}: {str(problem)[:200]}"

        with ThreadPoolExecutor(workers) as pool:
            made = list(pool.map(attempt, configs))
        programs = [timed for timed in made if isinstance(timed, Timed)]
        taken = iter(in_turn(programs, 3))
        for config, timed in zip(configs, made, strict=True):
            key = (point.kind, config)
            if not isinstance(timed, Timed):
                log(point, config, timed)
                product[key] = float("inf")
                continue
            us = statistics.median(next(taken))
            log(point, config, f"{us:8.1f} us  share {point.limit_us / us:.3f}")
            product[key] = product.get(key, 1.0) * us
    kinds = {kind for kind, _ in product}
    return {kind: min(configs, key=lambda c, k=kind: product[k, c]) for kind in kinds}


def measure(
    wanted: Sequence[Point], chosen: dict[tuple, Config], workers: int, log: Callable,
    folder: Path | None = None,
):  # fmt: skip
    """Check and time every point with the config of its class; yields result points."""
    for batch in itertools.batched(wanted, workers):
        made = [inputs(point) for point in batch]
        with ThreadPoolExecutor(workers) as pool:
            jobs = [
                pool.submit(
                    prepare_both, point, chosen.get(point.kind, Config()), arguments, folder
                )
                for point, arguments in zip(batch, made, strict=True)
            ]
            programs = [job.result() for job in jobs]
        for timed, wanted in programs:
            error = max_rel_error(timed, wanted)
            [samples] = in_turn([timed], 9)
            found = as_point(timed, samples, error)
            log(timed.point, "", f"{found['us']:8.1f} us  share {found['share']:.3f}  {error:.1e}")
            yield found


def mask_cost(config: Config, folder: Path | None = None) -> float:
    """Time of the mask and the lengths over the same kernel without them."""
    arguments = inputs(MASK)
    programs = [prepare(MASK, config, arguments, masked, folder) for masked in (True, False)]
    masked, bare = (statistics.median(samples) for samples in in_turn(programs, 12))
    return masked / bare - 1


def summarize(found: Sequence[dict], cost: float | None) -> dict:
    def of(wanted: Iterable[Point], key: str) -> list[float]:
        names = ("requests", "context", "width", "heads")
        by_point = {Point(*(p[name] for name in names)): p[key] for p in found}
        return [by_point[point] for point in wanted if point in by_point]

    def first(point: Point) -> float | None:
        return next(iter(of([point], "us")), None)

    shares = of(TREES, "share")
    one = of(ONE_ROW[:2], "share")
    return {
        "share_geomean": statistics.geometric_mean(shares) if shares else None,
        "share_min": min(shares, default=None),
        "us_1x8k_n9": first(Point(1, 8192, 9)),
        "us_1x8k_n17": first(Point(1, 8192, 17)),
        "us_1x8k_n33": first(Point(1, 8192, 33)),
        "share_n1_min": min(one, default=None),
        "mask_cost": cost,
        "us_8heads_1x8k_n1": first(Point(1, 8192, 1, 8)),
        "us_8heads_1x8k_n9": first(Point(1, 8192, 9, 8)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "tree_attention.json")
    parser.add_argument(
        "--stage", choices=("check", "choose", "mask", "measure", "all"), default="all"
    )
    parser.add_argument("--workers", type=int, default=6, help="programs compiled at a time")
    parser.add_argument(
        "--budget-seconds", type=float, default=float("inf"), help="begin no point after so long"
    )
    parser.add_argument(
        "--programs", type=Path, help="folder of programs compiled ahead (benchmarks/ahead.py)"
    )
    args = parser.parse_args(arguments)
    if args.programs and args.stage in ("choose", "all"):
        parser.error(f"--programs goes with check, mask and measure, not with {args.stage}")
    if args.stage in ("check", "mask") and args.budget_seconds != float("inf"):
        parser.error(f"--budget-seconds {args.budget_seconds:g} goes with choose, measure and all")
    start = time.monotonic()

    def enough(share: float = 1.0) -> bool:
        return time.monotonic() - start > share * args.budget_seconds

    def log(point: Point, config, text) -> None:
        changed = {
            f.name: value
            for f in (dataclasses.fields(config) if config else ())
            if (value := getattr(config, f.name)) != f.default
        }
        where = f"{point.requests:4}x{point.context:<6} n{point.width:<3} h{point.heads:<3}"
        print(f"{time.monotonic() - start:6.1f}s {where} {text}  {changed or ''}", flush=True)

    if args.stage == "check":
        list(measure(CHECKED, BEST, args.workers, log, args.programs))
        return
    before = ceilings.measure()
    chosen = dict(BEST)
    if args.stage in ("choose", "all"):
        share = 1.0 if args.stage == "choose" else 0.6  # the rest is for measuring
        chosen |= choose(CONFIGS, args.workers, log, partial(enough, share))
        for kind, config in sorted(chosen.items()):
            print(f"    {kind}: {config},")
    if args.stage == "choose":
        return
    if args.stage == "mask":
        print("mask costs", mask_cost(chosen.get(MASK.kind, Config()), args.programs))
        return
    found, cost = [], None
    for point in measure(ALL, chosen, args.workers, log, args.programs):
        found.append(point)
        write(args.output, found, cost, {"ceilings_before": before})
        if enough():
            break
    else:
        cost = mask_cost(chosen.get(MASK.kind, Config()), args.programs)
    after = ceilings.measure()
    write(args.output, found, cost, {"ceilings_before": before, "ceilings_after": after})
    print(summarize(found, cost))


def write(path: Path, found: list[dict], cost: float | None, measured: dict) -> None:
    notes = [
        "random data; the plan is made outside the timed program, once a pass",
        f"shares of max(bytes / {ceilings.READ:.3g}, operations / {ceilings.MATMUL:.3g})",
    ]
    results_file.write(path, summarize(found, cost), found, notes, measured)


if __name__ == "__main__":
    main()
