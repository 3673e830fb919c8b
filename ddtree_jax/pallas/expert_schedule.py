"""Which block of the persistent grid works on which items, and on which steps of them.

Items are dealt out in turn while every block gets one. The rest, fewer than there are blocks,
would keep some busy and leave others idle: with `balance` its steps are laid end to end and cut
into equal stretches, one a block. A stretch touches at most two items. The block that has an
item's first step finishes it and waits for the parts of the blocks after it; these are computed
first thing, so the wait is short, and a block never waits for one that waits for it.
"""

from collections.abc import Callable
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
    """What one block does: `dealt` whole items, then the segments `rest(0)` and `rest(1)`.

    They are apart because the compiler makes better code of a loop whose bounds it knows.
    """

    dealt: jnp.ndarray
    rest: Callable[[int], Segment] | None


def schedule(items, steps: int, block, blocks: int, balance: bool) -> Schedule:
    """The work of `block` on `items` (traced) of `steps` steps each."""
    full = jnp.int32(steps)
    whole = lax.div(items, jnp.int32(blocks))
    left = items - whole * blocks
    if not balance:
        return Schedule(whole + jnp.where(block < left, 1, 0), None)
    reach = lax.div(left * steps + (blocks - 1), jnp.int32(blocks))
    reach = jnp.maximum(reach, -(-steps // MAX_PARTS))
    low = block * reach
    high = jnp.minimum(low + reach, left * steps)

    def rest(u) -> Segment:
        own = lax.div(low, full) + u  # of what is left
        start = jnp.maximum(low - own * steps, 0)
        stop = jnp.minimum(high - own * steps, steps)
        last = lax.div((own + 1) * steps - 1, reach)  # the block with the item's last step
        item = jnp.minimum(whole * blocks + own, jnp.maximum(items - 1, 0))  # or empty
        return Segment(item, start, stop, jnp.where(start > 0, 0, jnp.maximum(last - block, 0)))

    return Schedule(whole, rest)


def dealt_item(t, steps: int, block, blocks: int) -> Segment:
    return Segment(block + t * blocks, 0, steps, 0)
