"""Who works on what in tree attention, made on the device from lengths and rows alone.

The blocks of 64 latents of all requests, tree blocks last in each, form one line. It is cut into
equal shares, one for each gang: as many blocks of threads as a request has tiles. The tiles of a
request thus read the same page at about the same time, and it comes from memory once. A request
divided among gangs leaves partial results, at most two a gang, which a second kernel merges. Where
it lengthens the shares but little, every request begins with a share of its own, gaps left in the
line: gangs then work on one request each, and fewer results are partial. All of it is arithmetic
on a prefix sum; one plan serves all layers of a pass.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32, UInt32

from ddtree_jax.pallas.tree_attention_shapes import TILE


@dataclass(frozen=True)
class Config:
    """How the kernels divide their work; results differ by rounding at most."""

    stages: int = 2  # pages in flight
    least_share: int = 4  # blocks a gang takes at least: fewer shares, less to merge
    merge_together: int = 8  # partial results loaded at a time
    multiprocessors: int = 132

    def __post_init__(self):
        for name, low, high in (
            ("stages", 2, 16), ("least_share", 1, 1 << 20), ("merge_together", 1, 32),
            ("multiprocessors", 1, 1 << 10),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name}={value}: must be an integer from {low} to {high}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Who works on what, and the mask as the kernel reads it: the same for all layers."""

    requests: Int32[Array, "r 5"]  # first block, block behind the last, prefix, first row, rows
    gangs: Int32[Array, "gangs 2"]  # the requests of a gang, from and to
    share: Int32[Array, " 1"]  # blocks of a gang
    words: Int32[Array, "w queries"]  # 64 columns of ones, those of every query row, 64 of zeros
    nodes: Int32[Array, "r nodes"]  # the rows of a request's nodes, M behind them
    divided: Int32[Array, " r1"]  # requests of more than one gang, and last how many
    orphans: Int32[Array, " m1"]  # rows of no request, and last how many
    places: Int32[Array, " m"]  # of a row among the rows of all tiles
    owned: Bool[Array, " m"]


def make_plan(
    lengths: Int[Array, " r"],
    row_start: Int[Array, " r1"],
    ancestors: UInt32[Array, "m w"],
    *,
    heads: int,
    pages: int,
    max_rows: int | None = None,
    config: Config = Config(),
) -> Plan:
    """The plan of a pass; `pages` is the width of the block tables."""
    m, words = ancestors.shape
    max_rows = check_width(max_rows, m, words)
    tiles, gangs = tiles_and_gangs(heads, max_rows, lengths.shape[0], pages, config)
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, pages * TILE)
    first = jnp.clip(row_start[:-1].astype(jnp.int32), 0, m)
    rows = jnp.clip(row_start[1:].astype(jnp.int32) - first, 0, jnp.minimum(max_rows, m - first))
    blocks = jnp.where(rows > 0, blocks_of(lengths) + blocks_of(rows), 0)
    share, starts = shares(blocks, gangs, config.least_share)
    ends = starts + blocks
    begin = jnp.arange(gangs, dtype=jnp.int32) * share
    of_gang = [  # requests that end before the gang begins, and that start before it ends
        (ends[None] <= begin[:, None]).sum(axis=1, dtype=jnp.int32),
        (starts[None] < jnp.minimum(begin + share, ends[-1])[:, None]).sum(axis=1, dtype=jnp.int32),
    ]
    several = (blocks > 0) & (starts // share < (ends - 1) // share)
    row = jnp.arange(m, dtype=jnp.int32)
    mine = (row[None] >= first[:, None]) & (row[None] < (first + rows)[:, None])
    owned, request = mine.any(axis=0), jnp.argmax(mine, axis=0).astype(jnp.int32)
    node = jnp.arange(blocks_of(max_rows) * TILE, dtype=jnp.int32)[None]
    nodes = jnp.where(node < rows[:, None], first[:, None] + node, m)
    seen = (ancestors != 0).any(axis=1)
    nodes = jnp.where(jnp.append(seen, False)[nodes], nodes, m)  # padding rows are no nodes
    pairs = 2 * -(-max_rows // 64)  # a tree block reads two words
    mask = jnp.pad(ancestors, ((0, 0), (0, max(0, pairs - words))))[:, :pairs]
    mask = jnp.repeat(jax.lax.bitcast_convert_type(mask, jnp.int32).T, heads, axis=1)
    mask = jnp.pad(mask, ((0, 0), (TILE, TILE))).at[:, :TILE].set(-1)
    return Plan(
        requests=jnp.stack([starts, ends, lengths, first, rows], axis=1),
        gangs=jnp.stack(of_gang, axis=1),
        share=share[None],
        words=mask,
        nodes=nodes,
        divided=indices(several),
        orphans=indices(~owned),
        places=request * (tiles * TILE // heads) + row - first[request],
        owned=owned,
    )


def shares(blocks: Int32[Array, " r"], gangs: int, least: int):
    """Blocks of a gang, and where on the line every request begins.

    The shortest share that lets every request begin with one is taken if it is at most an eighth
    longer than an equal one; a gang that goes on to another request loses about as much.
    """
    equal = jnp.maximum(-(-blocks.sum(dtype=jnp.int32) // gangs), least)
    longer = equal + (equal * jnp.arange(9, dtype=jnp.int32) + 63) // 64
    pieces = (blocks[None] + longer[:, None] - 1) // longer[:, None]
    fits = pieces.sum(axis=1) <= gangs
    share = jnp.where(fits.any(), longer[jnp.argmax(fits)], equal)
    room = jnp.where(fits.any(), pieces[jnp.argmax(fits)] * share, blocks)
    return share, jnp.cumsum(room, dtype=jnp.int32) - room


def indices(holds: Bool[Array, " n"]) -> Int32[Array, " n1"]:
    """The indices where it holds, then anything, and last how many they are."""
    found = jnp.nonzero(holds, size=holds.shape[0], fill_value=0)[0].astype(jnp.int32)
    return jnp.append(found, holds.sum(dtype=jnp.int32))


def check_width(max_rows: int | None, m: int, words: int) -> int:
    limit = min(32 * words, m)
    width = limit if max_rows is None else max_rows
    if not 1 <= width <= limit:
        raise ValueError(f"max_rows={max_rows}: must be from 1 to {limit} (rows, and 32 a word)")
    return width


def blocks_of(tokens):
    return (tokens + TILE - 1) // TILE


def tiles_and_gangs(heads: int, max_rows: int, requests: int, pages: int, config: Config):
    """Tiles of a request, and gangs of so many blocks of threads."""
    tiles = -(-max_rows * heads // TILE)
    blocks = requests * (pages + -(-max_rows // TILE))  # at most
    return tiles, max(1, min(config.multiprocessors // tiles, blocks))
