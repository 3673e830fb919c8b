"""Accept length of chain and trees on held-out text: budgets, top-k, mixes, temperatures.

    python -m benchmarks.acceptance [--prompts 64] [--new-tokens 64] [--plot]

Writes results/acceptance.json. Accept length is committed tokens per verify pass over all prompts
of a mix, the bonus counted, the token that prefill samples not.
"""

import json
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from benchmarks import results_file
from benchmarks.prompts import EACH, MIXES, load
from benchmarks.traces import Trace, record, replay
from ddtree_jax import Sampling, Speculation, generate
from ddtree_jax import load as load_model
from ddtree_jax.loading import Model
from ddtree_jax.model.attention import expanded_attention

BUDGETS, TOP_KS = (4, 7, 8, 16, 32, 64), (1, 2, 4, 8)
TEMPERATURES = {"greedy": 0.0, "t1": 1.0}


def main() -> None:
    parser = results_file.parser(__doc__.split("\n")[0], "acceptance")
    parser.add_argument("--prompts", type=int, default=EACH, help="of each mix")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--checks", type=int, default=4, help="prompts decoded for real, a mix")
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    points, traces, checks = [], {}, {"prompts": 0, "differ": 0}
    for mix in MIXES:
        texts = load(mix, args.prompts)
        for name, temperature in TEMPERATURES.items():
            samplings = [Sampling(temperature, seed=seed) for seed in range(len(texts))]
            trace = record(model, texts, samplings, args.new_tokens, max(TOP_KS), args.batch)
            traces[mix, name] = trace
            points += measure(model, mix, name, trace)
            for key, value in check(model, texts, samplings, trace, args).items():
                checks[key] += value
            print(mix, name, {p["name"]: round(p["accept_length"], 3) for p in points[-25:]})
    summary = summarise(model, traces, args.prompts)
    summary |= {"real_decodings": checks["prompts"], "real_decodings_differ": checks["differ"]}
    notes = [
        "real held-out text; accept length counts the bonus, not prefill's token",
        f"each (budget, top-k) replayed on a recording of plain decoding; {checks['prompts']} "
        f"prompt decodings run for real, {checks['differ']} with another number of passes",
        f"{model.name}, dtype {model.weights.dtype}, {args.new_tokens} new tokens, block size "
        f"{model.drafter_config.block_size}",
    ]
    results_file.write(args.output, summary, points, notes)
    print(json.dumps(summary, indent=1))
    if args.plot:
        plot(points, args.output.with_suffix(".png"))


def settings(horizon: int) -> list[tuple[str, int, int]]:
    """(method, budget, top-k): the chain, then all trees."""
    return [("dflash", horizon, 1), *(("ddtree", b, k) for b in BUDGETS for k in TOP_KS)]


def measure(model: Model, mix: str, temperature: str, trace: Trace) -> list[dict]:
    sound = ~repeats(trace)
    points = []
    for method, budget, top_k in settings(model.drafter_config.horizon):
        found = replay(trace, budget, top_k)
        points.append(
            {
                "name": method if method == "dflash" else f"b{budget}k{top_k}",
                "mix": mix,
                "temperature": TEMPERATURES[temperature],
                "method": method,
                "budget": budget,
                "top_k": top_k,
                "prompts": len(trace.count),
                "accept_length": found.accept_length,
                "accept_length_mean_of_prompts": float(found.by_prompt[found.passes > 0].mean()),
                "accept_length_without_repeats": found.only(sound).accept_length,
                "accept_by_depth": (found.hits.sum(0) / found.passes.sum()).tolist(),
            }
        )
    return points


def check(model: Model, texts, samplings, trace: Trace, args) -> dict:
    """Decode some prompts with the real steps; count those whose passes differ from the replay."""
    differ = done = 0
    chosen = slice(0, args.checks)
    horizon = model.drafter_config.horizon
    for method, budget, top_k in (("dflash", horizon, 1), ("ddtree", 8, 4), ("ddtree", 16, 8)):
        expected = replay(trace, budget, top_k)
        out = generate(
            model, texts[chosen], method, Speculation(budget, top_k), samplings[chosen],
            args.new_tokens,
        )  # fmt: skip
        for r, completion in enumerate(out):
            done += 1
            same = completion.tokens == trace.said[r, : trace.count[r]].tolist()
            differ += not same or completion.verify_passes != int(expected.passes[r])
    return {"prompts": done, "differ": differ}


def summarise(model: Model, traces: dict, prompts: int) -> dict:
    horizon = model.drafter_config.horizon
    rows = {"chain": (horizon, 1), "ddtree_b7_k4": (7, 4), "ddtree_b8_k4": (8, 4),
            "ddtree_b16_k8": (16, 8), "ddtree_b32_k8": (32, 8)}  # fmt: skip
    summary, replays = {}, {}
    for kind in ("code", "prose"):
        for name in TEMPERATURES:
            both = joined([traces[f"{kind}_{size}", name] for size in ("short", "long")])
            for row, (budget, top_k) in rows.items():
                replays[row, name, kind] = replay(both, budget, top_k)
                summary[f"{row}_{name}_{kind}"] = replays[row, name, kind].accept_length
    for name in TEMPERATURES:
        suffix = "" if name == "greedy" else "_t1"
        for row, short in (("ddtree_b16_k8", "b16"), ("ddtree_b32_k8", "b32")):
            chain, tree = replays["chain", name, "code"], replays[row, name, "code"]
            summary[f"ddtree_{short}_over_chain_code{suffix}"] = (
                tree.accept_length / chain.accept_length
            )
            summary[f"paired_p_{short}{suffix}"] = paired_p(tree, chain)
            prose = replays[row, name, "prose"], replays["chain", name, "prose"]
            summary[f"paired_p_{short}{suffix}_prose"] = paired_p(*prose)
        same = replays["ddtree_b7_k4", name, "code"], replays["chain", name, "code"]
        summary[f"ddtree_b7_over_chain_code{suffix}"] = (
            same[0].accept_length / same[1].accept_length
        )
        summary[f"paired_p_b7{suffix}"] = paired_p(*same)
    looping = [repeats(trace) for trace in traces.values()]
    summary["repeat8_fraction"] = float(np.concatenate(looping).mean())
    for name in TEMPERATURES:
        part = [t for (_, temperature), t in traces.items() if temperature == name]
        summary[f"repeat8_fraction_{name}"] = float(np.concatenate(list(map(repeats, part))).mean())
        ended = np.concatenate([t.count < t.said.shape[1] for t in part])
        summary[f"ended_early_fraction_{name}"] = float(ended.mean())
    length = max(int(trace.count.max()) for trace in traces.values())
    summary["repeat8_fraction_of_real_text"] = real_repeats(model, length, prompts)
    for kind in ("code", "prose"):
        texts = [t for size in ("long", "short") for t in load(f"{kind}_{size}", prompts)]
        summary[f"bits_per_byte_{kind}"] = bits_per_byte(model, texts)
    return summary


def joined(traces: list[Trace]) -> Trace:
    fields = vars(traces[0])
    return Trace(*(np.concatenate([vars(t)[name] for t in traces]) for name in fields))


def paired_p(tree, chain) -> float:
    """One-sided Wilcoxon signed-rank test over prompts: the tree's accept length is greater."""
    return float(stats.wilcoxon(tree.by_prompt, chain.by_prompt, alternative="greater").pvalue)


def repeats(trace: Trace) -> np.ndarray:
    """Which completions repeat an 8-gram of tokens three times."""
    said = zip(trace.said, trace.count, strict=True)
    return np.array([repeating(row[:count].tolist()) for row, count in said])


def repeating(tokens: list[int], n: int = 8, times: int = 3) -> bool:
    counts = Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
    return max(counts.values(), default=0) >= times


def real_repeats(model: Model, length: int, prompts: int) -> float:
    """The same share in windows of held-out text: what people's own code and prose repeat."""
    found = []
    for mix in ("code_long", "prose_long"):
        for text in load(mix, prompts):
            ids = model.tokenizer.encode(text)
            starts = range(0, len(ids) - length + 1, length)
            found += [repeating(ids[start : start + length]) for start in starts]
    return float(np.mean(found))


@jax.jit
def _nats(weights, tokens, length):
    """Summed negative log-probability of tokens 1 .. length-1 of [t] given those before."""
    target = weights.target_module()
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)

    rows = target(tokens, positions, positions < length, expanded_attention)
    log_p = jax.nn.log_softmax(target.lm_head(rows.hidden).astype(jnp.float32))
    said = jnp.take_along_axis(log_p[:-1], tokens[1:, None], axis=1)[:, 0]
    return -jnp.where(positions[1:] < length, said, 0).sum()


def bits_per_byte(model: Model, texts: list[str]) -> float:
    """Of held-out document openings as served: INT4 experts, each text alone, first token free."""
    nats = size = 0
    for text in texts:
        ids = model.tokenizer.encode(text)
        padded = np.zeros(2048 if len(ids) > 256 else 256, np.int32)
        padded[: len(ids)] = ids
        nats += float(_nats(model.weights, padded, len(ids)))
        size += len(text.encode()) - len(model.tokenizer.decode_bytes(ids[:1]))
    return nats / np.log(2) / size


def plot(points: list[dict], path: Path) -> None:
    """Accept length over budget, a line for each top-k, the chain across; 8/4 ringed."""
    from matplotlib import pyplot

    def mean(here, method, budget, top_k):
        wanted = (method, budget, top_k)
        found = [p for p in here if (p["method"], p["budget"], p["top_k"]) == wanted]
        return np.mean([p["accept_length"] for p in found])

    horizon = next(p["budget"] for p in points if p["method"] == "dflash")
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), sharex=True, sharey=True)
    for row, (name, temperature) in zip(axes, TEMPERATURES.items(), strict=True):
        for axis, kind in zip(row, ("code", "prose"), strict=True):
            here = [
                p for p in points if p["mix"].startswith(kind) and p["temperature"] == temperature
            ]
            for top_k in TOP_KS:
                line = [mean(here, "ddtree", budget, top_k) for budget in BUDGETS]
                axis.plot(BUDGETS, line, "o-", ms=3, label=f"tree, top-k {top_k}")
            chain = mean(here, "dflash", horizon, 1)
            axis.axhline(chain, color="k", ls="--", lw=1, label="chain")
            ring = {"ms": 11, "mfc": "none", "mec": "r", "label": "budget 8, top-k 4"}
            axis.plot([8], [mean(here, "ddtree", 8, 4)], "o", **ring)
            axis.set_title(f"{kind}, {'greedy' if name == 'greedy' else 'T = 1'}")
            axis.set_xscale("log", base=2)
            axis.set_xticks(BUDGETS, BUDGETS)
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("budget (tree nodes)")
    for axis in axes[:, 0]:
        axis.set_ylabel("accept length (tokens a pass)")
    axes[0, 0].legend(fontsize=8)
    figure.suptitle("kimi-nano, held-out text: accept length grows with the budget")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
