"""Routed experts as a grouped matmul: only experts that rows are routed to are read.

`expert_mlp_reference` defines the function; a GPU runs `expert_mlp_kernel` (two launches between
the work list and the sum over choices), or, for shapes and types the kernel refuses and a small
model can afford, `expert_mlp_dense`. All three take a shard of the experts: weights of experts
first .. first + count - 1, ids of all experts; a pair whose expert is elsewhere adds nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.pallas.expert_config import ExpertConfig, choose_config
from ddtree_jax.pallas.expert_kernel import down as down_kernel
from ddtree_jax.pallas.expert_kernel import gate_up as gate_up_kernel
from ddtree_jax.pallas.expert_kernel import place_of
from ddtree_jax.pallas.expert_sort import MAX_PAIRS, sort_rows
from ddtree_jax.pallas.expert_weights import (
    DEPTH,
    ROWS,
    Int4,
    Records,
    Weight,
    expert_matrix,
    layer_matrices,
    stack_shape,
)
from ddtree_jax.pallas.expert_work import sorted_rows, work_list


def expert_mlp(x, gate, up, down, layer, ids, weights, first=0) -> Float[Array, "m hidden"]:
    """The routed experts on the platform at hand; arguments as in `expert_mlp_reference`."""
    on_gpu = expert_mlp_dense if refusal(x, gate, up, down) else expert_mlp_kernel
    return lax.platform_dependent(
        x, gate, up, down, ids, weights,
        cuda=lambda x, gate, up, down, *w: on_gpu(x, gate, up, down, layer, *w, first),
        default=lambda x, gate, up, down, *w: expert_mlp_reference(
            x, gate, up, down, layer, *w, first
        ),
    )  # fmt: skip


def refusal(x, gate: Weight, up: Weight, down: Weight) -> str | None:
    """Why the kernel cannot take these arrays, or None."""
    if x.dtype != jnp.bfloat16:
        return f"rows are {x.dtype}: must be bfloat16"
    kinds = {type(w) if isinstance(w, (Int4, Records)) else "dense" for w in (gate, up, down)}
    if Int4 in kinds:
        return "INT4 weights as published: must be in records"
    if len(kinds) > 1:
        return "gate, up and down are stored in different ways"
    if kinds == {"dense"} and any(w.dtype != jnp.bfloat16 for w in (gate, up, down)):
        return f"dense weights are {gate.dtype}: must be bfloat16"
    if kinds == {Records} and [w.part for w in (gate, up, down)] != ["gate", "up", "down"]:
        return "records are not those of gate, up and down, in this order"
    layers, experts, width, hidden = stack_shape(gate)
    if stack_shape(up) != (layers, experts, width, hidden):
        return f"gate and up differ: {stack_shape(gate)}, {stack_shape(up)}"
    if stack_shape(down) != (layers, experts, hidden, width) or x.shape[1] != hidden:
        return f"down {stack_shape(down)} and rows of {x.shape[1]} do not fit {stack_shape(gate)}"
    if hidden % ROWS or width % DEPTH:
        return f"hidden {hidden}, width {width}: must be multiples of {ROWS} and {DEPTH}"
    return None


def expert_mlp_kernel(
    x: Float[Array, "m hidden"],
    gate: Array | Records,
    up: Array | Records,
    down: Array | Records,
    layer: int | Int[Array, ""],
    ids: Int[Array, "m k"],
    weights: Float[Array, "m k"],
    first: int | Int[Array, ""] = 0,
    *,
    config: ExpertConfig | None = None,
    interpret=None,
) -> Float[Array, "m hidden"]:
    """As the reference, in bf16 with float32 sums, reading touched experts only.

    The same input gives the same bits. A row's bits do not depend on the other rows either if
    `config.tiles` has one size and `config.balance` is off: sums are then made in one order. With
    balance the last items are summed in parts; with several sizes rows run in that of their slot.
    """
    if why := refusal(x, gate, up, down):
        raise ValueError(why)
    experts, (m, k) = stack_shape(gate)[1], ids.shape
    if weights.shape != ids.shape or x.shape[0] != m:
        raise ValueError(f"{x.shape[0]} rows, ids {ids.shape}, weights {weights.shape}: must agree")
    packed = isinstance(gate, Records)
    config = choose_config(m * k, experts, packed) if config is None else config
    config.check_shared(packed)
    layer, first = jnp.asarray(layer, jnp.int32), jnp.asarray(first, jnp.int32)
    return _run(config, interpret, x, gate, up, down, layer, ids, weights, first)


@partial(jax.jit, static_argnums=(0, 1))  # traced, lowered and compiled once for all layers
def _run(config, interpret, x, gate, up, down, layer, ids, weights, first):
    experts, (m, k) = stack_shape(gate)[1], ids.shape
    local, inert = shard_ids(ids, first, experts)
    if config.tiles == (8,) and m * k <= MAX_PAIRS:
        work, rows = sort_rows(x, ids, weights, first.reshape(1), experts, config.ctas, interpret)
    else:
        work = work_list(local, weights, experts, config.tiles[-1])
        rows = sorted_rows(x, work, config)
    place = place_of(layer)
    hidden = gate_up_kernel(rows, gate, up, place, work, config, interpret)
    each = down_kernel(hidden, down, place, work, m * k, config, interpret)
    each = jnp.where(inert[..., None], 0, each.reshape(m, k, -1))
    return each.astype(jnp.float32).sum(axis=1).astype(x.dtype)


def shard_ids(
    ids: Int[Array, "m k"], first, experts: int
) -> tuple[Int[Array, "m k"], Bool[Array, "m k"]]:
    """Ids within the shard (inert pairs get `experts`), and which pairs are inert."""
    inert = (ids < first) | (ids >= first + experts)
    return jnp.where(inert, experts, ids - first).astype(jnp.int32), inert


def check_routing(ids: Int[Array, "m k"], weights: Float[Array, "m k"], experts: int) -> None:
    """The checked mode: out-of-range ids and NaN weights raise, in eager code or under `checkify`.

    Unchecked, an id outside 0 .. experts-1 is a padding row's and adds nothing, and a NaN weight
    makes its row NaN, which ends the request with its error flag. Only id `experts` means padding
    here.
    """
    known = ((ids >= 0) & (ids <= experts)).all()
    checkify.check(known, "router ids from {low} to {high}: must be from 0 to {experts}",
                   low=ids.min(), high=ids.max(), experts=jnp.int32(experts))  # fmt: skip
    checkify.check(~jnp.isnan(weights).any(), "a router weight is NaN")


def expert_mlp_reference(
    x: Float[Array, "m hidden"],
    gate: Weight,
    up: Weight,
    down: Weight,
    layer: int | Int[Array, ""],
    ids: Int[Array, "m k"],
    weights: Float[Array, "m k"],
    first: int | Int[Array, ""] = 0,
) -> Float[Array, "m hidden"]:
    """sum_k weights[m,k] * down(silu(gate x) * up x) of expert ids[m,k]; ids outside: inert.

    Rows are sorted by expert and worked on in blocks of one expert each; the loop runs over the
    blocks that exist, so an expert without rows is never read. The k products of a row are summed
    in the order of `ids`. Dropless for any routing.
    """
    experts, (m, k) = stack_shape(gate)[1], ids.shape
    pairs = m * k
    block = min(128, 1 << max(0, (2 * pairs // experts).bit_length() - 1))
    local, inert = shard_ids(ids, first, experts)
    flat = local.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    last_block = jnp.cumsum((counts + block - 1) // block, dtype=jnp.int32)
    high = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def matmul(rows, weight, expert):
        matrix = expert_matrix(weight, layer, expert, x.dtype)
        return jnp.einsum("bi,oi->bo", rows, matrix, precision=high)

    def step(i, out):
        expert = jnp.searchsorted(last_block, i, side="right", method="compare_all")
        used = (counts[expert] + block - 1) // block
        start = ends[expert] - counts[expert] + (i - last_block[expert] + used) * block
        slots = start + jnp.arange(block, dtype=jnp.int32)
        here = slots < ends[expert]
        pair = order[jnp.minimum(slots, pairs - 1)]
        rows = x[pair // k]
        hidden = jax.nn.silu(matmul(rows, gate, expert)) * matmul(rows, up, expert)
        return out.at[jnp.where(here, pair, pairs)].set(matmul(hidden, down, expert), mode="drop")

    out = lax.fori_loop(0, last_block[-1], step, jnp.zeros((pairs, x.shape[1]), x.dtype))
    weights = jnp.where(inert, 0, weights).astype(x.dtype)
    return jnp.einsum("mkh,mk->mh", out.reshape(m, k, -1), weights, precision=high)


def expert_mlp_dense(
    x: Float[Array, "m hidden"],
    gate: Weight,
    up: Weight,
    down: Weight,
    layer: int,
    ids: Int[Array, "m k"],
    weights: Float[Array, "m k"],
    first: int | Int[Array, ""] = 0,
) -> Float[Array, "m hidden"]:
    """As the reference, every expert on every row: few and large operations for a GPU.

    It reads all experts of the layer, which only a small model can afford.
    """
    gate, up, down = (layer_matrices(w, layer, x.dtype) for w in (gate, up, down))
    high = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    experts = jnp.arange(gate.shape[0], dtype=ids.dtype) + first
    chosen = ids[..., None] == experts[None, None]
    routed = jnp.where(chosen, weights[..., None], 0).sum(axis=1).astype(x.dtype)
    hidden = jax.nn.silu(jnp.einsum("mh,ewh->mew", x, gate, precision=high))
    hidden = hidden * jnp.einsum("mh,ewh->mew", x, up, precision=high)
    hidden = hidden * routed[..., None]
    return jnp.einsum("mew,ehw->mh", hidden, down, precision=high)
