"""How perturbed draft scores should become node weights, for `coupled` sampling.

    python -m benchmarks.calibration [--prompts 64] [--temperature 1.0]

A request that samples drafts from s = log q + g, with the noise g that will decide. If q were the
target's p, the argmax of s would be right for certain; softmax(s) doubts it as if log p - log q
were Gumbel noise of scale 1. softmax(b s) doubts less for b > 1. Each depth's b is fitted by
likelihood on one half of the prompts, and all variants are replayed on the other half: scores as
they are (b = 1), fitted, and the drafter's own probabilities without the noise. All variants commit
the same tokens, so they differ in their passes, prompt by prompt; a p-value says how often chance
alone would make the passes differ so much. Writes results/calibration.json.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import results_file
from benchmarks.prompts import EACH, MIXES, load
from benchmarks.traces import Trace, replay
from ddtree_jax import Sampling, autoregressive_step, prefill
from ddtree_jax import load as load_model
from ddtree_jax.loading import Model
from ddtree_jax.sampling import keyed_noise, perturbed, tempered
from ddtree_jax.select import largest
from ddtree_jax.step import draft

SCALES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
BUDGETS, TOP_K = (8, 16, 32), 8
SERVED = "scores as they are"


def main() -> None:
    parser = results_file.parser(__doc__.split("\n")[0], "calibration")
    parser.add_argument("--prompts", type=int, default=EACH, help="of each mix")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    parts = [
        record(model, load(mix, args.prompts), args.temperature, args.new_tokens, args.batch)
        for mix in MIXES
    ]
    made = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    even = np.arange(len(made["count"])) % 2 == 0
    likelihood = log_likelihood({k: v[even] for k, v in made.items()})  # [scales, horizon]
    best = likelihood.argmax(axis=0)
    held = {k: v[~even] for k, v in made.items()}
    ones = np.full_like(best, SCALES.index(1.0))
    traces = {
        SERVED: scaled(held, ones),
        "fitted by depth": scaled(held, best),
        "without the noise": Trace(
            held["plain"], held["plain_tokens"], held["said"], held["count"]
        ),
    }  # fmt: skip
    traces |= {f"b = {b}": scaled(held, np.full_like(best, i)) for i, b in enumerate(SCALES)}
    replays = {(n, b): replay(trace, b, TOP_K) for n, trace in traces.items() for b in BUDGETS}
    points = [
        {
            "name": f"{name}, budget {budget}",
            "variant": name,
            "budget": budget,
            "top_k": TOP_K,
            "accept_length": found.accept_length,
            "p_value": paired_p(found.passes, replays[SERVED, budget].passes),
        }
        for (name, budget), found in replays.items()
    ]
    summary = {f"scale_depth_{d + 1}": SCALES[i] for d, i in enumerate(best)}
    for p in points:
        name = f"{p['variant'].replace(' ', '_')}_b{p['budget']}"
        if not name.startswith("b_="):
            summary[name] = p["accept_length"]
            if p["variant"] != SERVED:
                summary[f"{name}_p"] = p["p_value"]
    notes = [
        f"real held-out text, {model.name}, T = {args.temperature}, {args.new_tokens} new tokens; "
        "scales fitted on every second prompt, accept lengths of the others, by replay; p-values "
        "of passes against scores as they are: signs of the prompts' differences flipped at random",
    ]
    results_file.write(args.output, summary, points, notes)
    print(json.dumps(summary, indent=1))


def paired_p(passes: np.ndarray, others: np.ndarray, flips: int = 20_000) -> float:
    """Two-sided p-value of equal passes [prompts]: were two variants alike, each prompt's
    difference would have either sign with equal chance. The observed signs count as a flip."""
    differences = passes.astype(int) - others
    signs = np.random.default_rng(0).choice([-1, 1], (flips, len(differences)))
    extreme = np.abs(signs @ differences) >= abs(differences.sum())
    return float((1 + extreme.sum()) / (1 + flips))


def record(model: Model, texts: list[str], temperature: float, new: int, batch: int) -> dict:
    """Plain decoding of the texts with the drafter's perturbed scores at every root."""
    parts = []
    for start in range(0, len(texts), batch):
        chosen = texts[start : start + batch]
        seeds = [Sampling(temperature, seed=start + i) for i in range(len(chosen))]
        state = prefill(model, chosen, seeds, new)
        block = model.drafter_config.block_size
        parts.append(jax.device_get(_record(model.weights, state, new - 1, block)))
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


@partial(jax.jit, static_argnames=("passes", "block"))
def _record(weights, state, passes: int, block: int) -> dict:
    def body(state, _):
        positions = state.lengths[:, None] + jnp.arange(1, block, dtype=jnp.int32)[None]
        noise = keyed_noise(state.law, positions, weights.config.vocab_size)
        logits = draft(weights.target_module(), weights.drafter_module(), state, block)
        plain = jax.nn.log_softmax(tempered(logits, state.law).astype(jnp.float32))
        scores = perturbed(plain, noise, state.law)
        total = jnp.stack([jax.nn.logsumexp(scores * b, axis=-1) for b in SCALES], axis=-1)
        found = dict(zip(("scores", "tokens"), largest(scores, TOP_K), strict=True))
        found |= dict(zip(("plain", "plain_tokens"), largest(plain, TOP_K), strict=True))
        return autoregressive_step(weights, state), found | {"total": total}

    state, found = lax.scan(body, state, None, length=passes)
    found = {key: jnp.swapaxes(value, 0, 1) for key, value in found.items()}
    return found | {"said": state.tokens[:, : passes + 1], "count": state.count}


def scaled(made: dict, scale: np.ndarray) -> Trace:
    """The recording with the scores of depth d under SCALES[scale[d]]."""
    b = np.array(SCALES, np.float32)[scale]
    total = np.take_along_axis(made["total"], scale[None, None, :, None], axis=-1)
    log_q = made["scores"] * b[None, None, :, None] - total
    return Trace(np.minimum(log_q, 0), made["tokens"], made["said"], made["count"])


def log_likelihood(made: dict) -> np.ndarray:
    """Mean log-probability of what came, for every scale and depth; misses share what is left."""
    roots, horizon = made["tokens"].shape[1:3]
    place = np.arange(roots)[:, None] + 1 + np.arange(horizon)[None]
    came = made["said"][:, np.minimum(place, made["said"].shape[1] - 1)]
    real = place[None] < made["count"][:, None, None]
    hit = made["tokens"] == came[..., None]
    rows = []
    for i in range(len(SCALES)):
        log_q = np.asarray(scaled(made, np.full(horizon, i)).log_q, np.float64)
        missed = np.log(np.maximum(1 - np.exp(log_q).sum(axis=-1), 1e-6))
        found = np.where(hit, log_q, 0).sum(axis=-1)
        value = np.where(hit.any(axis=-1), found, missed)
        rows.append((value * real).sum(axis=(0, 1)) / real.sum(axis=(0, 1)))
    return np.array(rows)


if __name__ == "__main__":
    main()
