"""Training of the DFlash drafter (arXiv 2602.06036, section 4.2) on text said by its target.

The frozen target runs over whole sequences and leaves its taps; at random anchors the drafter
guesses the tokens after the anchor (`blocks`). It goes on from the drafter trained beside the
target; windows of training text among the said ones keep it general.
"""

from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ddtree_jax.model.dflash import DFlash
from ddtree_jax.train import blocks, forward, joint, store
from ddtree_jax.train.blocks import Blocks
from ddtree_jax.train.nano import Scale
from ddtree_jax.train.optimizer import Optimizer
from ddtree_jax.train.pace import UNDECIDED, Pace, drive
from ddtree_jax.train.params import Flat, initialise
from ddtree_jax.train.sample import TEMPERATURES, Texts
from ddtree_jax.train.windows import Streams, sample


@dataclass(frozen=True)
class Recipe:
    optimizer: Optimizer = field(
        default_factory=lambda: Optimizer(peak=1.5e-3, warmup=40, decay_share=0.5)
    )
    rows: int = 65536  # tokens of a step: sequences are rows // length
    anchors: int = 64  # of each sequence
    real_share: float = 0.15  # of the sequences: training text instead of said text
    code_share: float = 0.62
    chunk: int = 20
    long_every: int = 3  # every third chunk is of the group of long texts
    least: int = 16  # texts with fewer said tokens are left out
    held: int = 512  # short texts kept for evaluation; of long texts half of it
    seed: int = 1
    dtype: str = "bfloat16"
    attention: str = "xla"
    block_attention: str = "plain"


class Data(NamedTuple):
    """Texts on the device; ids from `prompt` to before `end` were said by the target."""

    tokens: Int[Array, "n t"]
    prompt: Int[Array, " n"]
    end: Int[Array, " n"]
    temperature: Float[Array, " n"]  # 0: greedy


def load_data(path: Path, least: int, held: int) -> tuple[Data, Data]:
    """(training, held-out) texts of one group."""
    texts = Texts.load(path)
    use = np.flatnonzero(texts.end - texts.prompt >= least)
    if len(use) <= held:
        raise ValueError(f"{path} has {len(use)} usable texts; {held} are to be held out")
    types = {"tokens": np.uint16, "prompt": np.int32, "end": np.int32, "temperature": np.float32}
    fields = [getattr(texts, name)[use].astype(dtype) for name, dtype in types.items()]
    train, rest = ([jnp.asarray(f[s]) for f in fields] for s in (slice(-held), slice(-held, None)))
    return Data(*train), Data(*rest)


def choose(key, data: Data, count: int, horizon: int) -> Blocks:
    """`count` random anchors of every text: said tokens whose next token was said too."""
    room = jnp.maximum(data.end - 1 - data.prompt, 0)[:, None]
    u = jax.random.uniform(key, (data.tokens.shape[0], count))
    anchors = data.prompt[:, None] + jnp.minimum((u * room).astype(jnp.int32), room - 1)
    anchors = jnp.maximum(anchors, 0)
    places, labels = blocks.at(data.tokens, anchors, horizon)
    valid = (places < data.end[:, None, None]) & (room > 0)[..., None]
    return Blocks(anchors, labels, valid)


def real_text(key, streams: Streams, count: int, length: int, code_share: float) -> Data:
    """Windows of training text, all but their first token as if said by the target."""
    tokens = sample(key, streams, count, length - 1, code_share, 0.0, 4).tokens
    ones = jnp.ones(count, jnp.int32)
    return Data(tokens, ones, ones * length, -ones.astype(jnp.float32))


def taps_of(scale: Scale, target: Flat, tokens, implementation: str):
    ids = scale.drafter.target_layer_ids
    rows = forward.run(scale.trained, target, tokens, implementation, taps=ids)
    return lax.stop_gradient(rows.taps).reshape(*tokens.shape, len(ids), -1)


def loss(scale: Scale, recipe: Recipe, masters: Flat, target: Flat, taps, tokens, chosen: Blocks):
    weights = {n: v.astype(jnp.dtype(recipe.dtype)) for n, v in masters.items()}
    scores = blocks.block_logits(
        scale.drafter, weights, target, taps, tokens, chosen.anchors, recipe.block_attention
    )
    return blocks.loss(scores, chosen)


def train_step(
    scale: Scale, recipe: Recipe, batch: int, target: Flat, data: Data, streams: Streams, state
):
    step, total = state["step"], state["total"]
    which, where, real = jax.random.split(jax.random.fold_in(jax.random.key(recipe.seed), step), 3)
    length, given = data.tokens.shape[1], round(recipe.real_share * batch)
    rows = jax.random.randint(which, (batch - given,), 0, data.tokens.shape[0])
    part = Data(*(a[rows] for a in data))
    part = part._replace(tokens=part.tokens.astype(jnp.int32))
    if given:
        other = real_text(real, streams, given, length, recipe.code_share)
        part = Data(*(jnp.concatenate(pair) for pair in zip(part, other, strict=True)))
    chosen = choose(where, part, recipe.anchors, scale.drafter.horizon)
    taps = taps_of(scale, target, part.tokens, recipe.attention)
    grad = jax.value_and_grad(partial(loss, scale, recipe), has_aux=True)
    (value, accept), grads = grad(state["params"], target, taps, part.tokens, chosen)
    params, moments, norm = recipe.optimizer.update(
        state["params"], grads, state["moments"], step, total
    )
    rate = recipe.optimizer.rate(step, total)
    metrics = {"loss": value, "accept": accept, "norm": norm, "rate": rate}
    return {"params": params, "moments": moments, "step": step + 1, "total": total}, metrics


@lru_cache
def chunk_step(scale: Scale, recipe: Recipe, batch: int):
    def steps(state, target, data, streams):
        body = partial(train_step, scale, recipe, batch, target, data, streams)
        return lax.scan(lambda s, _: body(s), state, None, length=recipe.chunk)

    return jax.jit(steps, donate_argnums=0)


def train(
    scale: Scale, recipe: Recipe, streams: Streams, workdir: Path, source: Path, pace: Pace,
    target: Flat, start: Flat | None = None,
) -> bool:  # fmt: skip
    """Train or go on training on the texts in `source`; False if the deadline came first.

    Without a checkpoint it begins from masters `start`, without these from scratch.
    """
    groups, held = {}, {}
    for name, count in (("short", recipe.held), ("long", recipe.held // 2)):
        groups[name], held[name] = load_data(source / f"sample_{name}.npz", recipe.least, count)
    checkpoints = store.Checkpoints(workdir / "drafter")
    log = store.Log(workdir / "drafter_log.jsonl")
    params = initialise(DFlash, scale.drafter, recipe.seed) if start is None else start
    state = {
        "params": params,
        "moments": recipe.optimizer.init(params),
        "step": jnp.int32(0),
        "total": jnp.int32(UNDECIDED),
    }
    if (found := checkpoints.restore(state)) is not None:
        state = found
        log.write(resumed=int(state["step"]), total=int(state["total"]))
    elif start is not None:
        log.write(accept_length_before=evaluate(scale, recipe, params, target, held))
    compiled = set()

    def group(step):
        turn = (step // recipe.chunk) % recipe.long_every
        return "long" if turn == recipe.long_every - 1 else "short"

    def work(state, step):
        data = groups[group(step)]
        compiled.add(group(step))
        batch = max(1, recipe.rows // data.tokens.shape[1])
        return chunk_step(scale, recipe, batch)(state, target, data, streams)

    def save(state):
        checkpoints.save(int(state["step"]), state)
        joint.export(workdir, state["params"])

    def report(step, total, took, metrics):
        m = jax.device_get(metrics)
        log.write(
            repeated=True, step=step, total=total, group=group(step - recipe.chunk),
            loss=m["loss"].mean(), accept=m["accept"].mean(), norm=m["norm"].mean(),
            lr=m["rate"][-1],
            tok_s=round(recipe.chunk * recipe.rows / took),
        )  # fmt: skip

    state, done = drive(
        state, work, save, report, pace, recipe.chunk,
        lambda step, total: group(step) not in compiled,
    )  # fmt: skip
    checkpoints.close()
    log.write(finished=done, step=int(state["step"]), total=int(state["total"]))
    if done:
        log.write(accept_length=evaluate(scale, recipe, state["params"], target, held))
    return done


def evaluate(scale: Scale, recipe: Recipe, masters: Flat, target: Flat, held: dict[str, Data]):
    """Mean accept length of a chain (bonus counted) at random anchors of held-out texts,
    teacher-forced: leading rows whose argmax is the token said, plus one."""
    dtype, kept = jnp.dtype(recipe.dtype), sorted(set(TEMPERATURES))

    @jax.jit
    def measure(masters, target, part, key):
        tokens = part.tokens.astype(jnp.int32)
        chosen = choose(key, part, recipe.anchors, scale.drafter.horizon)
        taps = taps_of(scale, target, tokens, recipe.attention)
        weights = {n: v.astype(jnp.bfloat16).astype(dtype) for n, v in masters.items()}
        scores = blocks.block_logits(
            scale.drafter, weights, target, taps, tokens, chosen.anchors, recipe.block_attention
        )
        taken, whole = blocks.accepted(scores, chosen)
        kinds = jnp.stack([part.temperature == t for t in kept]).astype(jnp.float32)
        return kinds @ (taken * whole).sum(1), kinds @ whole.sum(1)

    out = {}
    for name, data in held.items():
        batch = min(max(1, recipe.rows // data.tokens.shape[1]), data.tokens.shape[0])
        sums = np.zeros((2, len(kept)))
        for start in range(0, data.tokens.shape[0] - batch + 1, batch):
            part = Data(*(a[start : start + batch] for a in data))
            key = jax.random.fold_in(jax.random.key(recipe.seed + 1), start)
            sums += np.stack(jax.device_get(measure(masters, target, part, key)))
        for temperature, taken, count in zip(kept, *sums, strict=True):
            kind = f"T={temperature}" if temperature else "greedy"
            out[f"{name} {kind}"] = taken / max(count, 1)
    return out
