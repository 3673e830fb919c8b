"""Cases of tree attention: packed rows of ragged requests, poisoned memory, a slow softmax."""

from dataclasses import dataclass

import numpy as np

PAGE = 64
KINDS = ("chain", "star", "comb", "best-first", "random")


def parents(rng, nodes: int, kind: str) -> list[int]:
    """The parent of every node, -1 for the root; a parent comes before its children."""
    if kind == "chain":
        return [i - 1 for i in range(nodes)]
    if kind == "star":
        return [-1] + [0] * (nodes - 1)
    if kind == "comb":  # a spine, a leaf at every joint
        return [-1] + [max(0, i - 2 + i % 2) for i in range(1, nodes)]
    if kind == "random":
        return [-1] + [int(rng.integers(0, i)) for i in range(1, nodes)]
    # As DDTree builds: children by rank, the likeliest prefix next, depth at most 7.
    log_p = np.log(rng.dirichlet(np.full(4, 0.5), size=7))
    log_p.sort(axis=1)
    found, heap = [-1], [(0.0, 0, 0, 0)]  # score before, parent, depth, rank of the next child
    while len(found) < nodes:
        best = max(range(len(heap)), key=lambda k: heap[k][0] + log_p[heap[k][2], -1 - heap[k][3]])
        score, parent, depth, rank = heap.pop(best)
        child = len(found)
        found.append(parent)
        if rank + 1 < 4:
            heap.append((score, parent, depth, rank + 1))
        if depth + 1 < 7:
            heap.append((score + log_p[depth, -1 - rank], child, depth + 1, 0))
        if not heap:  # all prefixes are taken: hang the rest under the last node
            found += list(range(child, nodes - 1))
    return found[:nodes]


def lines_of(parents: list[int]) -> list[set[int]]:
    """Every node with its ancestors."""
    lines = []
    for i, parent in enumerate(parents):
        lines.append({i} if parent < 0 else lines[parent] | {i})
    return lines


@dataclass(frozen=True)
class Case:
    """Arguments of attention in its order, as NumPy arrays, and what every row may see."""

    queries: np.ndarray
    latents: np.ndarray
    pool: np.ndarray
    layer: int
    block_tables: np.ndarray
    lengths: np.ndarray
    row_start: np.ndarray
    ancestors: np.ndarray
    lines: list[list[set[int]]]  # of every request

    @property
    def arguments(self) -> tuple:
        return (
            self.queries, self.latents, self.pool, self.layer, self.block_tables, self.lengths,
            self.row_start, self.ancestors,
        )  # fmt: skip


def make_case(rng, sizes, prefixes, width, kind, heads, d, padding=0, spare=0) -> Case:
    """Requests of `sizes` nodes behind `prefixes` tokens, in shuffled pages; all else is NaN.

    Every request has `padding` rows more than nodes, and `spare` rows belong to nobody.
    """
    requests, words, layers = len(sizes), -(-width // 32), 3
    pages = max(1, -(-max(prefixes) // PAGE)) + 1
    pool = np.full((layers, requests * pages + 2, PAGE, d), np.nan, np.float32)
    tables = rng.permutation(requests * pages + 2)[: requests * pages].reshape(requests, pages)
    row_start = np.concatenate([[0], np.cumsum(np.add(sizes, padding))]).astype(np.int32)
    rows = int(row_start[-1]) + spare
    queries = np.full((rows, heads, d), np.nan, np.float32)
    latents = np.full((rows, d), np.nan, np.float32)
    ancestors = np.zeros((rows, words), np.uint32)
    lines = []
    for r, n in enumerate(sizes):
        for p in range(prefixes[r]):
            pool[1, tables[r, p // PAGE], p % PAGE] = rng.normal(size=d)
        lines.append(lines_of(parents(rng, n, kind)))
        mine = slice(row_start[r], row_start[r] + n)
        queries[mine], latents[mine] = rng.normal(size=(n, heads, d)), rng.normal(size=(n, d))
        for i, line in enumerate(lines[r]):
            for j in line:
                ancestors[row_start[r] + i, j // 32] |= np.uint32(1 << (j % 32))
    return Case(
        queries, latents, pool, 1, tables.astype(np.int32), np.array(prefixes, np.int32),
        row_start, ancestors, lines,
    )  # fmt: skip


def slow_softmax(case: Case, scale: float, value_size: int):
    """Output and log-sum-exp row by row in float64; 0 and -inf where there is nothing to see."""
    out = np.zeros((*case.queries.shape[:2], value_size))
    lse = np.full(case.queries.shape[:2], -np.inf)
    for r, lines in enumerate(case.lines):
        tokens = np.arange(case.lengths[r])
        prefix = case.pool[case.layer, case.block_tables[r, tokens // PAGE], tokens % PAGE]
        for i, line in enumerate(lines):
            m = case.row_start[r] + i
            own = case.latents[[case.row_start[r] + j for j in sorted(line)]]
            keys = np.concatenate([prefix, own]).astype(np.float64)
            scores = keys @ case.queries[m].T.astype(np.float64) * scale
            top = scores.max(axis=0)
            weights = np.exp(scores - top)
            out[m] = (weights / weights.sum(axis=0)).T @ keys[:, :value_size]
            lse[m] = top + np.log(weights.sum(axis=0))
    return out, lse


def pairwise(rng, *factors):
    """Few rows in which any two values of two factors meet."""
    open_pairs = {
        (a, x, b, y)
        for a in range(len(factors))
        for b in range(a + 1, len(factors))
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }
    rows = []

    def met(row):
        return {
            (a, row[a], b, row[b]) for a in range(len(row)) for b in range(a + 1, len(row))
        } & open_pairs

    while open_pairs:
        a, x, b, y = min(open_pairs)
        tries = []
        for _ in range(30):
            row = [int(rng.integers(len(f))) for f in factors]
            row[a], row[b] = x, y
            tries.append(row)
        row = max(tries, key=lambda row: len(met(row)))
        open_pairs -= met(row)
        rows.append(tuple(f[i] for f, i in zip(factors, row, strict=True)))
    return rows
