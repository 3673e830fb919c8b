"""The decisions of a step, which need whole vocabulary rows: drafts to keep, tokens to commit.

Where logits are split over devices they are exchanged first (`parallel`): every device then holds
all of the vocabulary for some rows, or, where a walk needs a request's rows together, for some
requests. On one device nothing is exchanged, and noise is drawn once for all nodes of a depth.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.parallel import Plan
from ddtree_jax.rejection import distribution, draw, walk_chain, walk_tree
from ddtree_jax.sampling import (
    Law,
    bar_stops,
    choose,
    keyed_coins,
    keyed_noise,
    log_law,
    perturbed,
    tempered,
)
from ddtree_jax.tree import Tree, candidates, chain


def shared_noise(plan: Plan, law: Law, positions: Int[Array, "r p"], vocab: int):
    """Noise of every position for all nodes there; None where rows draw their own (`_by_rows`)."""
    return None if plan.splits("vocab") else keyed_noise(law, positions, vocab)


def best_candidates(
    plan: Plan,
    logits: Float[Array, "r l v"],
    law: Law,
    positions: Int[Array, "r l"],
    noise: Float[Array, "r l v"] | None,
    top_k: int,
    vocab: int,
    coupled: bool,
) -> tuple[Float[Array, "r l k"], Int[Array, "r l k"]]:
    """The drafts of every position that a tree may keep, with their log-probabilities."""

    def best(logits, noise, law, _):
        scores = tempered(logits, law)
        scores = perturbed(scores, noise, law) if coupled else scores
        return candidates(jax.nn.log_softmax(scores.astype(jnp.float32)), top_k)

    return _by_rows(plan, best, logits, noise, (law,), (positions,), vocab, coupled)


def coupled_tokens(
    plan: Plan,
    logits: Float[Array, "r n v"],
    law: Law,
    positions: Int[Array, "r n"],
    noise: Float[Array, "r n v"] | None,
    stop_ids: Int[Array, "r s"],
    barred: Bool[Array, "r n"],
    vocab: int,
) -> Int[Array, "r n"]:
    """The token the target chooses after every node; -1 where `are_broken`."""

    def choice(logits, noise, law, stop_ids, _, barred):
        logits = bar_stops(logits, stop_ids, barred)
        log_p = log_law(logits, law)
        return choose(perturbed(log_p, noise, law), are_broken(logits))

    requests, rows = (law, stop_ids), (positions, barred)
    return _by_rows(plan, choice, logits, noise, requests, rows, vocab, True)


def _by_rows(plan: Plan, decide: Callable, logits, noise, requests, rows, vocab, coupled):
    """`decide(logits, noise, *requests, *rows)`; where logits are split, on this device's rows,
    each of them a request of its own.

    `requests` are arrays [r, ..], the law first, `rows` are [r, n], the positions first.
    """
    if not plan.splits("vocab"):
        return decide(logits, noise, *requests, *rows)
    r, n = logits.shape[:2]
    requests = jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), requests)
    rows = jax.tree.map(lambda x: x.reshape(r * n, 1), rows)
    requests, rows = plan.own((requests, rows))
    noise = keyed_noise(requests[0], rows[0], vocab) if coupled else None
    mine = plan.share(logits.reshape(r * n, -1), vocab)[:, None]
    told = plan.gather(decide(mine, noise, *requests, *rows), r * n)
    return jax.tree.map(lambda x: x.reshape(r, n, *x.shape[2:]), told)


def drawn_chain(
    plan: Plan,
    logits: Float[Array, "r l v"],
    law: Law,
    positions: Int[Array, "r l"],
    root: Int[Array, " r"],
    active: Bool[Array, " r"],
    vocab: int,
) -> tuple[Float[Array, "own l v"], Tree]:
    """A chain drawn from the drafter's own law at every position, and that law for the requests
    that this device decides."""
    requests, depths = logits.shape[:2]
    logits, (law, positions) = plan.share(logits, vocab), plan.own((law, positions))
    greedy, log_q = law.temperature <= 0, log_law(logits, law)
    q = jnp.stack([distribution(log_q[:, d], greedy) for d in range(depths)], axis=1)
    noise = keyed_noise(law, positions, vocab, stream=3)
    tokens = jnp.stack([draw(q[:, d], noise[:, d]) for d in range(depths)], axis=1)
    drafted = jnp.cumprod((~are_broken(logits)).astype(jnp.int32), axis=1).sum(axis=1)
    return q, chain(root, *plan.gather((tokens, drafted), requests), active)


def rejection_walk(
    plan: Plan,
    tree: Tree,
    logits: Float[Array, "r n v"],
    law: Law,
    positions: Int[Array, "r depths"],
    stop_ids: Int[Array, "r s"],
    barred: Bool[Array, "r n"],
    q: Float[Array, "own l v"] | None,
    vocab: int,
) -> tuple[Int[Array, "r path"], Int[Array, " r"], Int[Array, " r"]]:
    """Path, length and bonus of every request, by rejection; `q` if the tree is a drawn chain.

    The bonus is -1 where the target broke.
    """
    requests, horizon = logits.shape[0], positions.shape[1] - 1
    logits = plan.share(logits, vocab)
    tree, law, positions, stop_ids, barred = plan.own((tree, law, positions, stop_ids, barred))
    logits = bar_stops(logits, stop_ids, barred)
    broken, greedy = are_broken(logits), law.temperature <= 0
    log_p, coins = log_law(logits, law), keyed_coins(law, positions, 1)
    if q is None:
        path, length, left = walk_tree(tree, log_p, broken, greedy, coins, horizon)
    else:
        path, length, left = walk_chain(tree, q, log_p, broken, greedy, coins)
    # The position's own noise: nothing else that is kept depends on it.
    last = jnp.take_along_axis(positions, jnp.maximum(length - 1, 0)[:, None], axis=1)
    bonus = draw(left, keyed_noise(law, last, vocab)[:, 0])
    return plan.gather((path, length, bonus), requests)


def are_broken(logits: Float[Array, "*rows v"]) -> Bool[Array, "*rows"]:
    """Rows from which nothing can be chosen: with a NaN or +inf, or with -inf alone, once stops
    are barred."""
    return ~jnp.isfinite(logits.max(axis=-1))
