"""The original fault on a drawn case: a row stride taken from the block size.

An engine that keeps one flat boolean mask, request after request, N rows of (prefix + N) columns,
needs N to find a row. Reading with another N gives the rows below, the first one right, so that a
single-request first-token test passes. Ours has no flat mask and no stride: a row's words hold
bits relative to its request's first row (`ddtree_jax.pallas.tree_attention`).
"""

import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.tree import ancestor_words, visibility

PREFIX = (3, 5)
PARENTS = ((-1, 0, 0, 1, 2), (-1, 0, 1, 2, 0))
TREE_ROWS, WRONG = 5, 4  # budget + 1, and the block size taken for it


def words():
    parent = jnp.asarray(PARENTS, jnp.int32)
    return ancestor_words(parent, jnp.ones_like(parent, bool))


def flat_mask() -> np.ndarray:
    """The engine's buffer: for each request N x (prefix + N), the prefix all visible."""
    blocks = []
    for prefix, sees in zip(PREFIX, np.asarray(visibility(words())), strict=True):
        blocks.append(np.hstack([np.ones((TREE_ROWS, prefix), bool), sees]).ravel())
    return np.concatenate(blocks)


def start(request: int, width: int) -> int:
    return sum(width * (prefix + width) for prefix in PREFIX[:request])


def read(request: int, row: int, width: int) -> str:
    """The tree part of a row as a kernel of `width` rows a request reads it."""
    columns = PREFIX[request] + width
    first = start(request, width) + row * columns + PREFIX[request]
    return "".join(str(int(bit)) for bit in flat_mask()[first : first + width])


def test_flat_layout_read_with_its_own_width():
    assert flat_mask().size == 90 and [start(r, TREE_ROWS) for r in (0, 1)] == [0, 40]
    rows = [[read(r, i, TREE_ROWS) for i in range(TREE_ROWS)] for r in (0, 1)]
    assert rows[0] == ["10000", "11000", "10100", "11010", "10101"]
    assert rows[1] == ["10000", "11000", "11100", "11110", "10001"]


def test_block_size_for_rows_reads_wrong_masks():
    """Which reads go wrong: request 0 from its second row on, request 1 from its first."""
    truth = [[row[:WRONG] for row in rows] for rows in (
        ("10000", "11000", "10100", "11010"), ("10000", "11000", "11100", "11110"))]  # fmt: skip
    seen = [[read(r, i, WRONG) for i in range(WRONG)] for r in (0, 1)]
    assert start(1, WRONG) == 28
    assert seen[0] == ["1000", "1110", "1110", "1111"]
    assert seen[1] == ["1110", "1111", "1111", "1111"]
    right = [[s == t for s, t in zip(*pair, strict=True)] for pair in zip(seen, truth, strict=True)]
    assert right == [[True, False, False, False], [False, False, False, True]]  # the last by luck


@pytest.mark.parametrize("request_, row", [(r, i) for r in (0, 1) for i in range(TREE_ROWS)])
def test_words_need_no_stride(request_, row):
    """Word and bit of a row are found from row_start alone, whatever the neighbours' sizes."""
    packed = np.asarray(words()).reshape(-1, 1)
    row_start = (0, 5)
    word = int(packed[row_start[request_] + row, 0])
    line = {row}
    while PARENTS[request_][min(line)] >= 0:
        line.add(PARENTS[request_][min(line)])
    assert {j for j in range(TREE_ROWS) if word >> j & 1} == line
