"""The drafter trained beside its target, on the same windows of training text.

A DFlash block loss at random anchors, whose gradient runs through the taps into the target: like
jointly trained multi-token heads, it makes the features say more about the next tokens. Embedding
and head as the drafter uses them are constants here.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from ddtree_jax.config import DFlashConfig
from ddtree_jax.model.dflash import DFlash
from ddtree_jax.train import blocks, store
from ddtree_jax.train.optimizer import Optimizer
from ddtree_jax.train.params import Flat, initialise
from ddtree_jax.train.windows import Windows


def initial(optimizer: Optimizer, config: DFlashConfig, seed: int, params: Flat | None = None):
    """The drafter's part of a training state: a fresh drafter, or `params`, without moments."""
    params = initialise(DFlash, config, seed + 1) if params is None else params
    return {"drafter": params, "drafter_moments": optimizer.init(params)}


def choose(key, windows: Windows, count: int, horizon: int) -> blocks.Blocks:
    """`count` anchors a window, one in each of as many equal parts, each with a token before it
    and its whole horizon in the window. Labels on inserted copies do not count."""
    batch, length = windows.kept.shape
    room = length - horizon  # anchors are 1..room
    part = jnp.arange(count, dtype=jnp.float32)[None] + jax.random.uniform(key, (batch, count))
    anchors = 1 + jnp.minimum((part * (room / count)).astype(jnp.int32), room - 1)
    places, labels = blocks.at(windows.tokens, anchors, horizon)
    valid = jax.vmap(lambda row, where: row[where])(windows.kept, places - 1)
    return blocks.Blocks(anchors, labels, valid)


def loss(config: DFlashConfig, drafter: Flat, target: Flat, taps, windows: Windows, key, count,
         implementation: str):  # fmt: skip
    """Block loss and teacher-forced accept length; `taps` [b * t, taps, hidden] carry gradient."""
    fixed = {n: lax.stop_gradient(target[n]) for n in ("embed_tokens/weight", "lm_head/weight")}
    dtype = fixed["embed_tokens/weight"].dtype
    drafter = {n: v.astype(dtype) for n, v in drafter.items()}
    tokens = windows.tokens[:, :-1]
    chosen = choose(key, windows, count, config.horizon)
    taps = taps.reshape(*tokens.shape, *taps.shape[1:])
    scores = blocks.block_logits(
        config, drafter, fixed, taps, tokens, chosen.anchors, implementation
    )
    return blocks.loss(scores, chosen)


def update(optimizer: Optimizer, state: dict, grads: Flat, step, total) -> dict:
    params, moments, _ = optimizer.update(
        state["drafter"], grads, state["drafter_moments"], step, total
    )
    return {"drafter": params, "drafter_moments": moments}


def export(folder: Path, params: Flat) -> None:
    half = {n: v.astype(jnp.bfloat16) for n, v in params.items()}
    store.export(folder, store.DRAFTER, half)


def load(folder: Path) -> Flat:
    """The exported drafter as float32 masters."""
    exported = store.read_export(folder, store.DRAFTER)
    return {n: v.astype(jnp.float32) for n, v in exported.items()}
