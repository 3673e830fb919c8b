"""Exactness without Monte Carlo: the law of the emitted tokens, summed over all cells of the coins.

A walk is constant where no coin crosses a boundary, so its law is a finite sum: each coin's
boundaries (cumulated probabilities of any node) cut [0, 1) into cells, a coin in the middle of
every cell is tried, and the outcome is weighed with the cells' lengths.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.rejection import draw, walk_chain, walk_tree
from ddtree_jax.sampling import choose
from ddtree_jax.tree import Tree, ancestor_words, chain, walk

V = 4
LIMIT = 1e-6


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


def random_law(rng, prefix_lengths):
    """p(. | prefix) for every prefix, some entries 0 and some tied."""
    law = {}
    for n in range(prefix_lengths + 1):
        for prefix in itertools.product(range(V), repeat=n):
            p = rng.choice([rng.random(V), np.round(rng.random(V) * 4), np.ones(V)], axis=0)
            p = p * (rng.random(V) > 0.2)
            law[prefix] = p / p.sum() if p.sum() > 0 else np.eye(V)[0]
    return law


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


def as_tree(parents, tokens, requests) -> Tree:
    n = len(parents)
    parent = jnp.asarray([parents], jnp.int32)
    one = Tree(
        tokens=np.asarray([tokens], np.int32),
        parent=np.asarray(parent),
        depth=np.asarray([depths(parents)], np.int32),
        rank=np.zeros((1, n), np.int32),
        score=np.zeros((1, n), np.float32),
        size=np.asarray([n], np.int32),
        ancestors=np.asarray(jax.jit(ancestor_words)(parent, np.ones((1, n), bool))),
    )
    return jax.tree.map(lambda x: np.repeat(x, requests, axis=0), one)


def cells(boundaries):
    """(middles, lengths) of the cells that the boundaries cut [0, 1) into."""
    edges = np.unique(np.clip(np.concatenate([[0.0, 1.0], np.asarray(boundaries)]), 0, 1))
    lengths = np.diff(edges)
    keep = lengths > 1e-9
    return ((edges[:-1] + edges[1:]) / 2)[keep], lengths[keep]


def law_of_runs(runs, weights, law, total):
    """The law of the first `total` tokens: each run, then plain sampling to the end."""
    out = np.zeros((V,) * total)
    for run, weight in zip(runs, weights, strict=True):
        for rest in itertools.product(range(V), repeat=total - len(run)):
            text = (*run, *rest)
            p = weight
            for i in range(len(run), total):
                p *= law[text[:i]][text[i]]
            out[text] += p
    return out


def target_law(law, total):
    out = np.zeros((V,) * total)
    for text in itertools.product(range(V), repeat=total):
        out[text] = np.prod([law[text[:i]][text[i]] for i in range(total)])
    return out


def runs_of(tree, path, length, bonus):
    tokens, path = np.asarray(tree.tokens), np.asarray(path)
    return [
        (*(int(t) for t in tokens[r, path[r, 1:n]]), int(b))
        for r, (n, b) in enumerate(zip(np.asarray(length), np.asarray(bonus), strict=True))
    ]


def coins_of(accepts, last, weight=1.0):
    """(accept coins, draw coins, weights) of every cell, padded so that few shapes are compiled."""
    grid = list(itertools.product(*(zip(*c, strict=True) for c in [*accepts, last])))
    size = max(64, 1 << (len(grid) - 1).bit_length())
    coins = np.full((size, len(accepts) + 1), 0.5, np.float32)
    coins[: len(grid)] = [[c for c, _ in point] for point in grid]
    weights = np.zeros(size)
    weights[: len(grid)] = [weight * np.prod([w for _, w in point]) for point in grid]
    accept = np.concatenate([coins[:, :-1], coins[:, :1]], axis=1)
    drawn = np.repeat(coins[:, -1:], len(accepts) + 1, axis=1)
    return jnp.asarray(accept), jnp.asarray(drawn), weights


def summed(runs, weights):
    out = {}
    for run, weight in zip(runs, weights, strict=True):
        out[run] = out.get(run, 0.0) + weight
    return list(out), list(out.values())


def tree_error(rng, parents, tokens, law, rule=walk_tree) -> float:
    """Largest difference between the law of the emitted tokens and the target's."""
    deepest = max(depths(parents))
    rows = [law[prefix_of(i, parents, tokens)] for i in range(len(parents))]
    accepts = []
    for depth in range(deepest):
        edges = []
        for node, at in enumerate(depths(parents)):
            if at == depth:
                children = [i for i, p in enumerate(parents) if p == node]
                edges.append(np.cumsum([rows[node][tokens[c]] for c in children]))
        accepts.append(cells(np.concatenate(edges)))
    edges = []
    for node, p in enumerate(rows):
        rest = p.copy()
        rest[[tokens[c] for c, parent in enumerate(parents) if parent == node]] = 0
        if rest.sum() > 0:
            edges.append(np.cumsum(rest) / rest.sum())
    last = cells(np.concatenate(edges) if edges else [])
    accept, drawn, weights = coins_of(accepts, last)
    n = len(weights)
    tree = as_tree(parents, tokens, n)
    with np.errstate(divide="ignore"):
        log_p = np.log(np.array(rows, np.float32))
    log_p = np.broadcast_to(log_p[None], (n, *log_p.shape))
    no = np.zeros((n, len(parents)), bool)
    found = jax.jit(rule, static_argnums=6)(tree, log_p, no, no[:, 0], accept, drawn, deepest)
    runs, weights = summed(runs_of(tree, *found), weights)
    return np.abs(law_of_runs(runs, weights, law, deepest + 1) - target_law(law, deepest + 1)).max()


SHAPES = [s for n in range(1, 6) for s in shapes(n) if max(depths(s)) <= 3]


def test_trees_of_all_shapes():
    rng = np.random.default_rng(1)
    tried = 0
    for parents in SHAPES:
        for _ in range(2):
            tokens = random_tree(rng, parents)
            if tokens is None:
                continue
            law = random_law(rng, max(depths(parents)) + 1)
            assert tree_error(rng, parents, tokens, law) < LIMIT, (parents, tokens)
            tried += 1
    assert tried > 60


def chain_error(rng, horizon, law, q, rule=walk_chain) -> float:
    """The same for chains whose tokens are drawn from q: every chain, weighed with q's product."""
    out = np.zeros((V,) * (horizon + 1))
    for tokens in itertools.product(range(V), repeat=horizon):
        weight = np.prod([q[d][t] for d, t in enumerate(tokens)])
        if weight == 0:
            continue
        rows = [law[tokens[:d]] for d in range(horizon + 1)]
        accepts = [
            cells([min(1.0, rows[d][t] / q[d][t])]) for d, t in enumerate(tokens)
        ]  # fmt: skip
        edges = [np.cumsum(rows[-1])]
        for d in range(horizon):
            rest = np.maximum(rows[d] - q[d], 0)
            edges.append(np.cumsum(rest) / rest.sum() if rest.sum() > 0 else np.cumsum(rows[d]))
        last = cells(np.concatenate(edges))
        accept, drawn, weights = coins_of(accepts, last, weight)
        n = len(weights)
        drafts = np.broadcast_to(np.asarray(tokens, np.int32)[None], (n, horizon))
        tree = jax.jit(chain)(
            np.zeros(n, np.int32), drafts, np.full(n, horizon, np.int32), np.ones(n, bool)
        )
        with np.errstate(divide="ignore"):
            log_p = np.log(np.array(rows, np.float32))
        log_p = np.broadcast_to(log_p[None], (n, horizon + 1, V))
        laws = np.broadcast_to(np.array(q, np.float32)[None], (n, horizon, V))
        no = np.zeros((n, horizon + 1), bool)
        found = jax.jit(rule)(tree, laws, log_p, no, no[:, 0], accept, drawn)
        runs, weights = summed(runs_of(tree, *found), weights)
        out += law_of_runs(runs, weights, law, horizon + 1)
    return np.abs(out - target_law(law, horizon + 1)).max()


@pytest.mark.parametrize("horizon", (1, 2, 3))
def test_sampled_chains(horizon):
    rng = np.random.default_rng(horizon)
    for _ in range(3 if horizon < 3 else 1):
        law = random_law(rng, horizon + 1)
        q = [random_law(rng, 0)[()] for _ in range(horizon)]
        assert chain_error(rng, horizon, law, q) < LIMIT


def test_chain_drawn_from_the_target_is_always_accepted():
    law = random_law(np.random.default_rng(3), 2)
    law[(0,)] = law[(1,)] = law[(2,)] = law[(3,)]
    q = [law[()], law[(0,)]]
    assert chain_error(None, 2, law, q) < LIMIT


def test_coupled_over_the_orderings_of_the_noise():
    """Every ordering of every position's noise: a tree drafted with it commits plain decoding's."""
    rng = np.random.default_rng(7)
    orders = np.array(list(itertools.permutations(np.linspace(-1.5, 1.5, V))))
    picks = np.array(list(itertools.product(range(len(orders)), repeat=3)))[::3]
    noise = orders[picks]  # [cells, position, V]
    for parents in SHAPES[::4]:
        tokens = random_tree(rng, parents)
        if tokens is None or max(depths(parents)) > 2:
            continue
        law = random_law(rng, 3)
        tree = as_tree(parents, tokens, len(noise))
        with np.errstate(divide="ignore"):
            rows = np.log([law[prefix_of(i, parents, tokens)] for i in range(len(parents))])
        scores = rows[None] + noise[:, depths(parents)]
        chosen = choose(jnp.asarray(scores), jnp.zeros(scores.shape[:2], bool))
        for r, run in enumerate(runs_of(tree, *walk(tree, chosen, max(depths(parents))))):
            said = ()
            for position in range(len(run)):
                with np.errstate(divide="ignore"):
                    said += (int(np.argmax(np.log(law[said]) + noise[r, position])),)
            assert said == run


def test_boundary_coins():
    """0 never takes what has no mass; the largest coin never runs past the last possible token."""
    p = jnp.asarray([[0.0, 1, 0], [0.5, 0.5, 0], [0, 0, 1], [0.3, 0.0, 0.7]])
    for coin, wanted in (
        (0.0, [1, 0, 2, 0]),
        (2.0**-24, [1, 0, 2, 0]),
        (1 - 2.0**-24, [1, 1, 2, 2]),
        (1.0, [1, 1, 2, 2]),
    ):
        assert draw(p, jnp.full(4, coin, jnp.float32)).tolist() == wanted
    # A draft of probability 0 is not taken at coin 0, nor at any other.
    tree = as_tree((-1, 0), [0, 1], 3)
    log_p = jnp.log(jnp.broadcast_to(jnp.asarray([1.0, 0, 0])[None, None], (3, 2, 3)))
    coins = jnp.asarray([[0.0, 0.0], [0.5, 0.5], [1 - 2.0**-24] * 2], jnp.float32)
    no = jnp.zeros((3, 2), bool)
    _, length, bonus = walk_tree(tree, log_p, no, no[:, 0], coins, coins, 1)
    assert length.tolist() == [1, 1, 1] and bonus.tolist() == [0, 0, 0]
    _, length, _ = at_most(tree, log_p, no, no[:, 0], coins, coins, 1)
    assert length.tolist() == [2, 1, 1]


def test_children_that_cover_the_support():
    """Rounding may reject every child though they hold all the mass: never a token outside."""
    rng = np.random.default_rng(0)
    n = 2000
    p = rng.random((n, 3)).astype(np.float32)
    p /= p.sum(axis=1, keepdims=True)
    tree = as_tree((-1, 0, 0, 0), [0, 0, 1, 2], n)
    rows = np.concatenate([p, np.zeros((n, 1), np.float32)], axis=1)
    log_p = jnp.log(jnp.asarray(np.repeat(rows[:, None], 4, axis=1)))
    coins = jnp.full((n, 2), 1 - 2.0**-24, jnp.float32)
    no = jnp.zeros((n, 4), bool)
    path, length, _ = walk_tree(tree, log_p, no, no[:, 0], coins, coins, 1)
    assert (np.asarray(length) == 2).all()
    assert set(np.asarray(tree.tokens)[np.arange(n), np.asarray(path)[:, 1]]) <= {0, 1, 2}


def test_greedy_rows_take_the_argmax_path():
    rng = np.random.default_rng(2)
    n = 64
    tree = as_tree((-1, 0, 0, 1), [0, 1, 2, 3], n)
    log_p = jnp.asarray(rng.normal(size=(n, 4, V)), jnp.float32)
    yes, no = jnp.ones(n, bool), jnp.zeros((n, 4), bool)
    coins = jnp.asarray(rng.random((n, 3)), jnp.float32)
    rejected = walk_tree(tree, log_p, no, yes, coins, coins, 2)
    walked = walk(tree, jnp.argmax(log_p, axis=-1).astype(jnp.int32), 2)
    for a, b in zip(rejected, walked, strict=True):
        np.testing.assert_array_equal(a, b)


# --- wrong variants, each of which the enumeration must catch ---


def thresholds_below_one(tree, log_p, broken, greedy, accept, drawn, horizon):
    return walk_tree(tree, log_p, broken, greedy, accept * 0.5, drawn, horizon)


def at_most(tree, log_p, broken, greedy, accept, drawn, horizon):
    """`coin <= p` instead of `<`: a coin of 0 takes what has no mass."""
    reachable = jnp.maximum(log_p, np.log(1e-30, dtype=np.float32))
    return walk_tree(tree, reachable, broken, greedy, accept, drawn, horizon)


def softmax_of_drafts(q):
    """min(1, p/q) with the drafter's q on a deterministic (top-k) tree."""

    def rule(tree, log_p, broken, greedy, accept, drawn, horizon):
        p = jax.nn.softmax(log_p, axis=-1)
        ratio = jnp.minimum(p / q[None, None], 1.0)
        biased = jnp.log(ratio / ratio.sum(axis=-1, keepdims=True))
        return walk_tree(tree, biased, broken, greedy, accept, drawn, horizon)

    return rule


def test_wrong_variants_are_caught():
    rng = np.random.default_rng(4)
    p = np.array([0.4, 0.25, 0.2, 0.15])
    law = {
        prefix: rng.permutation(p)
        for n in range(4)
        for prefix in itertools.product(range(V), repeat=n)
    }
    parents, tokens = (-1, 0, 0, 1), [0, 1, 2, 3]
    assert tree_error(rng, parents, tokens, law) < LIMIT
    q = jnp.asarray([0.55, 0.2, 0.15, 0.1])
    for rule in (thresholds_below_one, softmax_of_drafts(q)):
        assert tree_error(rng, parents, tokens, law, rule) > 1e-3, rule
    doubled = [0, 1, 1, 3]  # two siblings with one token
    assert tree_error(rng, parents, doubled, law) > 1e-3
    q = [np.array([0.9, 0.1, 0, 0]), np.array([0.1, 0.2, 0.3, 0.4])]
    greedy_drafts = [np.eye(V)[0], np.eye(V)[3]]  # argmax drafts held against softmax q

    def wrong_q(tree, laws, *rest):
        wrong = jnp.broadcast_to(jnp.asarray(np.array(q), jnp.float32)[None], laws.shape)
        return walk_chain(tree, wrong, *rest)

    assert chain_error(rng, 2, law, greedy_drafts) < LIMIT
    assert chain_error(rng, 2, law, greedy_drafts, wrong_q) > 1e-3


def test_last_token_fallback_would_be_seen():
    """A draw whose coin passes the last bin must not give the vocabulary's last id."""
    p = jnp.asarray([[0.5, 0.5, 0.0]])
    mass = jnp.cumsum(p, axis=-1)
    assert draw(p, jnp.asarray([1.0])).tolist() == [1]
    assert int((mass <= 1.0).sum()) == 3  # what counting bins below the coin would have given: V
