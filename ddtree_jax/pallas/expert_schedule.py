"""Which block of the persistent grid works on which items, and on which steps of them.

Items are dealt out in turn while every block gets one. The rest, fewer than there are blocks,
would keep some busy and leave others idle: with `balance` its steps are laid end to end and cut
into equal stretches, one a block. A stretch touches at most two items. The block that has an
item's first step finishes it and waits for the parts of the blocks after it; these are computed
first thing, so the wait is short, and a block never waits for one that waits for it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

MAX_PARTS = 8  # of an item: each costs the finishing block a look at memory


class Segment(NamedTuple):
    """Steps start .. stop-1 of an item; none if stop <= start. `parts` other blocks add theirs."""

    item: jnp.ndarray
    start: jnp.ndarray
    stop: jnp.ndarray
    parts: jnp.ndarray


class Schedule(NamedTuple):
    """What one block does: `segment(t)` for t = 0 .. turns-1."""

    turns: jnp.ndarray
    segment: object


def schedule(items, steps: int, block, blocks: int, balance: bool) -> Schedule:
    """The turns of `block` over `items` (traced) of `steps` steps each."""
    zero, full = jnp.int32(0), jnp.int32(steps)
    whole = lax.div(items, jnp.int32(blocks))
    rest = items - whole * blocks
    if not balance:
        turns = whole + jnp.where(block < rest, 1, 0)
        return Schedule(turns, lambda t: Segment(block + t * blocks, zero, full, zero))
    reach = lax.div(rest * steps + (blocks - 1), jnp.int32(blocks))
    reach = jnp.maximum(reach, -(-steps // MAX_PARTS))
    low = block * reach
    high = jnp.minimum(low + reach, rest * steps)

    def segment(t):
        dealt = t < whole
        own = lax.div(low, full) + jnp.where(t > whole, 1, 0)  # of the rest
        start = jnp.maximum(low - own * steps, 0)
        stop = jnp.minimum(high - own * steps, steps)
        last = lax.div((own + 1) * steps - 1, reach)  # the block with the item's last step
        item = jnp.where(dealt, block + t * blocks, whole * blocks + own)
        return Segment(
            jnp.minimum(item, jnp.maximum(items - 1, 0)),  # an empty segment may point past
            jnp.where(dealt, 0, start),
            jnp.where(dealt, steps, stop),
            jnp.where(dealt | (start > 0), 0, jnp.maximum(last - block, 0)),
        )

    return Schedule(whole + 2, segment)
