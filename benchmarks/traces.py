"""Acceptance of any tree from one recording of plain decoding.

Speculation commits what plain decoding commits, and what the drafter says at a root depends on the
committed tokens alone. So plain decoding is run once, with a drafter pass at every root, and every
(budget, top-k) is then replayed on the recording: build the tree, walk it against the tokens that
came, jump to the new root. `tests/test_traces.py` compares with real decoding, pass for pass.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax import Sampling, autoregressive_step, prefill
from ddtree_jax.loading import Model
from ddtree_jax.sampling import keyed_noise, perturbed, tempered
from ddtree_jax.step import draft
from ddtree_jax.tree import build, candidates, walk


@dataclass(frozen=True)
class Trace:
    """Plain decoding of R prompts, T roots each: candidates at every root, and what came."""

    log_q: np.ndarray  # [r, t, horizon, k] float32
    tokens: np.ndarray  # [r, t, horizon, k]
    said: np.ndarray  # [r, t + 1] generated tokens
    count: np.ndarray  # [r] how many of them


@dataclass(frozen=True)
class Replay:
    """What a method would have done: per prompt, passes and drafted tokens accepted by depth."""

    passes: np.ndarray  # [r]
    committed: np.ndarray  # [r] tokens of passes, the bonus counted
    hits: np.ndarray  # [r, horizon]

    @property
    def accept_length(self) -> float:
        """Committed tokens per pass over all prompts."""
        return float(self.committed.sum() / self.passes.sum())

    @property
    def by_prompt(self) -> np.ndarray:
        return self.committed / np.maximum(self.passes, 1)

    def only(self, chosen: np.ndarray) -> "Replay":
        return Replay(self.passes[chosen], self.committed[chosen], self.hits[chosen])


def record(
    model: Model, prompts: list[str], sampling: list[Sampling], new: int, top_k: int, batch: int
) -> Trace:
    """Decode `new` tokens after each prompt, `batch` prompts at a time."""
    parts = []
    block = model.drafter_config.block_size
    for start in range(0, len(prompts), batch):
        state = prefill(model, prompts[start : start + batch], sampling[start : start + batch], new)
        parts.append(jax.device_get(_record(model.weights, state, new - 1, top_k, block)))
    return Trace(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@partial(jax.jit, static_argnames=("passes", "top_k", "block"))
def _record(weights, state, passes: int, top_k: int, block: int):
    def body(state, _):
        positions = state.lengths[:, None] + jnp.arange(1, block, dtype=jnp.int32)[None]
        noise = keyed_noise(state.law, positions, weights.config.vocab_size)
        logits = draft(weights.target_module(), weights.drafter_module(), state, block)
        scores = perturbed(tempered(logits, state.law), noise, state.law).astype(jnp.float32)
        found = candidates(jax.nn.log_softmax(scores), top_k)
        return autoregressive_step(weights, state), found

    state, (log_q, tokens) = lax.scan(body, state, None, length=passes)
    said = state.tokens[:, : passes + 1]
    return jnp.swapaxes(log_q, 0, 1), jnp.swapaxes(tokens, 0, 1), said, state.count


def replay(trace: Trace, budget: int, top_k: int) -> Replay:
    """The passes DDTree makes with this budget and top-k; the chain is (horizon, 1)."""
    requests, roots, horizon = trace.log_q.shape[:3]
    accepted = np.asarray(_accepted(*map(jnp.asarray, vars(trace).values()), budget, top_k))
    passes, hits = np.zeros(requests, int), np.zeros((requests, horizon), int)
    for r in range(requests):
        at, last = 0, int(trace.count[r]) - 1
        while at < last:
            taken = int(accepted[r, at])
            passes[r] += 1
            hits[r, : min(taken, last - at)] += 1
            at += taken + 1
    return Replay(passes, np.maximum(trace.count - 1, 0), hits)


@partial(jax.jit, static_argnames=("budget", "top_k"))
def _accepted(log_q, tokens, said, count, budget: int, top_k: int):
    """Drafted tokens accepted at every root, [r, t]."""
    requests, roots, horizon = log_q.shape[:3]
    flat = requests * roots
    tree = build(
        said[:, :-1].reshape(flat),
        log_q[..., :top_k].reshape(flat, horizon, top_k),
        tokens[..., :top_k].reshape(flat, horizon, top_k),
        budget,
        jnp.ones(flat, bool),
    )
    # The target's token after a node at depth d on the right path is the (d+1)th after the root.
    root = jnp.tile(jnp.arange(roots, dtype=jnp.int32), requests)[:, None]
    place = root + 1 + tree.depth
    came = jnp.repeat(said, roots, axis=0)
    target = jnp.take_along_axis(came, jnp.minimum(place, said.shape[1] - 1), axis=1)
    target = jnp.where(place < jnp.repeat(count, roots)[:, None], target, -1)
    _, length, _ = walk(tree, target, horizon)
    return (length - 1).reshape(requests, roots)
