"""Accept length of the acceptance rules under temperature, and the time of the filters.

    python -m benchmarks.sampling [--parts rules filters] [--prompts 64] [--new-tokens 64] [--plot]

Every prompt of every mix is decoded for real with each rule: `coupled` trees and chain, `rejection`
trees, and the chain drawn from the drafter. Then top-k, top-p and min-p, all on, are timed over the
vocabulary of Kimi K2.6. Writes results/sampling.json; a part that is not run keeps its points
there: accept lengths may come from a CPU, times from a GPU, and each point names its device.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import results_file
from benchmarks.prompts import EACH, MIXES, load
from benchmarks.static_batch import cut
from benchmarks.tables import LAW_NAMES
from ddtree_jax import Sampling, Speculation, prefill
from ddtree_jax import load as load_model
from ddtree_jax.generate import Method, completion, decode
from ddtree_jax.loading import Model
from ddtree_jax.sampling import Law, choose, log_law

LAWS = {
    "greedy": {"temperature": 0.0},
    "t0.6": {"temperature": 0.6},
    "t1": {"temperature": 1.0},
    "t1_top_p": {"temperature": 1.0, "top_p": 0.95},
}
PARTS = ("rules", "filters")
BUDGETS, TOP_K = (7, 8, 16, 32), 8
FOREVER = np.iinfo(np.int32).max
VOCAB = 163_840  # of Kimi K2.6
FILTERED = Sampling(0.8, top_k=50, top_p=0.95, min_p=0.02)
DEEP = replace(FILTERED, top_k=1000)  # its threshold lies below the head: found by counting


def main(arguments: list[str] | None = None) -> None:
    parser = results_file.parser(__doc__.split("\n")[0], "sampling")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--prompts", type=int, default=EACH, help="of each mix")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--workers", type=results_file.count, default=1, help="rules at a time")
    parser.add_argument("--rows", type=int, nargs="+", default=[9, 1152], help="filters timed for")
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args(arguments)
    found = {part: kept(args.output, part) for part in PARTS if part not in args.parts}
    if "rules" in args.parts:
        found["rules"] = accept_lengths(args)
    if "filters" in args.parts:
        found["filters"] = [time_filters(r, s) for s in (FILTERED, DEEP) for r in args.rows]
        print(found["filters"])
    device = {"device": jax.devices()[0].device_kind}
    points = [
        {"part": part, **(device if part in args.parts else {}), **point}
        for part in PARTS
        for point in found[part]
    ]
    notes = [
        "rules: real held-out text, every decoding run for real; accept length counts the bonus, "
        "not prefill's token; over all prompts of a mix",
        f"filters: {FILTERED}; deep: top_k={DEEP.top_k}, which is found by counting; vocabulary "
        f"{VOCAB}, random normal float32 logits; microseconds of the choice with all filters on, "
        "less the same without filters; `us_whole` is not reduced",
    ]
    if len(args.parts) < len(PARTS):
        notes.append("machine, versions, commit and date are of the part run last; see `device`")
    summary = summarise(found["rules"], found["filters"])
    results_file.write(args.output, summary, points, notes)
    print(json.dumps(summary, indent=1))
    if args.plot and found["rules"]:
        plot(found["rules"], args.output.with_suffix(".png"))


def kept(path: Path, part: str) -> list[dict]:
    """Points of a part that is not run now, of an earlier run if there was one."""
    if not path.exists():
        return []
    return [p for p in json.loads(path.read_text())["points"] if p["part"] == part]


def accept_lengths(args) -> list[dict]:
    """Points of all mixes, laws and rules."""
    model = load_model(args.model, dtype=args.dtype)
    shared = {
        "model": model.name,
        "dtype": model.weights.dtype,
        "new_tokens": args.new_tokens,
        "block_size": model.drafter_config.block_size,
    }
    points = []
    for mix in MIXES:
        for law in LAWS:
            found = acceptance(model, mix, law, args.prompts, args.new_tokens, args.workers)
            here = {p["name"]: round(p["accept_length"], 3) for p in found}
            print(mix, law, here, flush=True)
            points += [shared | point for point in found]
    return points


def rules(model: Model) -> list[tuple[str, str, Speculation]]:
    """(rule, method, speculation) of everything compared."""
    horizon = model.drafter_config.horizon
    made = [
        ("coupled chain", "dflash", Speculation(horizon, 1)),
        ("sampled chain", "dflash", Speculation(horizon, 1, acceptance="rejection")),
    ]
    for rule in ("coupled", "rejection"):
        made += [(rule, "ddtree", Speculation(b, TOP_K, acceptance=rule)) for b in BUDGETS]
    return made


def acceptance(
    model: Model, mix: str, law: str, prompts: int, new: int, workers: int = 1
) -> list[dict]:
    """One point a rule: all prompts of the mix in one batch, prefilled once."""
    texts = load(mix, prompts)
    samplings = [Sampling(seed=seed, **LAWS[law]) for seed in range(prompts)]
    pool = prefill(model, texts, samplings, new)

    def decoded(rule: str, method: str, speculation: Speculation) -> dict:
        step = Method(method, speculation, model.weights)
        state, _ = decode(model.weights, cut(pool, 0, prompts), step, FOREVER)
        done = [completion(model, state, r, samplings[r], 0, 0.0, step) for r in range(prompts)]
        passes = np.array([c.verify_passes for c in done])
        tokens = np.array([len(c.tokens) - 1 for c in done])
        return {
            "name": rule if method == "dflash" else f"{rule} b{speculation.budget}",
            "mix": mix,
            "law": law,
            "rule": rule,
            "method": method,
            "budget": step.budget,
            "top_k": step.speculation.top_k,
            "prompts": prompts,
            "passes": int(passes.sum()),
            "tokens": int(tokens.sum()),
            "accept_length": float(tokens.sum() / passes.sum()),
            "accept_by_depth": weighted(done, passes, "accept_by_depth"),
            "accept_by_rank": weighted(done, tokens - passes, "accept_by_rank"),
        }

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(decoded, *zip(*rules(model), strict=True)))


def weighted(done, weights, field: str) -> list[float]:
    rows = np.array([getattr(c, field) for c in done])
    return ((rows * weights[:, None]).sum(0) / max(weights.sum(), 1)).tolist()


def time_filters(rows: int, filtered: Sampling, passes: int = 20, repeats: int = 10) -> dict:
    """Microseconds that the filters add to choosing `rows` tokens, in a loop on the device."""
    logits = jax.random.normal(jax.random.key(0), (2, rows, VOCAB), jnp.float32) * 3

    @partial(jax.jit, static_argnames="count")
    def choices(logits, law, count):
        broken = jnp.zeros(rows, bool)

        def body(i, found):
            x = lax.dynamic_index_in_dim(logits, i % 2, keepdims=False)
            x = x + (found[:1, None] < 0)  # every pass waits for the one before
            return choose(log_law(x, law), broken)

        return lax.fori_loop(0, count, body, jnp.zeros(rows, jnp.int32))

    def median(sampling):
        law = Law.of([sampling] * rows)
        run = partial(choices, logits, law, passes)
        jax.block_until_ready([run() for _ in range(3)])
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(run())
            times.append((time.perf_counter() - start) / passes * 1e6)
        return float(np.median(times)), float(np.ptp(times))

    (whole, spread), (bare, _) = median(filtered), median(Sampling(filtered.temperature))
    return {
        "name": f"filters, top_k={filtered.top_k}, {rows} rows",
        "rows": rows,
        "top_k": filtered.top_k,
        "us": whole - bare,
        "us_whole": whole,
        "us_spread": spread,
        "us_limit": 2 * rows * VOCAB * 4 / 4.49e6,  # two passes over the logits at 4.49 TB/s
    }


def mean(points: list[dict], kind: str, rule: str, law: str, budget: int | None = None) -> float:
    """Accept length over the short and the long mix of a kind."""
    found = [
        p
        for p in points
        if p["mix"].startswith(kind)
        and (p["rule"], p["law"]) == (rule, law)
        and budget in (None, p["budget"])
    ]
    return sum(p["tokens"] for p in found) / sum(p["passes"] for p in found)


def summarise(points: list[dict], timed: list[dict]) -> dict:
    deep = {FILTERED.top_k: "", DEEP.top_k: "_deep"}
    times = {f"filter_us_{t['rows']}_rows{deep[t['top_k']]}": t["us"] for t in timed}
    if not points:
        return times
    summary = {
        "coupled_t1_b16": mean(points, "code", "coupled", "t1", 16),
        "rejection_t1_b16": mean(points, "code", "rejection", "t1", 16),
        "sampled_chain_t1": mean(points, "code", "sampled chain", "t1"),
        "coupled_chain_t1": mean(points, "code", "coupled chain", "t1"),
        "greedy_b16": mean(points, "code", "coupled", "greedy", 16),
    }
    return summary | times


def plot(points: list[dict], path: Path) -> None:
    """Accept length over budget for every law and rule, code and prose."""
    from matplotlib import pyplot

    laws = list(LAW_NAMES)
    figure, axes = pyplot.subplots(2, len(laws), figsize=(11, 6), sharex=True, sharey=True)
    for row, kind in zip(axes, ("code", "prose"), strict=True):
        for axis, law in zip(row, laws, strict=True):
            for rule in ("coupled", "rejection"):
                line = [mean(points, kind, rule, law, budget) for budget in BUDGETS]
                axis.plot(BUDGETS, line, "o-", ms=4, label=f"tree, {rule}")
            for rule, style in (("coupled chain", "--"), ("sampled chain", ":")):
                axis.axhline(mean(points, kind, rule, law), color="k", ls=style, lw=1, label=rule)
            axis.set_title(f"{kind}, {LAW_NAMES[law]}")
            axis.set_xscale("log", base=2)
            axis.set_xticks(BUDGETS, BUDGETS)
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("budget (tree nodes)")
    for axis in axes[:, 0]:
        axis.set_ylabel("accept length")
    axes[0, 0].legend(fontsize=8)
    figure.suptitle("At T = 1 coupled trees accept most: kimi-nano, held-out text")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
