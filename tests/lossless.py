"""How losslessness is tested: a drafter that knows the answer, poison, and the comparison."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

import ddtree_jax as dd
from ddtree_jax import sharding
from ddtree_jax import step as steps
from ddtree_jax.cache import Cache
from ddtree_jax.config import PAGE_SIZE
from ddtree_jax.generate import Method
from ddtree_jax.generate import decode as run
from ddtree_jax.parallel import AXIS

FOREVER = 2**31 - 1
NEW = 24  # generated tokens of a case
TREE, GREEDY = dd.Speculation(), dd.Sampling()


@dataclass
class KnowingDrafter:
    """Stands in for the drafter: the right tokens with noise, so that deep paths are walked.

    `truth[r, p]` is the token at position p of request r in plain decoding. Random weights agree
    with their target by chance only, and rarely below the first depth.
    """

    truth: jax.Array
    config: dd.DFlashConfig
    heads: int  # key heads of this device's cache

    def context(self, taps, positions):
        c = self.config
        shape = (c.num_hidden_layers, *positions.shape, self.heads, c.head_dim)
        return jnp.zeros(shape, taps.dtype), jnp.zeros(shape, taps.dtype)


def knowing_draft(target, drafter, state, block_size):
    """Replaces `step.draft`: the truth leads by a margin that the noise often overcomes."""
    vocab, horizon = target.config.vocab_size, block_size - 1
    place = state.lengths[:, None] + 1 + jnp.arange(horizon, dtype=jnp.int32)[None]
    truth = jnp.take_along_axis(drafter.truth, place, axis=1)

    def noise(position):
        return jax.random.normal(jax.random.fold_in(jax.random.key(5), position), (vocab,))

    logits = jax.vmap(jax.vmap(noise))(place) + 2.0 * jax.nn.one_hot(truth, vocab)
    columns, dtype = target.lm_head.weight.shape[0], target.lm_head.weight[...].dtype
    if target.plan.splits("vocab"):  # this device's part of the vocabulary
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, columns * target.plan.size - vocab)))
        first = lax.axis_index(AXIS) * columns
        logits = lax.dynamic_slice_in_dim(logits, first, columns, axis=2)
    return logits.astype(dtype)


def use_knowing_drafter(monkeypatch, model, prompts, completions):
    """The model with a drafter that knows `completions`, its forward pass patched."""
    config, plan = model.drafter_config, model.weights.plan
    longest = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    requests = sharding.padded_requests(plan, len(prompts))
    # Of few widths, so that batches share their programs.
    truth = np.zeros((requests, -(-(longest + 2 * NEW + 16) // 256) * 256), np.int32)
    for row, p, c in zip(truth, prompts, completions, strict=False):
        row[: len(p) + len(c)] = [*p, *c]
    split = plan.size if plan.splits("heads") else 1
    heads = sharding.padded_heads(plan, config) // split
    monkeypatch.setattr(steps, "draft", knowing_draft)
    monkeypatch.setattr(
        dd.Weights, "drafter_module", lambda w: KnowingDrafter(w.drafter[0], config, heads)
    )
    specs, by_request = sharding.leaf_specs, PartitionSpec(AXIS)

    def leaf_specs(plan, of, dtype):
        if of is not config:
            return specs(plan, of, dtype)
        return (by_request if plan.splits("requests") else PartitionSpec(),)

    monkeypatch.setattr(sharding, "leaf_specs", leaf_specs)
    return replace(model, weights=replace(model.weights, drafter=(jnp.asarray(truth),)))


@partial(jax.jit, static_argnames="groups")
def poison(state, groups=1):
    """NaN in every cache slot that holds no committed token, spare pages included.

    `groups`: on so many devices each has a share of the requests, and numbers its own pages.
    """
    requests = state.block_tables.shape[0]
    group = jnp.arange(requests, dtype=jnp.int32) // (requests // groups)

    def fill(pool):
        if pool is None:
            return None
        pages = jnp.arange(state.block_tables.shape[1], dtype=jnp.int32) * PAGE_SIZE
        place = pages[:, None] + jnp.arange(PAGE_SIZE, dtype=jnp.int32)[None]
        free = place[None] >= state.lengths[:, None, None]  # [r, pages, 64]
        tables = state.block_tables + (group * (pool.shape[1] // groups))[:, None]
        owned = jnp.ones(pool.shape[1:3], bool).at[tables].set(free)
        return jnp.where(owned.reshape(1, *owned.shape, *(1,) * (pool.ndim - 3)), jnp.nan, pool)

    cache = state.cache
    return replace(state, cache=Cache(fill(cache.latents), fill(cache.keys), fill(cache.values)))


def decode(model, prompts, method, speculation=TREE, sampling=GREEDY, new=NEW):
    """The final state of a batch whose caches were poisoned before the first pass."""
    step = Method(method, speculation, model.weights)
    plan = model.weights.plan
    groups = plan.size if plan.splits("requests") else 1
    state = poison(dd.prefill(model, prompts, sampling, new), groups)
    return run(model.weights, state, step, FOREVER)[0]


def tokens(state) -> list[list[int]]:
    return [
        [int(t) for t in row[:count]]
        for row, count in zip(np.asarray(state.tokens), np.asarray(state.count), strict=True)
    ]


def prompts_of(lengths, vocab=11, seed=3) -> list[list[int]]:
    rng = np.random.default_rng([seed, *lengths])
    return [rng.integers(0, vocab, n).tolist() for n in lengths]
