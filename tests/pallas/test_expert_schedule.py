"""Every step of every item is done once, and parts are waited for by the block that needs them."""

import numpy as np
import pytest

from ddtree_jax.pallas.expert_schedule import MAX_PARTS, dealt_item, schedule


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 16, 56])
def test_every_step_once(steps, balance):
    for blocks in (1, 2, 5, 132):
        for items in (0, 1, 3, 16, 131, 132, 133, 200, 270):
            done, parts, needed, load = np.zeros((items, steps), int), {}, {}, []
            for block in range(blocks):
                dealt, rest = schedule(np.int32(items), steps, np.int32(block), blocks, balance)
                mine = [dealt_item(t, steps, block, blocks) for t in range(int(dealt))]
                mine = [tuple(map(int, s)) for s in (*mine, *(map(rest, range(2)) if rest else ()))]
                mine = [s for s in mine if s[2] > s[1]]
                load.append(sum(stop - start for _, start, stop, _ in mine))
                for order, (item, start, stop, others) in enumerate(mine):
                    done[item, start:stop] += 1
                    if start > 0:  # parts come before anything that waits
                        assert all(p == 0 for *_, p in mine[:order]) and block not in parts
                        parts[block] = item
                    elif others:
                        needed[item] = set(range(block + 1, block + 1 + others))
                    else:
                        assert stop == steps
            assert (done == 1).all()
            found = {i: {b for b, item in parts.items() if item == i} for i in set(parts.values())}
            assert found == needed and all(len(p) < MAX_PARTS + 1 for p in needed.values())
            if balance and items and steps >= MAX_PARTS:
                even = items * steps / blocks
                assert max(load) <= max(even + 1, even // steps * steps + -(-steps // MAX_PARTS))
