"""One device's view of a program that many devices run: what it holds, and when they meet.

The jitted step is one `shard_map` (`sharding.on_mesh`); inside it every array is the device's own
part. Modules read sizes off their weights, so a part of the heads or of a width is computed as
the whole would be and gives a partial sum. Where sums must be made whole, and where rows or
decisions change hands, they ask the plan; on one device every method returns what it was given.

Decisions are taken on whole vocabulary rows. The head is split over the vocabulary, so its logits
are first exchanged: each device trades its columns of all rows for all columns of its share of the
rows (`share`), decides there as one device would, and all learn the decisions (`gather`). Noise and
filters know nothing of devices, and all devices hold the same tokens because one of them made each.

The router alone is asked by every device for itself, about rows that were summed over devices: all
choose the same experts because an all-reduce or all-gather leaves the same bits on each.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

AXIS = "devices"
SPLIT = {  # the logical axes that each plan splits over the devices; all else is on every device
    "expert": frozenset({"experts", "heads", "width", "vocab"}),
    "tensor": frozenset({"expert_width", "heads", "width", "vocab"}),
    "data": frozenset({"experts", "requests"}),
}


@dataclass(frozen=True)
class Plan:
    """How work is divided, over a mesh of one axis. Static: it is part of the program."""

    name: str | None = None
    mesh: Mesh | AbstractMesh | None = None
    inside: bool = False  # this is a device's own program, within the shard_map
    same_rows: bool = False  # all devices work on the same rows, though requests are split

    @property
    def size(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def splits(self, logical: str) -> bool:
        return self.name is not None and logical in SPLIT[self.name]

    def within(self, **changes) -> "Plan":
        """The plan as a device's own program sees it."""
        return replace(self, inside=True, **changes)

    def whole(self, partial):
        """Sum what each device made with its part of the heads or of the width."""
        return lax.psum(partial, AXIS) if self.splits("heads") else partial

    def embed(self, embed, tokens):
        """Rows of an embedding of which this device holds a part; one device has each row."""
        if not self.splits("vocab"):
            return embed(tokens)
        count = embed.weight.shape[0]
        local = tokens - lax.axis_index(AXIS) * count
        mine = (local >= 0) & (local < count)
        return lax.psum(jnp.where(mine[..., None], embed(local), 0), AXIS)

    # Experts: rows come together, and their sums go back.

    def first_expert(self, count: int):
        """The first of the `count` experts that this device holds."""
        return lax.axis_index(AXIS) * count

    @property
    def _trades_rows(self) -> bool:
        return self.splits("requests") and not self.same_rows

    def all_rows(self, x):
        """The rows of all devices, in their order, where each has its own."""
        return lax.all_gather(x, AXIS, tiled=True) if self._trades_rows else x

    def own_rows(self, x):
        """This device's rows out of `all_rows`."""
        if not self._trades_rows:
            return x
        count = x.shape[0] // self.size
        return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * count, count)

    def sum_experts(self, routed, shared):
        """Sum over devices what their experts made of `all_rows`, for this device's rows, and add
        `shared`, which is whole unless the width is split: then it is part of the same sum."""
        if self.splits("width") and shared is not None:
            routed, shared = routed + shared, None
        if self._trades_rows:
            routed = lax.psum_scatter(routed, AXIS, tiled=True)
        elif self.splits("experts") or self.splits("expert_width"):
            routed = lax.psum(routed, AXIS)
        return routed if shared is None else routed + shared

    # Decisions: whole vocabulary rows on one device each.

    def share(self, logits, vocab: int):
        """Logits [u, .., v / devices] of all units as [u / devices, .., v] of this device's.

        Units that do not divide are padded, and columns from `vocab` on dropped.
        """
        if not self.splits("vocab"):
            return logits
        padded = _pad(logits, self.size)
        last = logits.ndim - 1
        return lax.all_to_all(padded, AXIS, 0, last, tiled=True)[..., :vocab]

    def own(self, tree):
        """This device's share of arrays [u, ..] that all have: the units of `share`."""
        if not self.splits("vocab"):
            return tree

        def mine(x):
            x = _pad(x, self.size)
            count = x.shape[0] // self.size
            return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * count, count)

        return jax.tree.map(mine, tree)

    def gather(self, tree, units: int):
        """What all devices decided about their shares [u / devices, ..], as [u, ..]."""
        if not self.splits("vocab"):
            return tree
        return jax.tree.map(lambda x: lax.all_gather(x, AXIS, tiled=True)[:units], tree)

    # Requests.

    def own_request(self, request, requests: int):
        """A request's place among the `requests` of this device; outside 0 .. requests - 1 if it
        has another."""
        return request - lax.axis_index(AXIS) * requests if self.splits("requests") else request

    def any(self, flag):
        """Whether the flag of any device is set, where each speaks for its own requests."""
        if not self.splits("requests"):
            return flag
        return lax.pmax(flag.astype(jnp.int32), AXIS) > 0


def _pad(x, multiple: int):
    missing = -x.shape[0] % multiple
    return jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))) if missing else x


ALONE = Plan()
