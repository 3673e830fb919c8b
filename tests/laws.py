"""Laws without Monte Carlo: what a walk emits, summed over all cells of its randomness.

A walk is constant where no coin crosses a boundary, so its law is a finite sum: each coin's
boundaries (cumulated probabilities of any node) cut [0, 1) into cells, one coin of every cell is
tried, and the outcome is weighed with the cells' lengths. The coin may be the cell's middle or, for
laws whose boundaries float32 holds exactly, its lowest or highest. A walk by coins ends with the
law of the bonus. `coupled`, and the draw of a bonus (`drawn_law`), have noise instead of coins:
their cells are the orderings of the perturbed log-probabilities (`orderings`).
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import Sampling
from ddtree_jax.decide import best_candidates, coupled_tokens
from ddtree_jax.parallel import ALONE
from ddtree_jax.rejection import draw, walk_chain, walk_tree
from ddtree_jax.sampling import Law
from ddtree_jax.tree import Tree, ancestor_words, build, chain, walk

V = 4
LIMIT = 1e-6
NODES = 5  # of the largest tree, the root counted
AT_ONCE = 2**14  # cells of noise in one call


# --- laws and trees ---


def any_p(rng):
    """Random, rounded (with ties) or even from token to token, some entries 0."""
    p = rng.choice([rng.random(V), np.round(rng.random(V) * 4), np.ones(V)], axis=0)
    p = p * (rng.random(V) > 0.2)
    return p / p.sum() if p.sum() > 0 else np.eye(V)[0]


def even_p(rng):
    """Even over 1, 2 or 4 tokens: float32 holds every sum exactly, so coins can lie on edges."""
    size = int(rng.choice([1, 2, 4]))
    return np.isin(np.arange(V), rng.permutation(V)[:size]) / size


def random_law(rng, prefix_lengths, one=any_p):
    """p(. | prefix) for every prefix."""
    lengths = range(prefix_lengths + 1)
    return {s: one(rng) for n in lengths for s in itertools.product(range(V), repeat=n)}


def target_law(law, total):
    out = np.zeros((V,) * total)
    for text in itertools.product(range(V), repeat=total):
        out[text] = np.prod([law[text[:i]][text[i]] for i in range(total)])
    return out


def error(found, law) -> float:
    """Largest difference between the law of emitted tokens and the target's."""
    return np.abs(found - target_law(law, found.ndim)).max()


def shapes(nodes: int):
    """Parent lists of all rooted trees with `nodes` nodes, a parent before its children."""
    if nodes == 1:
        return [(-1,)]
    found = set()
    for rest in shapes(nodes - 1):
        found |= {(*rest, parent) for parent in range(nodes - 1)}
    return sorted(found)


def depths(parents):
    out = []
    for p in parents:
        out.append(0 if p < 0 else out[p] + 1)
    return out


SHAPES = [s for n in range(1, NODES + 1) for s in shapes(n) if max(depths(s)) <= 3]


def random_tree(rng, parents):
    """Tokens for a shape, siblings distinct; None if a node has more children than tokens."""
    tokens = [0]
    for node in range(1, len(parents)):
        taken = {tokens[i] for i in range(1, node) if parents[i] == parents[node]}
        free = [t for t in range(V) if t not in taken]
        if not free:
            return None
        tokens.append(int(rng.choice(free)))
    return tokens


def prefix_of(node, parents, tokens):
    line = ()
    while parents[node] >= 0:
        line, node = (tokens[node], *line), parents[node]
    return line


def as_tree(parents, tokens, requests, nodes=None) -> Tree:
    """The same tree for every request; beyond its own nodes, up to `nodes`, all are unused."""
    n, nodes = len(parents), nodes or len(parents)

    def column(values, unused):
        return np.asarray([[*values, *[unused] * (nodes - n)]], np.int32)

    parent = column(parents, -1)
    one = Tree(
        tokens=column(tokens, 0),
        parent=parent,
        depth=column(depths(parents), 0),
        rank=column([0] * n, 0),
        score=np.zeros((1, nodes), np.float32),
        size=np.asarray([n], np.int32),
        ancestors=np.asarray(jax.jit(ancestor_words)(parent, np.arange(nodes)[None] < n)),
    )
    return jax.tree.map(lambda x: np.repeat(x, requests, axis=0), one)


def emitted(walked, tree, weights, law, total):
    """The law of the first `total` tokens: each run with its weight, then plain sampling.

    What a walk returns last is the bonus, or the (unnormalised) law that it is drawn from.
    """
    path, length, left = map(np.asarray, walked)
    left = np.eye(V)[left] if left.ndim == 1 else left / left.sum(axis=1, keepdims=True)
    tokens = np.take_along_axis(np.asarray(tree.tokens), path, axis=1)
    runs, last = np.zeros(len(length), int), np.minimum(length - 1, total)
    for i in range(total):
        said = tokens[:, i + 1] if i + 1 < path.shape[1] else np.zeros_like(length)
        runs += np.where(i < last, said + 1, 0) * (V + 1) ** i
    # With every bonus, where it is among the first tokens.
    place = np.where(last < total, (V + 1) ** last, 0)
    runs = runs[:, None] + place[:, None] * np.arange(1, V + 1)
    runs, where = np.unique(runs, return_inverse=True)
    counts = np.bincount(where.ravel(), (weights[:, None] * left).ravel())
    out = np.zeros((V,) * total)
    for code, weight in zip(runs.tolist(), counts.tolist(), strict=True):
        run = tuple(code // (V + 1) ** i % (V + 1) - 1 for i in range(total))
        run = run[: run.index(-1)] if -1 in run else run
        for rest in itertools.product(range(V), repeat=total - len(run)):
            text = (*run, *rest)
            out[text] += weight * np.prod([law[text[:i]][text[i]] for i in range(len(run), total)])
    return out


# --- coins ---


def cells(boundaries, at="middle"):
    """(coins, lengths) of the cells that the boundaries cut [0, 1) into; a cell holds its lower
    boundary and not its upper one."""
    edges = np.unique(np.clip(np.concatenate([[0.0, 1.0], np.asarray(boundaries)]), 0, 1))
    edges = edges[np.concatenate([np.diff(edges) > 1e-9, [True]])]
    low, high = edges[:-1], edges[1:]
    highest = np.nextafter(high.astype(np.float32), np.float32(0))
    coins = {"lowest": low, "middle": (low + high) / 2, "highest": highest}[at]
    return coins, np.diff(edges)


def coins_of(accepts, weight=1.0):
    """(accept coins, weights) of every cell, padded so that few shapes are compiled."""
    grid = list(itertools.product(*(zip(*c, strict=True) for c in accepts)))
    size = max(64, 1 << (len(grid) - 1).bit_length())
    coins = np.full((size, len(accepts) + 1), 0.5, np.float32)
    coins[: len(grid), :-1] = [[c for c, _ in point] for point in grid]
    weights = np.zeros(size)
    weights[: len(grid)] = [weight * np.prod([w for _, w in point]) for point in grid]
    return jnp.asarray(coins), weights


def logs(rows, requests):
    with np.errstate(divide="ignore"):
        log_p = np.log(np.array(rows, np.float32))
    return np.broadcast_to(log_p[None], (requests, *log_p.shape))


def tree_law(parents, tokens, law, rule=walk_tree, at="middle", edges=()):
    """What `rule` emits for this tree; `edges`: boundaries of its own."""
    deepest = max(depths(parents))
    rows = [law[prefix_of(i, parents, tokens)] for i in range(len(parents))]
    accepts = []
    for depth in range(deepest):
        found = [edges]
        for node, at_depth in enumerate(depths(parents)):
            if at_depth == depth:
                children = [i for i, p in enumerate(parents) if p == node]
                found.append(np.cumsum([rows[node][tokens[c]] for c in children]))
        accepts.append(cells(np.concatenate(found), at))
    coins, weights = coins_of(accepts)
    n = len(weights)
    tree, no = as_tree(parents, tokens, n), np.zeros((n, len(parents)), bool)
    run = jax.jit(rule, static_argnums=5)
    walked = run(tree, logs(rows, n), no, no[:, 0], coins, deepest)
    return emitted(walked, tree, weights, law, deepest + 1)


def chain_law(law, q, rule=walk_chain, at="middle", edges=()):
    """The same for chains whose tokens are drawn from q: every chain, weighed with q's product."""
    horizon = len(q)
    out = np.zeros((V,) * (horizon + 1))
    for tokens in itertools.product(range(V), repeat=horizon):
        weight = np.prod([q[d][t] for d, t in enumerate(tokens)])
        if weight == 0:
            continue
        rows = [law[tokens[:d]] for d in range(horizon + 1)]
        accepts = [
            cells([min(1.0, rows[d][t] / q[d][t]), *edges], at) for d, t in enumerate(tokens)
        ]
        coins, weights = coins_of(accepts, weight)
        n = len(weights)
        drafts = np.broadcast_to(np.asarray(tokens, np.int32)[None], (n, horizon))
        tree = jax.jit(chain)(
            np.zeros(n, np.int32), drafts, np.full(n, horizon, np.int32), np.ones(n, bool)
        )
        laws = np.broadcast_to(np.array(q, np.float32)[None], (n, horizon, V))
        no = np.zeros((n, horizon + 1), bool)
        walked = jax.jit(rule)(tree, laws, logs(rows, n), no, no[:, 0], coins)
        out += emitted(walked, tree, weights, law, horizon + 1)
    return out


# --- noise ---

WARM = Law.of([Sampling(1.0)])


def orderings(rng, p):
    """Noise for every order of the possible tokens' perturbed log-probabilities, [orders, V], the
    order's probability, and its first token.

    Gumbel noise puts the tokens in an order by drawing them one after the other, without
    replacement (Plackett and Luce). What is impossible stays last, whatever its noise.
    """
    possible = np.flatnonzero(p)
    orders = np.array(list(itertools.permutations(possible)))
    ranked = p[orders]
    left = np.cumsum(ranked[:, ::-1], axis=1)[:, ::-1]
    chances = (ranked / left).prod(axis=1)
    scores = np.cumsum(-rng.uniform(0.1, 2, orders.shape), axis=1)
    noise = np.full((len(orders), V), 50.0)
    np.put_along_axis(noise, orders, scores - np.log(ranked), axis=1)
    return noise, chances, orders[:, 0]


def drawn_law(rng, p, rule=draw):
    """What `rule` draws from p, summed over the noise's orderings."""
    noise, chances, _ = orderings(rng, p)
    rows = np.broadcast_to(np.asarray(p, np.float32), noise.shape)
    return np.bincount(np.asarray(rule(rows, noise.astype(np.float32))), chances, V)


def noise_cells(rng, law, positions):
    """(noise [cells, positions, V], probabilities): at each position every ordering of the law
    there, after the tokens that come first in the orderings before."""
    found = {(): (np.zeros((1, 0, V)), np.ones(1))}
    for _ in range(positions):
        longer = {}
        for said, (noise, weights) in found.items():
            here, chances, first = orderings(rng, law[said])
            for token in np.unique(first):
                rows, mine = here[first == token], chances[first == token]
                before = np.repeat(noise, len(rows), axis=0)
                now = np.tile(rows, (len(noise), 1))[:, None]
                made = np.concatenate([before, now], axis=1), np.outer(weights, mine).ravel()
                longer[*said, int(token)] = made
        found = longer
    noise, weights = zip(*found.values(), strict=True)
    return np.concatenate(noise).astype(np.float32), np.concatenate(weights)


@jax.jit
def coupled(tree, logits, noise):
    """The walk of a step, which gives every node the noise of its own position."""
    by_node = jnp.take_along_axis(noise, tree.depth[..., None], axis=1)
    stop_ids, barred = jnp.full((1, 1), -1, jnp.int32), jnp.zeros(tree.tokens.shape, bool)
    chosen = coupled_tokens(ALONE, logits, WARM, tree.depth, by_node, stop_ids, barred, V)
    return walk(tree, chosen, noise.shape[1] - 1)


def drafted(q, top_k):
    """A function from noise to the trees that a drafter of law q [horizon, V] has checked."""

    @jax.jit
    def draft(noise):
        n, ahead = noise.shape[0], noise[:, :-1]
        log_q = logs(q, n)
        found = best_candidates(ALONE, log_q, WARM, ahead[..., 0], ahead, top_k, V, True)
        return build(jnp.zeros(n, jnp.int32), *found, NODES - 1, jnp.ones(n, bool))

    return draft


def coupled_law(rng, law, total, draft, rule=coupled):
    """What `rule` emits for the trees `draft(noise)`, summed over the noise's orderings."""
    table = np.zeros(((V + 1) ** total, V))  # by prefix, as a number
    for prefix, p in law.items():
        if len(prefix) < total:
            code = 0
            for token in prefix:
                code = code * (V + 1) + token + 1
            table[code] = p
    table = logs(table, 1)[0]
    noise, weights = noise_cells(rng, law, total)
    size = -(-len(noise) // AT_ONCE) * AT_ONCE
    noise = np.concatenate([noise, np.zeros((size - len(noise), total, V), np.float32)])
    weights = np.concatenate([weights, np.zeros(size - len(weights))])
    out = np.zeros((V,) * total)
    for start in range(0, size, AT_ONCE):
        part = noise[start : start + AT_ONCE]
        tree = jax.device_get(draft(part))
        code = np.zeros_like(tree.tokens)
        for node in range(1, code.shape[1]):
            before = np.take_along_axis(code, np.maximum(tree.parent[:, [node]], 0), axis=1)
            used = node < tree.size
            code[:, node] = np.where(used, before[:, 0] * (V + 1) + tree.tokens[:, node] + 1, 0)
        walked = rule(tree, table[code], part)
        out += emitted(walked, tree, weights[start : start + AT_ONCE], law, total)
    return out
