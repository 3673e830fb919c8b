"""Training of the target on one GPU. Run it through `python -m ddtree_jax.train.run`.

Float32 masters, bf16 work; the token streams lie on the device and a jitted call does a chunk of
steps, so that Python is out of the way. Routed experts are trained through INT4 in the last part,
expert load is balanced by the selection bias alone (DeepSeek-V3, section 2.1.2). The drafter is
trained beside it (`joint`).
"""

from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax.config import KimiConfig
from ddtree_jax.model.kimi import Kimi
from ddtree_jax.train import forward, joint, store
from ddtree_jax.train.nano import Scale
from ddtree_jax.train.optimizer import Optimizer
from ddtree_jax.train.pace import UNDECIDED, Pace, drive
from ddtree_jax.train.params import initialise
from ddtree_jax.train.windows import LONGEST, Streams, Windows, sample


@dataclass(frozen=True)
class Recipe:
    optimizer: Optimizer = field(default_factory=Optimizer)
    batch: int = 32
    length: int = 2048
    long_length: int = 4096  # of the last `long_share` of the steps, with a smaller batch
    long_share: float = 0.2
    chunk: int = 20  # steps of one jitted call
    code_share: float = 0.62
    loop_share: float = 0.2
    longest_repeat: int = LONGEST
    quantize_from: float = 0.6
    balance: float = 1e-3
    z_loss: float = 1e-4
    joint_weight: float = 0.3  # of the drafter's block loss; 0: no drafter
    joint_anchors: int = 32  # blocks in a window of `length`, as many more in a longer one
    seed: int = 0
    dtype: str = "bfloat16"
    attention: str = "xla"
    block_attention: str = "plain"

    @property
    def tokens(self) -> int:
        """Tokens of one step, at either length."""
        return self.batch * self.length

    def shape(self, step: int, total: int) -> tuple[int, int]:
        """Batch and length of a step."""
        long_from = (total * (1 - self.long_share)) // self.chunk * self.chunk
        if total == UNDECIDED or step < long_from:
            return self.batch, self.length
        return self.tokens // self.long_length, self.long_length


class Losses(NamedTuple):
    """Sums over a step: nats and labels of code and of prose, rows of each expert."""

    nats: jax.Array  # [2]
    labels: jax.Array  # [2]
    load: jax.Array  # [moe layers, experts]


def token_losses(config: KimiConfig, weights, tokens, attention: str, counts=None, taps=()):
    """Cross entropy and log-partition of every label of `tokens` [b, t+1], both [b, t]; taps."""
    rows = forward.run(config, weights, tokens[:, :-1], attention, taps, counts)
    scores = forward.logits(weights, rows.hidden)
    partition = jax.nn.logsumexp(scores, axis=-1)
    shape = (tokens.shape[0], tokens.shape[1] - 1)
    picked = pick(scores, tokens[:, 1:].reshape(-1))
    return (partition - picked).reshape(shape), partition.reshape(shape), rows.taps


def pick(scores, labels):
    """The score of each row's label, without a scatter backwards."""
    vocabulary = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
    return jnp.where(labels[:, None].astype(jnp.int32) == vocabulary, scores, 0).sum(axis=-1)


def loss(scale: Scale, recipe: Recipe, params, windows: Windows, quantized, key):
    """`params`: masters of the target and of the drafter, the latter None without joint loss."""
    masters, drafter = params
    weights = forward.working(masters, jnp.dtype(recipe.dtype), quantized)
    counts: list[jax.Array] = []
    taps = () if drafter is None else scale.drafter.target_layer_ids
    nats, partition, taps = token_losses(
        scale.trained, weights, windows.tokens, recipe.attention, counts, taps
    )
    nats = jnp.where(windows.kept, nats, 0)
    z = jnp.where(windows.kept, partition**2, 0)
    total = windows.kept.sum()
    kinds = jnp.stack([windows.code, ~windows.code]).astype(jnp.float32)  # [2, b]
    losses = Losses(kinds @ nats.sum(axis=1), kinds @ windows.kept.sum(axis=1), jnp.stack(counts))
    value = (nats.sum() + recipe.z_loss * z.sum()) / total
    if drafter is None:
        return value, (losses, {"loss": value})
    count = recipe.joint_anchors * windows.kept.shape[1] // recipe.length
    block, accept = joint.loss(
        scale.drafter, drafter, weights, taps, windows, key, count, recipe.block_attention
    )
    metrics = {"loss": value, "block": block, "accept": accept}
    return value + recipe.joint_weight * block, (losses, metrics)


def train_step(scale: Scale, recipe: Recipe, shape, streams: Streams, state):
    """One step; what it sees depends on the seed and `state["step"]` alone."""
    step, total, optimizer = state["step"], state["total"], recipe.optimizer
    key = jax.random.fold_in(jax.random.key(recipe.seed), step)
    windows = sample(
        key, streams, *shape, recipe.code_share, recipe.loop_share, recipe.longest_repeat
    )
    quantized = step >= recipe.quantize_from * total
    grad = jax.value_and_grad(partial(loss, scale, recipe), has_aux=True)
    both = state["params"], state.get("drafter")
    (_, (losses, metrics)), (grads, drafter_grads) = grad(
        both, windows, quantized, jax.random.fold_in(key, 1)
    )
    params, moments, norm = optimizer.update(state["params"], grads, state["moments"], step, total)
    rate = optimizer.rate(step, total)
    speed = recipe.balance * rate / optimizer.peak
    params = balance(scale.trained, params, losses.load, speed)
    load = losses.load.astype(jnp.float32)
    metrics |= {
        "nats": losses.nats,
        "labels": losses.labels,
        "norm": norm,
        "rate": rate,
        "imbalance": (load.max(axis=1) / load.mean(axis=1)).max(),
    }
    out = {"params": params, "moments": moments, "step": step + 1, "total": total}
    if drafter_grads is not None:
        out |= joint.update(optimizer, state, drafter_grads, step, total)
    return out, metrics


def balance(config: KimiConfig, params, load, speed):
    """Raise the selection bias of experts with less than the mean load, lower the others'."""
    out, load = dict(params), load.astype(jnp.float32)
    for i in range(config.num_moe_layers):
        name = f"layers/{config.first_k_dense_replace + i}/mlp/gate/{forward.KEEP_WIDE}"
        out[name] = params[name] + speed * jnp.sign(load[i].mean() - load[i])
    return out


@lru_cache
def chunk_step(scale: Scale, recipe: Recipe, shape: tuple[int, int]):
    """(state, streams) -> (state, metrics [chunk]), jitted, the state donated."""

    def steps(state, streams):
        body = partial(train_step, scale, recipe, shape, streams)
        return lax.scan(lambda s, _: body(s), state, None, length=recipe.chunk)

    return jax.jit(steps, donate_argnums=0)


def initial(scale: Scale, recipe: Recipe):
    params = initialise(Kimi, scale.trained, recipe.seed)
    moments = recipe.optimizer.init(params)
    state = {
        "params": params,
        "moments": moments,
        "step": jnp.int32(0),
        "total": jnp.int32(UNDECIDED),
    }
    if recipe.joint_weight:
        state |= joint.initial(recipe.optimizer, scale.drafter, recipe.seed)
    return state


def summary(recipe: Recipe, step: int, total, took: float, metrics) -> dict:
    """Means over a chunk, for the log."""
    m = jax.device_get(metrics)
    code, prose = m["nats"].sum(0) / np.maximum(m["labels"].sum(0), 1)
    drafter = {name: m[name].mean() for name in ("block", "accept") if name in m}
    return {
        "step": step,
        "total": total,
        "tokens": step * recipe.tokens,
        "loss": m["loss"].mean(),
        "code": code,
        "prose": prose,
        **drafter,
        "norm": m["norm"].mean(),
        "lr": m["rate"][-1],
        "imbalance": m["imbalance"].mean(),
        "tok_s": round(recipe.chunk * recipe.tokens / took),
    }


def train(
    scale: Scale, recipe: Recipe, streams: Streams, workdir: Path, pace: Pace, start=None
) -> bool:
    """Train or go on training; False if the deadline came first. Exports at every checkpoint.

    Without a checkpoint it begins from the parameters `start`, those of an export say.
    """
    checkpoints = store.Checkpoints(workdir / "target")
    log = store.Log(workdir / "target_log.jsonl")
    state = initial(scale, recipe)
    if start is not None:
        state["params"] = start
    if (found := checkpoints.restore(state)) is not None:
        state = found
        log.write(resumed=int(state["step"]), total=int(state["total"]))
    compiled = set()

    def work(state, step):
        shape = recipe.shape(step, int(state["total"]))
        compiled.add(shape)
        return chunk_step(scale, recipe, shape)(state, streams)

    def save(state):
        checkpoints.save(int(state["step"]), state)
        store.export(workdir, store.TARGET, store.published(state["params"]))
        if "drafter" in state:
            joint.export(workdir, state["drafter"])

    def report(step, total, took, metrics):
        log.write(repeated=True, **summary(recipe, step, total, took, metrics))

    state, done = drive(
        state, work, save, report, pace, recipe.chunk,
        lambda step, total: recipe.shape(step, total) not in compiled,
    )  # fmt: skip
    checkpoints.close()
    log.write(finished=done, step=int(state["step"]), total=int(state["total"]))
    return done


@lru_cache
def sum_of_nats(config: KimiConfig, attention: str, batch: int, length: int):
    """(weights, tokens [batch, length + 1], count) -> nats of the first `count` labels."""

    def nats(weights, tokens, count):
        out, *_ = token_losses(config, weights, tokens, attention)
        here = jnp.arange(batch * length, dtype=jnp.int32).reshape(batch, length) < count
        return jnp.where(here, out, 0).sum()

    return jax.jit(nats)


def bits_per_byte(
    config: KimiConfig, weights, documents, attention: str, length=2048, batch=32, most=1 << 22
) -> dict:
    """Bits per byte of documents [(ids closed by EOS, bytes)], said on end in windows of `length`.

    `weights` are those a step computes with. Reads whole documents, about `most` tokens of them.
    """
    eos = documents[0][0][-1:]
    ids, size = [eos], 0
    for tokens, count in documents:
        if sum(map(len, ids)) + len(tokens) > most and size:
            break
        ids.append(np.asarray(tokens))
        size += count
    stream = np.concatenate(ids).astype(np.int32)
    span = batch * length
    labels = len(stream) - 1
    padded = np.pad(stream, (0, -labels % span), constant_values=int(eos[0]))

    nats = sum_of_nats(config, attention, batch, length)
    total = 0.0
    for start in range(0, labels, span):
        rows = np.lib.stride_tricks.sliding_window_view(
            padded[start : start + span + 1], length + 1
        )
        total += float(nats(weights, jnp.asarray(rows[::length]), min(span, labels - start)))
    return {
        "bits_per_byte": total / np.log(2) / size,
        "nats_per_token": total / labels,
        "tokens": labels,
        "bytes": size,
    }
