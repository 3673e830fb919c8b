"""Does decoding draw from the target's law? Pearson's chi-square test, token by token.

Many requests start from one state with seeds of their own. The first token they draw is compared
with the target's distribution there, the second with its distribution after the likeliest first
token, and so on: every test is conditional on its prefix.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import ddtree_jax as dd
from ddtree_jax.cache import identity_tables
from ddtree_jax.generate import Method, decode
from ddtree_jax.model.attention import expanded_attention
from ddtree_jax.sampling import Law, log_law

FOREVER = 2**31 - 1


def p_values(
    model, prompt: list[int], method: str, speculation, sampling, seeds, depth: int, batch: int
) -> list[float]:
    """One p-value for each of `depth` tokens, over len(seeds) decodings of the prompt."""
    start = dd.prefill(model, [prompt], dd.Sampling(), depth + 1)
    step = Method(method, speculation, model.weights)
    said = []
    for first in range(0, len(seeds), batch):
        laws = Law.of([replace(sampling, seed=int(s)) for s in seeds[first : first + batch]])
        state = copies(start, laws, batch)
        state, _ = decode(model.weights, state, step, FOREVER)
        said.append(np.asarray(state.tokens)[:, 1 : depth + 1])
    said = np.concatenate(said)
    prefix = [*prompt, int(start.root[0])]
    found = []
    for d in range(depth):
        p = np.asarray(next_law(model.weights, jnp.asarray(prefix), Law.of([sampling])))
        counts = np.bincount(said[:, d], minlength=len(p))
        found.append(pearson(counts, p))
        likeliest = int(counts.argmax())
        said = said[said[:, d] == likeliest]
        prefix.append(likeliest)
    return found


@partial(jax.jit, static_argnames="count")
def copies(state, law: Law, count: int):
    """The one request of `state`, `count` times, each with pages and a law of its own."""
    tile = partial(jnp.repeat, repeats=count, axis=0, total_repeat_length=count)
    pages = state.block_tables.shape[1]
    return replace(
        jax.tree.map(tile, replace(state, cache=None, law=None)),
        law=law,
        cache=jax.tree.map(
            lambda pool: jnp.tile(pool, (1, count) + (1,) * (pool.ndim - 2)), state.cache
        ),
        block_tables=identity_tables(count, pages),
    )


@jax.jit
def next_law(weights, tokens, law: Law):
    """The target's probabilities after `tokens`, in one plain causal pass."""
    target = weights.target_module()
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    rows = target(tokens, positions, jnp.ones(tokens.shape, bool), expanded_attention)
    return jax.nn.softmax(log_law(target.lm_head(rows.hidden[-1:]), law)[0].astype(jnp.float32))


def pearson(counts, p) -> float:
    """The p-value of `counts` under `p`: bins that expect 5 or more, all others pooled."""
    n = counts.sum()
    if (counts[p == 0] > 0).any():
        return 0.0  # an impossible token was drawn
    expected = n * p / p.sum()
    own = expected >= 5
    observed = np.append(counts[own], counts[~own].sum())
    expected = np.append(expected[own], expected[~own].sum())
    if expected[-1] < 5:  # the pool itself is too small: it joins the smallest bin
        smallest = expected[:-1].argmin()
        for values in (observed, expected):
            values[smallest] += values[-1]
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected) - 1))
