"""A decode step of a slice of Kimi K2.6: milliseconds a pass, beside the limit of its bytes.

    python -m benchmarks.step --slice k61-tp8 --requests 1 --context 8192 --widths 1 9

Random weights, no communication (`slices`). Passes run in the on-device loop that `generate` uses,
each with its drafter pass, tree, verification, walk and commit; width 1 is plain decoding. What is
drafted at random is hardly ever accepted, so a pass commits about one token. The limit is, stage by
stage, the longer of reading the bytes at 4.49 TB/s and multiplying at 785 TFLOP/s, with the experts
that uniform routing would touch.
"""

import argparse
import itertools
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from benchmarks import ceilings, results_file
from benchmarks.slices import Slice, check_memory, make_state, make_weights, nbytes, slice_of
from ddtree_jax import Speculation
from ddtree_jax.generate import Method, decode
from ddtree_jax.state import Weights

EXPERT_BYTES = 0.5 + 2 / 32  # of a weight: a nibble, and a bf16 scale for 32


@dataclass(frozen=True)
class Work:
    """Bytes to read or write and operations to do, of one stage."""

    bytes: float
    operations: float

    @property
    def ms(self) -> float:
        return 1e3 * max(self.bytes / ceilings.READ, self.operations / ceilings.MATMUL)


def distinct(experts: int, top: int, rows: int) -> float:
    """Experts that so many rows touch, each `top` of `experts` at random."""
    return experts * (1 - (1 - top / experts) ** rows)


def stages(part: Slice, requests: int, context: int, width: int) -> dict[str, Work]:
    """What a pass of `width` rows a request has to do at least; drafter apart if width is 1."""
    c, rows = part.target, requests * width
    target, drafter = part.shapes()
    dense = sum(
        nbytes(leaf)
        for path, leaf in target.items()
        if not path.startswith(("experts/", "embed_tokens/"))
    )
    heads, latent, value = c.num_attention_heads, c.latent_size, c.kv_lora_rank
    attention = Work(
        requests * context * 2 * latent + rows * heads * 2 * (latent + value),
        2 * rows * heads * (latent + value) * (context + width),
    )
    found = {
        "dense weights": Work(dense, rows * dense),  # 2 operations a weight of 2 bytes
        "attention": Work(
            *(c.num_hidden_layers * x for x in (attention.bytes, attention.operations))
        ),
    }
    if c.num_moe_layers:
        all_rows, k = rows * part.plan.size, c.num_experts_per_tok
        weights = 3 * c.moe_intermediate_size * c.hidden_size
        touched = distinct(c.n_routed_experts, k, all_rows) / part.plan.size
        pairs = all_rows * k / part.plan.size
        found["experts"] = Work(
            c.num_moe_layers * touched * weights * EXPERT_BYTES,
            c.num_moe_layers * pairs * 2 * weights,
        )
    if part.drafter and width > 1:
        d = part.drafter
        read = sum(map(nbytes, drafter.values()))
        seen = sum(
            context if kind == "full_attention" else min(context, d.sliding_window)
            for kind in d.layer_types
        )
        cache = requests * seen * 2 * 2 * d.num_key_value_heads * d.head_dim
        head = nbytes(target["lm_head/weight"])
        block = requests * d.block_size
        found["drafter"] = Work(read + head + cache, block * (read + head))
    return found


def limit_ms(part: Slice, requests: int, context: int, width: int) -> float:
    return sum(work.ms for work in stages(part, requests, context, width).values())


def room_for(passes: int, repeats: int) -> int:
    """Tokens that a request may say, at most: no request ends."""
    return passes * (repeats + 2) * 8


def measure(
    name: str, part: Slice, weights: Weights, requests: int, context: int, width: int, passes: int,
    repeats: int,
) -> dict:  # fmt: skip
    """One point: the median over repeats of a loop of `passes` passes."""
    if width == 1:  # plain decoding knows of no drafter
        part, weights = (
            replace(part, drafter=None),
            replace(weights, drafter=None, drafter_config=None),
        )
        step = Method("autoregressive", Speculation(), weights)
    else:
        step = Method("ddtree", Speculation(width - 1, 4 if width <= 9 else 8), weights)
    state = make_state(part, requests, context, room_for(passes, repeats))
    times, committed = [], 0
    for repeat in range(repeats + 1):
        before = int(state.count.sum())
        start = time.perf_counter()
        state = jax.block_until_ready(decode(weights, state, step, passes))[0]
        if repeat:  # the first compiles
            times.append(1e3 * (time.perf_counter() - start) / passes)
            committed += int(state.count.sum()) - before
    ms, limit = statistics.median(times), limit_ms(part, requests, context, width)
    return {
        "source": name,
        "requests": requests * part.plan.size,
        "context": context,
        "width": width,
        "method": step.method,
        "step_ms": ms,
        "spread": (max(times) - min(times)) / ms,
        "limit_ms": limit,
        "share": limit / ms,
        "accept_length": committed / (passes * repeats * requests),
        "passes": passes,
        "stages_ms": {k: w.ms for k, w in stages(part, requests, context, width).items()},
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "step.json")
    parser.add_argument("--slice", nargs="+", default=["k61-tp8"], help="see benchmarks/slices.py")
    parser.add_argument("--requests", type=results_file.count, nargs="+", default=[1])
    parser.add_argument("--context", type=results_file.count, nargs="+", default=[8192])
    parser.add_argument("--widths", type=results_file.count, nargs="+", default=[1, 9])
    parser.add_argument("--passes", type=results_file.count, default=32)
    parser.add_argument("--repeats", type=results_file.count, default=5)
    args = parser.parse_args(arguments)
    try:
        parts = {name: slice_of(name) for name in args.slice}
        wanted = [
            (name, own_requests(part, requests), context, width)
            for name, part in parts.items()
            for requests, context, width in itertools.product(
                args.requests, args.context, args.widths
            )
        ]
        room, free = room_for(args.passes, args.repeats), free_bytes()
        for name, requests, context, width in wanted:
            check_width(parts[name], width)
            if free is not None:
                check_memory(parts[name], requests, context, room, free)
    except ValueError as problem:
        parser.error(str(problem))
    points = []
    for name, part in parts.items():
        weights = jax.block_until_ready(make_weights(part))
        for case in wanted:
            if case[0] == name:
                point = measure(name, part, weights, *case[1:], args.passes, args.repeats)
                print(json.dumps(point), flush=True)
                points.append(point)
        del weights
    notes = [
        "random weights, no communication: see benchmarks/slices.py",
        "milliseconds a pass in the on-device loop, drafter, tree, walk and commit included",
        "limit: every stage alone at 4.49 TB/s or 785 TFLOP/s, experts touched as by chance",
    ]
    results_file.write(args.output, {}, points, notes)


def own_requests(part: Slice, requests: int) -> int:
    """The device's own of `requests`; raises ValueError if they cannot be shared out evenly."""
    devices = part.plan.size
    if requests % devices:
        raise ValueError(
            f"requests={requests}: must be a multiple of the slice's {devices} devices"
        )
    return requests // devices


def check_width(part: Slice, width: int) -> None:
    if width > 1 and part.drafter is None:
        raise ValueError(f"width={width}: must be 1 for a slice without a drafter")


def free_bytes() -> int | None:
    """Memory that the device will give; None where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


if __name__ == "__main__":
    main()
