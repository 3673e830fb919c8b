"""What the step is a function of: weights that stay, and the state it replaces."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ddtree_jax.cache import Cache
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.model.dflash import DFlash, merge_dflash
from ddtree_jax.model.kimi import Kimi, merge_kimi
from ddtree_jax.parallel import ALONE, Plan
from ddtree_jax.sampling import Law

RUNNING, STOP, LENGTH, ERROR = range(4)  # values of DecodeState.reason
REASONS = (None, "stop", "length", "error")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """Flat parameter leaves of target and drafter; their configs are static.

    The modules are put together while tracing only, so that a call of the jitted step flattens
    two tuples and no module.
    """

    target: tuple[Array, ...]
    drafter: tuple[Array, ...] | None
    config: KimiConfig = field(metadata={"static": True})
    drafter_config: DFlashConfig | None = field(metadata={"static": True})
    dtype: str = field(default="float32", metadata={"static": True})
    plan: Plan = field(default=ALONE, metadata={"static": True})

    def target_module(self) -> Kimi:
        return merge_kimi(self.config, self.target, self.dtype, self.plan)

    def drafter_module(self) -> DFlash:
        if self.drafter is None:
            raise ValueError("this model has no drafter: only method='autoregressive' can run")
        return merge_dflash(self.drafter_config, self.drafter, self.dtype, self.plan)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """R requests between two steps. Donate it: the caches are updated in place.

    The root is the last committed token: it is among `tokens`, but its latent is not yet cached.
    `count` includes it and the token prefill sampled. Positions count from 0, so `lengths` is also
    the root's position.
    """

    cache: Cache
    block_tables: Int[Array, "r pages"]
    lengths: Int[Array, " r"]  # S: tokens in the cache
    root: Int[Array, " r"]
    tokens: Int[Array, "r capacity"]  # generated tokens
    count: Int[Array, " r"]  # how many of them
    limit: Int[Array, " r"]  # max_new_tokens
    stop_ids: Int[Array, "r stops"]  # -1 pads
    law: Law
    reason: Int[Array, " r"]  # RUNNING, or why the request ended
    depth: Int[Array, "r capacity"]  # of every token in its pass's tree; 0: a bonus, or prefill's
    rank: Int[Array, "r capacity"]  # among its siblings; -1: not drafted
    nodes: Int[Array, "r capacity"]  # drafted nodes of the pass that said the token
    experts: Int[Array, "r capacity moe_layers"] | None  # distinct ones its rows went to; if asked

    @property
    def active(self) -> Bool[Array, " r"]:
        return self.reason == RUNNING

    @property
    def finished(self) -> Bool[Array, " r"]:
        return self.reason != RUNNING

    @property
    def passes(self) -> Int[Array, " r"]:
        """Verify passes that committed something: each ends with a bonus, or is cut."""
        place = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
        said = (place > 0) & (place < self.count[:, None])
        last = place == self.count[:, None] - 1
        return (said & ((self.depth == 0) | last)).sum(axis=1)

    def hits(self, horizon: int) -> Int[Array, "r horizon"]:
        """Passes that committed a drafted token at depth 1, 2, ... horizon."""
        place = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
        said = place < self.count[:, None]
        depths = jnp.arange(1, horizon + 1, dtype=jnp.int32)
        return (said[..., None] & (self.depth[..., None] == depths[None, None])).sum(axis=1)

    @property
    def error(self) -> Bool[Array, " r"]:
        """Requests that ended, without a token, on NaN or infinite logits of the target."""
        return self.reason == ERROR


def emit(
    state: DecodeState,
    tokens: Int[Array, "r e"],
    count: Int[Array, " r"],
    failed: Bool[Array, " r"],
    depth: Int[Array, "r e"],
    rank: Int[Array, "r e"],
    nodes: Int[Array, " r"],
    experts: Int[Array, "r moe_layers"] | None,
) -> DecodeState:
    """Append the first `count` of `tokens` to each request, and end it where they say so.

    Cut after the first stop id and at `limit`, whichever comes first in token order; a stop id
    that is the last allowed token ends with "stop". `failed` requests end with "error" after the
    tokens given, unless these end them first. `depth` and `rank`, and the pass's `nodes` and
    `experts`, are noted beside each token kept: what is cut off later leaves no trace.
    """
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    given = jnp.where(state.active, count, 0)
    stops = (tokens[:, :, None] == state.stop_ids[:, None, :]).any(axis=-1)
    stops = stops & (offset < given[:, None])
    first_stop = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1] + 1)
    room = state.limit - state.count
    kept = jnp.minimum(jnp.minimum(given, first_stop), room).astype(jnp.int32)
    reason = jnp.where(failed & state.active, ERROR, state.reason)
    reason = jnp.where(state.active & (given >= room) & (room <= first_stop), LENGTH, reason)
    reason = jnp.where(state.active & (first_stop <= jnp.minimum(given, room)), STOP, reason)
    column = jnp.where(offset < kept[:, None], state.count[:, None] + offset, state.tokens.shape[1])
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]

    def write(field, values):
        return field.at[rows, column].set(values, mode="drop")

    return replace(
        state,
        tokens=write(state.tokens, tokens),
        depth=write(state.depth, depth),
        rank=write(state.rank, rank),
        nodes=write(state.nodes, nodes[:, None]),
        experts=None if state.experts is None else write(state.experts, experts[:, None]),
        count=state.count + kept,
        reason=reason.astype(jnp.int32),
    )
