"""What many devices cost in a step: what they say to each other, hold, and take for it.

    python -m benchmarks.parallel [--devices 2] [--plans expert tensor data] [--widths 1 9]

Writes results/parallel.json. Collectives and their bytes are read off the compiled program, the
bytes of weights off the devices. Requests are decoded to their end by one on-device loop; prefill
and compilation are not timed.
"""

import argparse
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import prompts as held_out
from benchmarks import results_file
from benchmarks.collectives import Collective, collectives, in_step, table
from benchmarks.static_batch import FOREVER, make_methods, name_of, say
from ddtree_jax import Sampling, prefill
from ddtree_jax import load as load_model
from ddtree_jax.generate import Method, decode
from ddtree_jax.loading import Model
from ddtree_jax.parallel import SPLIT
from ddtree_jax.sharding import fetch, make_mesh, weight_bytes
from ddtree_jax.state import DecodeState


def held(model: Model, devices: list[jax.Device], before: list[int | None]) -> list[int]:
    """Bytes of weights on every device: what its memory grew by since `before` where it tells,
    else the sum of its parts."""
    now = in_use(devices)
    if None not in now:
        return [n - b for n, b in zip(now, before, strict=True)]
    parts = [
        (shard.device, shard.data.nbytes)
        for leaf in jax.tree.leaves((model.weights.target, model.weights.drafter))
        for shard in leaf.addressable_shards
    ]
    return [sum(size for at, size in parts if at == device) for device in devices]


def in_use(devices: list[jax.Device]) -> list[int | None]:
    return [(device.memory_stats() or {}).get("bytes_in_use") for device in devices]


def foretold(model: Model) -> int:
    """Bytes of weights on each device, by shapes alone."""
    weights = model.weights
    configs = [c for c in (weights.config, weights.drafter_config) if c is not None]
    sizes = [weight_bytes(weights.plan, config, weights.dtype) for config in configs]
    return sum(sum(by_path.values()) for by_path in sizes)


def measure(
    model: Model, state: DecodeState, requests: int, methods: dict[tuple, Method], repeats: int
) -> Iterator[dict]:
    """One point a method: collectives of a step, and its time, the median over repeats.

    `state` is a fresh prefill of the requests, which stays as it is.
    """
    devices, passes = model.weights.plan.size, np.int32(FOREVER)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=places)
    for key, method in methods.items():
        program = decode.lower(model.weights, state, method, passes).compile()
        found = collectives(in_step(program.as_text()))
        seconds = []
        for _ in range(repeats + 1):  # the first warms up
            fresh = jax.block_until_ready(copy(state))  # to be donated
            before = time.perf_counter()
            end, _ = jax.block_until_ready(program(model.weights, fresh, passes))
            seconds.append(time.perf_counter() - before)
        counts, loop = fetch(end.count)[:requests], int(fetch(end.passes).max())
        rows = zip(fetch(end.tokens), counts, strict=False)
        median = float(np.median(seconds[1:]))
        yield {
            "source": model.name,
            "dtype": model.weights.dtype,
            "plan": model.weights.plan.name,
            "devices": devices,
            "requests": requests,
            **dict(zip(("method", "budget", "top_k"), key, strict=True)),
            "width": method.budget + 1,
            "collectives": [
                {"kind": op, "arrays": arrays, "count": count,
                 "bytes": count * Collective(op, arrays).bytes}
                for (op, arrays), count in table(found).items()
            ],
            "collectives_per_step": len(found),
            "collective_bytes": sum(c.bytes for c in found),
            "sent_bytes": sum(c.sent(devices) for c in found),
            "passes": loop,
            "step_ms": 1e3 * median / max(loop, 1),
            "spread": float(np.ptp(seconds[1:])) / median,
            "repeats": repeats,
            "tokens": [row[:count].tolist() for row, count in rows],
        }  # fmt: skip


def run(args, mesh: Mesh) -> Iterator[dict]:
    """All points: first those of one device, then each plan's, held against them."""
    texts = held_out.load("code_short", max(args.requests))
    first = {}  # step time and tokens of every case, on one device unless that was left out
    for plan in (None, *args.plans) if args.alone else args.plans:
        split, there = {"mesh": mesh, "plan": plan}, list(mesh.devices.flat)
        if plan is None:
            split, there = {}, there[:1]
        before = in_use(there)
        model = load_model(args.model, dtype=args.dtype, **split)
        sizes = {"weight_bytes": foretold(model), "held_bytes": held(model, there, before)}
        names = [*(["autoregressive"] if 1 in args.widths else []), *args.methods]
        methods = make_methods(model, names, [(w - 1, args.top_k) for w in args.widths if w > 1])
        for requests in args.requests:
            samplings = [Sampling(args.temperature, seed=seed) for seed in range(requests)]
            state = prefill(model, texts[:requests], samplings, args.new_tokens)
            for point in measure(model, state, requests, methods, args.repeats):
                tokens, case = point.pop("tokens"), (requests, name_of(point))
                one, wanted = first.setdefault(case, (point["step_ms"], tokens))
                new = {
                    "new_tokens": args.new_tokens,
                    "one_device_step_ms": one if args.alone else None,
                    "differ": sum(a != b for a, b in zip(tokens, wanted, strict=True)),
                }
                say(f"{plan or 'one device'}, {requests} requests, {name_of(point)}: "
                    f"{point['collectives_per_step']} collectives")  # fmt: skip
                yield point | new | sizes
        del model, state  # before the next plan's weights are counted


def summarise(points: list[dict]) -> dict:
    """Flat: PLAN_weight_bytes, and for every case PLAN_NAME_cC of collectives, bytes, step time."""
    summary = {}
    for point in points:
        plan = point["plan"] or "one"
        summary[f"{plan}_weight_bytes"] = point["weight_bytes"]
        for field in ("collectives_per_step", "collective_bytes", "step_ms"):
            summary[f"{plan}_{name_of(point)}_c{point['requests']}_{field}"] = point[field]
    summary["requests_run"] = sum(p["requests"] for p in points)
    summary["requests_differ"] = sum(p["differ"] for p in points)
    return summary


def make_notes(args, points: list[dict]) -> list[str]:
    device = jax.devices()[0]
    notes = [
        f"{args.devices} of {device.device_kind}; weights of {points[0]['source']}, dtype "
        f"{points[0]['dtype']}, held-out code, T = {args.temperature:g}, {args.new_tokens} new "
        f"tokens, {args.repeats} repeats, medians; prefill and compilation left out",
        "collectives are those in the loop of the compiled program; bytes: what each device holds "
        "after them; sent_bytes: what it sends at the least, if no switch adds up",
        "differ: requests whose tokens are not those of one device with the same method"
        + ("" if args.alone else f" (here of {args.plans[0]}: one device was left out)"),
    ]
    if device.platform == "cpu":
        notes.append(
            "timed on a CPU, whose devices share its cores: these times are no results, and say "
            "nothing about a GPU"
        )
    return notes


def main(arguments: list[str] | None = None) -> None:
    parser = results_file.parser(__doc__.split("\n")[0], "parallel")
    add, count = parser.add_argument, results_file.count
    add("--devices", type=int, default=2)
    add("--alone", action=argparse.BooleanOptionalAction, default=True,
        help="also on one device, if the model fits there")  # fmt: skip
    add("--plans", nargs="+", choices=list(SPLIT), default=list(SPLIT))
    add("--methods", nargs="+", choices=("dflash", "ddtree"), default=["dflash", "ddtree"],
        help="besides plain decoding, which is width 1")  # fmt: skip
    add("--widths", nargs="+", type=count, default=[1, 5, 9, 17, 33],
        help="rows a request of the trees, root counted")  # fmt: skip
    add("--top-k", type=count, default=4)
    add("--requests", nargs="+", type=count, default=[1, 8])
    add("--temperature", type=float, default=0.0)
    add("--new-tokens", type=count, default=64)
    add("--repeats", type=count, default=5)
    args = parser.parse_args(arguments)
    mesh, points = make_mesh(args.devices), []
    for point in run(args, mesh):  # written after every point: a run cut short leaves some
        points.append(point)
        results_file.write(args.output, summarise(points), points, make_notes(args, points))


if __name__ == "__main__":
    main()
