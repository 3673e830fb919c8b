"""The decode step: draft, build, verify, walk, commit, as one pure function of weights and state.

A chain is a tree with one branch and autoregression a tree of budget 0, so the three steps differ
in the tree they verify and in nothing else.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ddtree_jax.cache import Cache, scatter_tokens
from ddtree_jax.checks import is_int, require
from ddtree_jax.config import PAGE_SIZE, Speculation
from ddtree_jax.decide import (
    best_candidates,
    coupled_tokens,
    drawn_chain,
    rejection_walk,
    shared_noise,
)
from ddtree_jax.model.dflash import DFlash, block_visibility, grouped_attention
from ddtree_jax.model.kimi import Kimi, Rows
from ddtree_jax.pallas.tree_attention import attend, plan_if_supported
from ddtree_jax.sharding import on_mesh
from ddtree_jax.state import DecodeState, Weights, emit
from ddtree_jax.tree import Tree, build, walk


def autoregressive_step(weights: Weights, state: DecodeState) -> DecodeState:
    """Plain decoding: one row a request, one token a pass."""
    return _step(weights, state, Speculation(0, 1), 1)


def dflash_step(
    weights: Weights,
    state: DecodeState,
    *,
    block_size: int | None = None,
    acceptance: str = "coupled",
) -> DecodeState:
    """Verify one token of every position as a chain of block_size rows.

    With `coupled` acceptance the drafter's likeliest tokens, with `rejection` tokens drawn from it.
    """
    block = served_block_size(weights, block_size)
    chain = Speculation(block - 1, 1, block, acceptance)
    return _step(weights, state, chain, block, drawn=acceptance == "rejection")


def ddtree_step(
    weights: Weights, state: DecodeState, *, speculation: Speculation = Speculation()
) -> DecodeState:
    """Verify the `budget` most probable prefixes as a tree of budget+1 rows (DDTree)."""
    require(isinstance(speculation, Speculation), "speculation", speculation, "a Speculation")
    if speculation.top_k > weights.config.vocab_size:
        raise ValueError(
            f"top_k={speculation.top_k}: must be at most vocab_size={weights.config.vocab_size}"
        )
    if speculation.budget == 0 and weights.drafter_config is None:
        return autoregressive_step(weights, state)
    block = served_block_size(weights, speculation.block_size)
    if speculation.budget == 0:
        return autoregressive_step(weights, state)
    return _step(weights, state, speculation, block)


def served_block_size(weights: Weights, block_size: int | None) -> int:
    """Drafter rows of a pass: those asked for, or the drafter's own, which is also the most."""
    if weights.drafter_config is None:
        raise ValueError("this model has no drafter: only method='autoregressive' can run")
    trained = weights.drafter_config.block_size
    block = trained if block_size is None else block_size
    ok = is_int(block) and 2 <= block <= trained
    require(ok, "block_size", block, f"from 2 to the drafter's {trained}")
    return int(block)


def draft_and_walk(
    weights: Weights,
    state: DecodeState,
    speculation: Speculation,
    block_size: int,
    drawn: bool = False,
) -> tuple[Tree, Rows, Int[Array, "r path"], Int[Array, " r"], Int[Array, " r"]]:
    """Everything of a step that reads: the tree, its verified rows, and the walk's path over it.

    `drawn` asks for a chain drawn from the drafter instead of a tree of its likeliest tokens. This
    shows what a step will commit.
    """
    target, law, horizon = weights.target_module(), state.law, block_size - 1
    plan, vocab, budget = weights.plan, weights.config.vocab_size, speculation.budget
    # Column d belongs to the token at depth d+1, position S+d+1.
    positions = state.lengths[:, None] + jnp.arange(1, block_size + 1, dtype=jnp.int32)[None]
    coupled = speculation.acceptance == "coupled"
    noise = shared_noise(plan, law, positions, vocab) if coupled else None
    q = None
    if budget == 0:
        empty = jnp.zeros((state.root.shape[0], 0, 1), jnp.float32)
        nodes = build(state.root, empty, empty.astype(jnp.int32), 0, state.active)
    else:
        logits = draft(target, weights.drafter_module(), state, block_size)
        ahead, active = positions[:, :horizon], state.active
        if drawn:
            q, nodes = drawn_chain(plan, logits, law, ahead, state.root, active, vocab)
        else:
            there = None if noise is None else noise[:, :horizon]
            how = speculation.top_k, vocab, coupled
            found = best_candidates(plan, logits, law, ahead, there, *how)
            nodes = build(state.root, *found, budget, active)
    logits, rows = verify(target, state, nodes, _tap_layers(weights))
    barred = state.count[:, None] + nodes.depth < law.min_new_tokens[:, None]
    stops = state.stop_ids, barred
    if not coupled:
        walked = rejection_walk(plan, nodes, logits, law, positions, *stops, q, vocab)
        return nodes, rows, *walked
    by_node = None if noise is None else jnp.take_along_axis(noise, nodes.depth[..., None], axis=1)
    after = node_positions(state, nodes) + 1
    chosen = coupled_tokens(plan, logits, law, after, by_node, *stops, vocab)
    return nodes, rows, *walk(nodes, chosen, horizon)


def _step(
    weights: Weights,
    state: DecodeState,
    speculation: Speculation,
    block_size: int,
    drawn: bool = False,
) -> DecodeState:
    run = partial(_local_step, speculation=speculation, block_size=block_size, drawn=drawn)
    return on_mesh(run, weights, state)


def _local_step(
    weights: Weights,
    state: DecodeState,
    speculation: Speculation,
    block_size: int,
    drawn: bool,
) -> DecodeState:
    """The step of this device's parts: all of it on one device."""
    nodes, rows, path, length, bonus = draft_and_walk(
        weights, state, speculation, block_size, drawn
    )
    drafter = weights.drafter_module() if weights.drafter is not None else None
    # Without this barrier the scatter of autoregression, whose indices need no logits, may be
    # scheduled before attention has read the cache, and XLA copies the whole pool.
    latents, taps, cache, path = lax.optimization_barrier(
        (rows.latents, rows.taps, state.cache, path)
    )
    cache = commit(cache, drafter, state, nodes, latents, taps, path, length)
    experts = None if state.experts is None else distinct_experts(weights, rows, nodes)
    return _advance(replace(state, cache=cache), nodes, path, length, bonus, experts)


def distinct_experts(weights: Weights, rows: Rows, tree: Tree) -> Int[Array, "r moe_layers"]:
    """How many experts of every MoE layer a request's rows went to; unused rows go to none."""
    requests, nodes = tree.tokens.shape
    layers, _, k = rows.experts.shape
    ids = rows.experts.reshape(layers, requests, nodes * k)
    layer = jnp.arange(layers, dtype=jnp.int32)[:, None, None]
    request = jnp.arange(requests, dtype=jnp.int32)[None, :, None]
    touched = jnp.zeros((layers, requests, weights.config.n_routed_experts), bool)
    return touched.at[layer, request, ids].set(True, mode="drop").sum(axis=-1, dtype=jnp.int32).T


def _tap_layers(weights: Weights) -> tuple[int, ...]:
    return () if weights.drafter_config is None else weights.drafter_config.target_layer_ids


def draft(
    target: Kimi, drafter: DFlash, state: DecodeState, block_size: int
) -> Float[Array, "r horizon v"]:
    """Logits of the positions after the root: one drafter pass over the root and masks.

    Rows see the cached context (the window's pages only, in sliding layers) and their own block.
    As with `verify`, a device that holds a part of the head gives its part of the vocabulary.
    """
    config, tables = drafter.config, state.block_tables
    requests, pages = tables.shape
    offsets = jnp.arange(block_size, dtype=jnp.int32)[None]
    positions = state.lengths[:, None] + offsets
    block = jnp.where(offsets == 0, state.root[:, None], config.mask_token_id)

    def attention(queries, keys, values, layer):
        window = config.sliding_window
        full = config.layer_types[layer] == "full_attention"
        read = pages if full else min(pages, -(-window // PAGE_SIZE) + 1)

        def one(q, k, v, table, length, rows):
            first = jnp.clip((length - 1) // PAGE_SIZE - read + 1, 0, pages - read)
            table = lax.dynamic_slice_in_dim(table, first, read)
            cached = first * PAGE_SIZE + jnp.arange(read * PAGE_SIZE, dtype=jnp.int32)
            shape = (read * PAGE_SIZE, *k.shape[1:])
            keys = jnp.concatenate([state.cache.keys[layer, table].reshape(shape), k])
            values = jnp.concatenate([state.cache.values[layer, table].reshape(shape), v])
            context = block_visibility(config, layer, rows, cached, block=False)
            inside = block_visibility(config, layer, rows, rows, block=True)
            mask = jnp.concatenate([context & (cached < length)[None], inside], axis=1)
            return grouped_attention(q, keys, values, mask)

        return jax.vmap(one)(queries, keys, values, tables, state.lengths, positions)

    hidden = drafter(target.embed(block), positions, attention)
    return target.lm_head(hidden[:, 1:])


def verify(
    target: Kimi, state: DecodeState, tree: Tree, tap_layers: tuple[int, ...]
) -> tuple[Float[Array, "r n v"], Rows]:
    """One target pass over all nodes of all trees; reads the cache, writes nothing."""
    requests, nodes = tree.tokens.shape
    starts = row_starts(tree)
    ancestors = tree.ancestors.reshape(requests * nodes, -1)
    used = jnp.arange(nodes, dtype=jnp.int32)[None] < tree.size[:, None]
    config, pool = target.config, state.cache.latents
    place = (state.block_tables, state.lengths, starts, ancestors)
    sizes = dict(value_size=config.kv_lora_rank, max_rows=nodes)
    plan = plan_if_supported(pool, *place, heads=target.heads, **sizes)

    def attention(mla, x, positions, layer):
        nope, rope, latents = mla.project(x, positions)
        out = attend(
            mla.absorb(nope, rope), latents, pool, layer, *place, plan,
            scale=config.softmax_scale, **sizes,
        )  # fmt: skip
        return mla.output(out), latents

    positions = node_positions(state, tree).reshape(-1)
    rows = target(tree.tokens.reshape(-1), positions, used.reshape(-1), attention, tap_layers)
    return target.lm_head(rows.hidden).reshape(requests, nodes, -1), rows


def row_starts(tree: Tree) -> Int[Array, " r1"]:
    """The first packed row of every request, and the end: all trees here have one row count."""
    requests, nodes = tree.tokens.shape
    return jnp.arange(requests + 1, dtype=jnp.int32) * nodes


def node_positions(state: DecodeState, tree: Tree) -> Int[Array, "r n"]:
    """Positions of all nodes: siblings share the one their depth gives them."""
    return state.lengths[:, None] + tree.depth


def path_rows(tree: Tree, path: Int[Array, "r path"]) -> Int[Array, "r path"]:
    """Packed rows of the nodes on the path, which need not be the request's first rows."""
    return row_starts(tree)[:-1, None] + path


def commit(
    cache: Cache,
    drafter: DFlash | None,
    state: DecodeState,
    tree: Tree,
    latents: Float[Array, "layers m latent"],
    taps: Float[Array, "m taps hidden"],
    path: Int[Array, "r path"],
    length: Int[Array, " r"],
) -> Cache:
    """Write the path's latents, and the drafter's context made of the path's taps, to the pages."""
    row = path_rows(tree, path)
    place = (state.block_tables, state.lengths, length)
    pool = scatter_tokens(cache.latents, latents[:, row], *place)
    if drafter is None:
        return replace(cache, latents=pool)
    positions = state.lengths[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    keys, values = drafter.context(taps[row], positions)
    return Cache(
        pool,
        scatter_tokens(cache.keys, keys, *place),
        scatter_tokens(cache.values, values, *place),
    )


def _advance(state: DecodeState, tree: Tree, path, length, bonus, experts) -> DecodeState:
    """Emit the path's drafted tokens and the bonus, and make the bonus the next root."""
    offset = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    accepted = jnp.maximum(length - 1, 0)
    failed = bonus < 0
    drafted = offset < accepted[:, None]

    def run(field, last):
        values = jnp.take_along_axis(field, path, axis=1)[:, 1:]
        values = jnp.concatenate([values, last[:, None]], axis=1)
        return jnp.where(drafted, values, last[:, None])

    zero = jnp.zeros_like(bonus)
    active, tokens = state.active, run(tree.tokens, bonus)
    state = emit(
        state,
        tokens,
        accepted + jnp.where(failed, 0, 1),
        failed,
        run(tree.depth, zero),
        run(tree.rank, zero - 1),
        jnp.maximum(tree.size - 1, 0),
        experts,
    )
    return replace(
        state,
        lengths=state.lengths + length,
        root=jnp.where(active & ~failed, bonus, state.root),
    )
