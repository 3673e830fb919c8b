"""The tree against a heap with the documented key, brute force, and the walk done step by step."""

import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.tree import ancestor_words, build, candidates, visibility, walk


def heap_tree(log_q: np.ndarray, budget: int):
    """Best-first search with the documented key; nodes as (path of ranks, score), in pop order."""
    horizon, top_k = log_q.shape
    nodes = []

    def entry(ranks):
        sums = []
        for depth, rank in enumerate(ranks):
            sums.append(np.float32((sums[-1] if sums else np.float32(0)) + log_q[depth, rank]))
        key = (-float(sums[-1]), len(ranks), *(-float(s) for s in reversed(sums[:-1])), *ranks)
        return key, ranks, float(sums[-1])

    heap = [entry((0,))] if horizon else []
    while heap and len(nodes) < budget:
        _, ranks, score = heapq.heappop(heap)
        if score == -np.inf:
            continue
        nodes.append((ranks, score))
        if ranks[-1] + 1 < top_k:
            heapq.heappush(heap, entry((*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < horizon:
            heapq.heappush(heap, entry((*ranks, 0)))
    return nodes


def paper_heap_mass(log_q: np.ndarray, budget: int) -> float:
    """Mass of the tree as the paper's heap builds it: incremental scores, ties by rank tuple."""
    horizon, top_k = log_q.shape
    heap, mass, taken = [(-float(log_q[0, 0]), (0,))], 0.0, 0
    while heap and taken < budget:
        cost, ranks = heapq.heappop(heap)
        mass, taken = mass + np.exp(-cost), taken + 1
        d, r = len(ranks) - 1, ranks[-1]
        if r + 1 < top_k:
            sibling = cost + float(log_q[d, r]) - float(log_q[d, r + 1])
            heapq.heappush(heap, (sibling, (*ranks[:-1], r + 1)))
        if d + 1 < horizon:
            heapq.heappush(heap, (cost - float(log_q[d + 1, 0]), (*ranks, 0)))
    return mass


def paths(tree, request: int):
    """Rank paths and scores of a built tree's nodes, in node order, the root left out."""
    tree = jax.tree.map(np.asarray, tree)
    parent, rank = tree.parent[request], tree.rank[request]
    found = []
    for node in range(1, int(tree.size[request])):
        ranks, at = (), node
        while at > 0:
            ranks, at = (int(rank[at]), *ranks), int(parent[at])
        found.append((ranks, float(tree.score[request, node])))
    return found


def random_log_q(rng, requests, horizon, vocab, kind):
    logits = rng.normal(size=(requests, horizon, vocab)) * rng.choice([0.3, 1.0, 4.0])
    if kind == "tied":
        logits = np.round(logits)
    elif kind == "saturated":
        logits[..., 0] += rng.choice([0.0, 200.0], size=(requests, horizon))
    elif kind == "impossible":
        logits[rng.random(logits.shape) < 0.4] = -np.inf
        logits[..., 0] = 0
    return jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))


SHAPES = [  # horizon, vocabulary, top_k, budget
    (7, 32, 8, 8), (7, 32, 4, 8), (7, 32, 1, 8), (7, 16, 16, 33), (1, 12, 4, 8), (1, 12, 12, 64),
    (3, 4, 4, 64), (15, 20, 8, 20), (2, 2, 2, 2), (7, 50, 31, 31), (2, 3, 3, 20), (5, 9, 2, 1),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_heap(shape):
    horizon, vocab, top_k, budget = shape
    make = jax.jit(build, static_argnums=3)
    rng = np.random.default_rng(list(shape))
    requests = 65
    for kind in ("plain", "tied", "saturated", "impossible"):  # 12 * 4 * 65 = 3,120 cases
        log_q, tokens = candidates(random_log_q(rng, requests, horizon, vocab, kind), top_k)
        root = jnp.zeros(requests, jnp.int32)
        tree = make(root, log_q, tokens, budget, jnp.ones(requests, bool))
        sees = np.asarray(visibility(tree.ancestors))
        tree, log_q, tokens = jax.tree.map(np.asarray, (tree, log_q, tokens))
        for r in range(requests):
            expected = heap_tree(log_q[r], budget)
            assert paths(tree, r) == expected, (kind, r)
            if kind != "impossible":
                mass = sum(np.exp(s) for _, s in expected)
                assert mass == pytest.approx(paper_heap_mass(log_q[r], budget), rel=1e-5)
            check_arrays(tree, sees[r], tokens, r)


def check_arrays(tree, sees, tokens, r):
    """What every tree must be, node by node."""
    size, parent, depth = int(tree.size[r]), tree.parent[r], tree.depth[r]
    for node in range(parent.size):
        if node >= size:
            assert parent[node] == -1 and not sees[node].any() and not sees[:, node].any()
            continue
        line, at = {node}, node
        while parent[at] >= 0:
            assert parent[at] < at
            at = int(parent[at])
            line.add(at)
        assert at == 0 and set(np.flatnonzero(sees[node])) == line
        assert depth[node] == len(line) - 1
        if node:
            assert tree.tokens[r, node] == tokens[r, depth[node] - 1, int(tree.rank[r, node])]
            brothers = [n for n in range(1, size) if parent[n] == parent[node]]
            assert len({int(tree.tokens[r, n]) for n in brothers}) == len(brothers)


def test_is_the_optimum_of_the_surrogate():
    """With K >= min(B, V) no prefix-closed set of B nodes has more mass (all of them tried)."""
    rng = np.random.default_rng(5)
    for vocab, horizon, budget in [(2, 3, 4), (3, 2, 4), (2, 3, 6), (3, 2, 3)]:
        every = [
            p for d in range(1, horizon + 1) for p in itertools.product(range(vocab), repeat=d)
        ]
        for _ in range(5):
            log_p = random_log_q(rng, 1, horizon, vocab, "plain")
            log_q, tokens = candidates(log_p, min(budget, vocab))
            tree = build(jnp.zeros(1, jnp.int32), log_q, tokens, budget, jnp.ones(1, bool))
            p = np.exp(np.asarray(log_p[0], np.float64))
            mass = {w: np.prod([p[d, t] for d, t in enumerate(w)]) for w in every}
            best = max(
                sum(mass[w] for w in chosen)
                for chosen in itertools.combinations(every, budget)
                if all(len(w) == 1 or w[:-1] in chosen for w in chosen)
            )
            got = float(jnp.exp(tree.score[0, 1 : int(tree.size[0])]).sum())
            assert got == pytest.approx(best, rel=1e-5)


def test_shallower_wins_a_tie():
    """The smallest case in which the paper's heap and the device order differ; both are optimal."""
    log_q = jnp.array([[[-1.0, -1.0], [0.0, 0.0]]])
    tokens = jnp.array([[[3, 4], [5, 6]]], jnp.int32)
    tree = build(jnp.zeros(1, jnp.int32), log_q, tokens, 2, jnp.ones(1, bool))
    assert paths(tree, 0) == [((0,), -1.0), ((1,), -1.0)]


def test_nan_and_inactive():
    log_q, tokens = candidates(jnp.full((2, 3, 5), jnp.nan), 2)
    tree = build(jnp.array([7, 8]), log_q, tokens, 4, jnp.array([True, False]))
    assert tree.size.tolist() == [1, 0]
    assert tree.tokens[0, 0] == 7 and not np.asarray(tree.ancestors[1]).any()


def test_token_zero_and_last_are_drafted():
    log_q, tokens = candidates(jax.nn.log_softmax(jnp.array([[[5.0, 0, 0, 4.0]]])), 2)
    tree = build(jnp.array([1]), log_q, tokens, 2, jnp.ones(1, bool))
    assert tree.size[0] == 3 and tree.tokens[0].tolist() == [1, 0, 3]


def test_words_beyond_one():
    """A chain of 70 nodes: bits cross two word edges."""
    parent = jnp.arange(70, dtype=jnp.int32)[None] - 1
    words = ancestor_words(parent, jnp.ones((1, 70), bool))
    assert words.shape == (1, 70, 3)
    assert np.array_equal(np.asarray(visibility(words))[0], np.tril(np.ones((70, 70), bool)))


def slow_walk(tree, target, r):
    path = [0]
    while True:
        token = int(target[r, path[-1]])
        child = [
            n
            for n in range(1, int(tree.size[r]))
            if tree.parent[r, n] == path[-1] and tree.tokens[r, n] == token
        ]
        if not child:
            return path, token
        path.append(child[0])


def test_walk_follows_matches():
    rng = np.random.default_rng(9)
    vocab, horizon, budget, requests = 4, 5, 20, 200
    log_q, tokens = candidates(random_log_q(rng, requests, horizon, vocab, "plain"), 4)
    root = jnp.zeros(requests, jnp.int32)
    tree = build(root, log_q, tokens, budget, jnp.ones(requests, bool))
    target = jnp.asarray(rng.integers(0, vocab, (requests, budget + 1)), jnp.int32)
    path, length, bonus = jax.jit(walk, static_argnums=2)(tree, target, horizon)
    tree, target, path = jax.tree.map(np.asarray, (tree, target, path))
    skipped = 0
    for r in range(requests):
        expected, token = slow_walk(tree, target, r)
        assert path[r, : int(length[r])].tolist() == expected and int(bonus[r]) == token
        skipped += expected != list(range(len(expected)))
    assert skipped > 20  # paths that are not the first rows are what a commit by count gets wrong


def test_unused_node_is_never_accepted():
    """Padding carries token 0; a target that wants 0 must not walk into it."""
    log_q, tokens = candidates(jnp.full((1, 2, 3), jnp.nan), 2)
    tree = build(jnp.array([1]), log_q, tokens, 3, jnp.ones(1, bool))
    _, length, bonus = walk(tree, jnp.zeros((1, 4), jnp.int32), 2)
    assert length[0] == 1 and bonus[0] == 0
