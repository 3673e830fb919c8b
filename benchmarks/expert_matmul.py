"""Routed experts of one Kimi K2.6 layer: the INT4 grouped matmul against the read limit.

    python -m benchmarks.expert_matmul                 the points, the shipped configurations
    python -m benchmarks.expert_matmul --configs       also others, to choose what to ship

A time is that of the whole routed layer given router ids and weights: work list and sorted rows,
gate + up + SwiGLU, down, sum over the eight choices; the router itself is not in it. One jitted
call runs several routings in turn, each layer's rows depending on the layer before, so XLA replays
them as a command buffer; calls are dispatched without waiting. A limit is the bytes of the experts
the routings really touch, scales included, over 4.49 TB/s.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ceilings, results_file
from benchmarks.slices import random_records
from ddtree_jax.pallas.expert_config import ExpertConfig, choose_config
from ddtree_jax.pallas.expert_matmul import expert_mlp_kernel, expert_mlp_reference
from ddtree_jax.pallas.expert_weights import Records, records_shape

EXPERTS, TOP, HIDDEN, WIDTH, SLICE = 384, 8, 7168, 2048, 256
CHECKED = 64  # rows compared with the float32 reference
PREFILL = 8192
WANTED = (1, 9, 17, 33, 65, 288, 1152)


@dataclass(frozen=True)
class Case:
    rows: int
    expert_width: int = WIDTH
    routing: str = "uniform"


CASES = (
    *(Case(m) for m in WANTED),
    *(Case(m, routing="skewed") for m in (9, 33, 65, 288)),
    Case(1, SLICE),
    Case(9, SLICE),
    Case(PREFILL),
)


def draw_records(seed: int, experts: int, width: int, hidden: int, layers: int = 1):
    """Random gate, up and down in records, made expert by expert where they will stay."""

    def draw(key, part: str, out: int, inner: int):
        return random_records(key, (layers, experts, *records_shape(part, out, inner)), inner)

    keys = jax.random.split(jax.random.key(seed))
    both, down = draw(keys[0], "gate", width, hidden), draw(keys[1], "down", hidden, width)
    return Records(both, "gate"), Records(both, "up"), Records(down, "down")


def draw_routing(rng: np.random.Generator, rows: int, routing: str) -> np.ndarray:
    """ids [rows, 8]; skewed: probability falls as (rank + 10)^-0.9, ranks drawn anew each time."""
    chances = np.ones(EXPERTS) if routing == "uniform" else (np.arange(EXPERTS) + 10.0) ** -0.9
    # Top 8 of log p + Gumbel noise: 8 draws without replacement.
    scores = np.log(rng.permutation(chances))[None] + rng.gumbel(size=(rows, EXPERTS))
    return np.argsort(-scores, axis=1)[:, :TOP].astype(np.int32)


def layers_in_turn(config: ExpertConfig | None):
    """One call over several routings; each layer's rows wait for the layer before."""

    def run(x, weights, ids, shares):
        gate, up, down = weights
        carry = x[0]
        for i in range(len(ids)):
            out = expert_mlp_kernel(carry, gate, up, down, 0, ids[i], shares[i], config=config)
            carry = x[(i + 1) % len(x)] + out * jnp.bfloat16(1e-30)
        return carry

    return jax.jit(run)


def measure(case: Case, weights, config: ExpertConfig | None, reference, samples: int) -> dict:
    """Microseconds of a layer and the largest relative error of a row."""
    rng = np.random.default_rng(1000 * case.rows + len(case.routing))
    turns = 8 if case.rows <= 65 else 4
    ids = np.stack([draw_routing(rng, case.rows, case.routing) for _ in range(turns)])
    shares = rng.uniform(0.5, 1.5, ids.shape).astype(np.float32)
    shares *= 2.5 / shares.sum(axis=-1, keepdims=True)
    x = jax.random.normal(jax.random.key(case.rows), (turns, case.rows, HIDDEN), jnp.bfloat16)
    inputs = list(x), weights, list(map(jnp.asarray, ids)), list(map(jnp.asarray, shares))
    error = relative_error(case, weights, config, reference, x[0], ids[0], shares[0])
    run = layers_in_turn(config)
    start = time.perf_counter()
    for _ in range(6):  # thunks first, then the command buffer is made
        jax.block_until_ready(run(*inputs))
    begun = time.perf_counter()
    jax.block_until_ready(run(*inputs))
    calls = max(2, int(0.03 / (time.perf_counter() - begun)))
    seconds = []
    for _ in range(samples):
        began = time.perf_counter()
        for _ in range(calls):
            last = run(*inputs)
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - began) / calls / turns)
    distinct = float(np.mean([len(np.unique(i)) for i in ids]))
    us = float(np.median(seconds)) * 1e6
    limit = distinct * expert_bytes(case.expert_width) / ceilings.READ * 1e6
    used = config or choose_config(case.rows * TOP, EXPERTS, True)
    return {
        **asdict(case),
        "distinct_experts": distinct,
        "us": us,
        "max_rel_error": error,
        "limit_us": limit,
        "share": limit / us,
        "tflops": case.rows * TOP * 6 * HIDDEN * case.expert_width / us / 1e6,
        "spread": (max(seconds) - min(seconds)) * 1e6 / us,
        "compile_s": begun - start,
        "config": asdict(used),
    }


def expert_bytes(width: int) -> float:
    return 3 * width * HIDDEN * (0.5 + 2 / 32)


def relative_error(case, weights, config, reference, x, ids, shares) -> float:
    """Largest |row - reference| / |reference| over the first rows, against float32."""
    run = jax.jit(partial(expert_mlp_kernel, config=config))
    got = run(x, *weights, 0, jnp.asarray(ids), jnp.asarray(shares))
    some = min(case.rows, CHECKED)
    pad = ((0, CHECKED - some), (0, 0))
    ids = np.pad(ids[:some], pad, constant_values=EXPERTS)
    wide = jnp.pad(x[:some].astype(jnp.float32), pad)
    expected = reference(wide, *weights, 0, jnp.asarray(ids), jnp.pad(shares[:some], pad))[:some]
    off = jnp.linalg.norm(got[:some].astype(jnp.float32) - expected, axis=1)
    return float((off / jnp.linalg.norm(expected, axis=1)).max())


def alternatives(case: Case) -> list[ExpertConfig]:
    """What might be faster than what is shipped.

    ptxas finds registers enough for all of these (scripts/compile_for_h200.py); the wgmma of
    (64, 128) it would serialise.
    """
    few = [
        ExpertConfig((8,), balance=False),
        ExpertConfig((8,), scale="weight"),
        ExpertConfig((8,), scale="group"),
        ExpertConfig((8,), stages=10),
        ExpertConfig((8, 16)),
    ]
    some = [ExpertConfig((8,)), ExpertConfig((16,)), ExpertConfig((8, 16, 32), stages=6)]
    many = [
        ExpertConfig((16, 24, 32, 40), stages=5),
        ExpertConfig((16, 24, 32), stages=6),
        ExpertConfig((24, 40), stages=5),
    ]
    most = [
        ExpertConfig((64,), stages=5),
        ExpertConfig((16, 64), stages=5),
        ExpertConfig((96,), stages=4),
        ExpertConfig((16, 96), stages=4),
        ExpertConfig((128,), stages=3),
    ]
    found = few if case.rows <= 65 else some if case.rows <= 288 else many
    return most if case.rows > 1152 else found


def summarise(points: list[dict]) -> dict[str, float]:
    share = {(p["rows"], p["expert_width"], p["routing"]): p["share"] for p in points}
    summary = {f"share_m{m}": share[m, WIDTH, "uniform"] for m in WANTED}
    summary |= {f"share_w{SLICE}_m{m}": share[m, SLICE, "uniform"] for m in (1, 9)}
    skewed = [m for m, width, routing in share if routing == "skewed"]
    ratios = [share[m, WIDTH, "skewed"] / share[m, WIDTH, "uniform"] for m in skewed]
    prefill = next(p["tflops"] for p in points if p["rows"] == PREFILL)
    return summary | {
        "skew_ratio_min": min(ratios),
        f"prefill_{PREFILL}": prefill * 1e12 / ceilings.MATMUL,
    }


NOTES = [
    "random INT4 weights with bf16 scales of one K2.6 layer (one rank of eight: width 256)",
    "us: work list, sorted rows, gate + up + SwiGLU, down, sum over choices; not the router",
    "several routings a call, rows depending on the layer before, XLA's default command buffers",
    "share: bytes of touched experts over 4.49 TB/s, over us; prefill: share of 785 TFLOP/s",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "expert_matmul.json")
    parser.add_argument("--configs", action="store_true", help="also time other configurations")
    parser.add_argument(
        "--seconds", type=float, default=200, help="start no other configuration after so long"
    )
    parser.add_argument("--rows", type=int, nargs="*", help="only these row counts; writes nothing")
    parser.add_argument("--samples", type=int, default=7)
    options = parser.parse_args()
    cases = [c for c in CASES if not options.rows or c.rows in options.rows]
    begun, before = time.perf_counter(), ceilings.measure()
    print(before, flush=True)
    weights = {
        w: jax.block_until_ready(draw_records(w, EXPERTS, w, HIDDEN)) for w in (WIDTH, SLICE)
    }
    reference = jax.jit(expert_mlp_reference)
    points, others = [], []
    for case in cases:
        tried = [None, *(alternatives(case) if options.configs else ())]
        for config in tried:
            if config is not None and time.perf_counter() - begun > options.seconds:
                break
            try:
                point = measure(
                    case, weights[case.expert_width], config, reference, options.samples
                )
            except Exception as error:  # a configuration that fails must not end the run
                print(case, config, type(error).__name__, str(error)[:300], flush=True)
                if config is None:
                    raise
                continue
            (points if config is None else others).append(point)
            show(point)
    if options.rows:
        return
    summary, after = summarise(points), ceilings.measure()
    print(summary, after)
    kept = {"ceilings_before": before, "ceilings_after": after}
    results_file.write(options.output, summary, points, NOTES, kept)
    if others:
        path = options.output.with_name(options.output.stem + "_configs.json")
        results_file.write(path, {}, points + others, NOTES, kept)


def show(point: dict) -> None:
    config = ExpertConfig(**{**point["config"], "tiles": tuple(point["config"]["tiles"])})
    print(
        f"M {point['rows']:5d} width {point['expert_width']:4d} {point['routing']:7s} "
        f"experts {point['distinct_experts']:5.1f} {point['us']:8.1f} us "
        f"limit {point['limit_us']:7.1f} share {point['share']:.3f} "
        f"{point['tflops']:6.1f} TFLOP/s error {point['max_rel_error']:.1e} "
        f"spread {point['spread']:.2f} {config.tiles} {config.scale} "
        f"{config.stages} stages {config.warpgroups} warpgroups"
        f"{'' if config.balance else ' unbalanced'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
