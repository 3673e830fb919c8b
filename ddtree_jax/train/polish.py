"""Less repetition: after training, the target learns from its own texts, also where they loop.

Small models said greedily fall into loops. Sequence-level unlikelihood (Welleck et al. 2019,
arXiv 1908.04319), in rounds: the current, quantised weights say texts; where a token completes an
n-gram that its text has had before, the loss is -log(1 - p(token)). No text may end: else the model
learns to say [EOS], in the middle of a word, where it would repeat itself. So [EOS] is barred from
the texts, and -log(1 - p([EOS])) is a loss on all that was said. Sampled texts that do not
repeat are learnt as they are, which lowers the entropy as post-training does. Real windows go on
beside it, with the cross entropy that keeps the repetition of real text and with the drafter.
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

from ddtree_jax.config import KimiConfig
from ddtree_jax.train import forward, joint, sample, store
from ddtree_jax.train.nano import Scale
from ddtree_jax.train.optimizer import Optimizer
from ddtree_jax.train.pace import Pace
from ddtree_jax.train.params import Flat
from ddtree_jax.train.target import balance, pick, token_losses
from ddtree_jax.train.windows import Streams
from ddtree_jax.train.windows import sample as windows

# One more than an even length: cuDNN wants inputs of an even length.
SHORT = sample.Group("short", batch=2048, low=32, high=160, length=385, segment=385)
LONG = sample.Group("long", batch=512, low=1536, high=1536, length=1665, segment=1665)
WARM = 0.7  # temperature of the texts that are learnt
TEMPERATURES = (0.0, WARM, 0.0, 0.0)
SAVE_EVERY = 4  # rounds


@dataclass(frozen=True)
class Recipe:
    optimizer: Optimizer = field(
        default_factory=lambda: Optimizer(peak=1e-3, warmup=20, decay_share=0.8)
    )
    groups: tuple[sample.Group, ...] = (SHORT, LONG)  # texts of a round
    rounds: int = 12
    steps: int = 60  # of a round
    chunk: int = 20
    kept: int = 3  # rounds whose texts are drawn from
    real: tuple[int, int] = (16, 2048)  # windows of training text in a step
    said: tuple[int, ...] = (80, 16)  # texts of the target in a step, of each group
    strength: float = 3.0  # of both unlikelihoods against the cross entropy
    again: float = 0.5  # weight of an n-gram's second occurrence; from the third on it is 1
    distil: float = 0.2  # of the cross entropy of own texts
    joint_weight: float = 0.3  # of the drafter's block loss; 0: no drafter
    joint_anchors: int = 32  # blocks in a real window
    code_share: float = 0.62
    loop_share: float = 0.2
    seed: int = 2
    dtype: str = "bfloat16"
    attention: str = "xla"
    block_attention: str = "plain"


class Said(NamedTuple):
    """Texts of the target as a step takes them, with the weight of each token in the losses."""

    tokens: Int[Array, "n t"]
    penalty: Float[Array, "n t"]  # of the unlikelihood of a repeat
    learnt: Float[Array, "n t"]  # of the likelihood, 0 or 1
    said: Float[Array, "n t"]  # of the unlikelihood of an end, 0 or 1


def say(
    config: KimiConfig, recipe: Recipe, group: sample.Group, weights, streams: Streams, key
) -> sample.Texts:
    """Texts of the current weights: three in four greedy, the others at WARM."""
    given, prompt, _, rest = sample.prompts(key, group, streams, recipe.code_share)
    temperature = jnp.resize(jnp.array(TEMPERATURES, jnp.float32), (group.batch,))
    tokens = sample.generate(
        config, weights, group, given, prompt, temperature, rest, recipe.attention,
        barred=config.eos_token_ids[0],
    )  # fmt: skip
    tokens, prompt, temperature = (np.asarray(a) for a in (tokens, prompt, temperature))
    end = np.full(group.batch, group.length)
    return sample.Texts(tokens.astype(np.uint16), prompt, end, temperature)


def weigh(texts: sample.Texts, again: float) -> Said:
    """Only said tokens count: by how often they repeat what was said; in warm texts without loops,
    as text. Prompts may repeat themselves, and be repeated."""
    places = np.arange(texts.tokens.shape[1])[None]
    prompt = places < texts.prompt[:, None]
    said = ~prompt & (places < texts.end[:, None])
    apart = np.where(prompt, 2**16 + places, texts.tokens)  # in a prompt, no two n-grams are equal
    count = np.where(said, sample.occurrences(apart), 0)
    penalty = np.where(count >= 2, 1.0, np.where(count == 1, again, 0.0))
    sound = ~texts.greedy & (count < sample.TIMES - 1).all(axis=1)
    weights = penalty, said & sound[:, None], said
    return Said(texts.tokens, *(w.astype(np.float32) for w in weights))


def renew(pool: Said | None, new: Said, kept: int) -> Said:
    """The pool without its oldest round; its shape is that of `kept` rounds from the first on."""
    if pool is None:
        return Said(*(jnp.concatenate([jnp.asarray(a)] * kept) for a in new))
    size = new.tokens.shape[0]
    return Said(*(jnp.concatenate([old[size:], a]) for old, a in zip(pool, new, strict=True)))


def loss(scale: Scale, recipe: Recipe, params, real, said: tuple[Said, ...], key):
    """`params`: masters of the target and of the drafter, the latter None without joint loss."""
    masters, drafter = params
    config, attention = scale.trained, recipe.attention
    weights = forward.working(masters, jnp.dtype(recipe.dtype), True)
    counts: list[jax.Array] = []
    taps = () if drafter is None else scale.drafter.target_layer_ids
    nats, _, taps = token_losses(config, weights, real.tokens, attention, counts, taps)
    likely = jnp.where(real.kept, nats, 0).sum() / real.kept.sum()
    metrics = {"likely": likely, "unlikely": 0.0, "ends": 0.0, "own": 0.0}
    for group, texts in zip(recipe.groups, said, strict=True):
        nats, ends = said_losses(config, weights, texts.tokens, attention)
        _, penalty, learnt, here = (field[:, 1:] for field in texts)
        size = len(penalty) * (group.length - group.low)
        metrics["unlikely"] += (unlikelihood(nats) * penalty).sum() / size
        metrics["ends"] += (unlikelihood(ends) * here).sum() / size
        metrics["own"] += (nats * learnt).sum() / jnp.maximum(learnt.sum(), 1) / len(said)
    total = likely + recipe.strength * (metrics["unlikely"] + metrics["ends"])
    total += recipe.distil * metrics["own"]
    if drafter is not None:
        metrics["block"], metrics["accept"] = joint.loss(
            scale.drafter, drafter, weights, taps, real, key, recipe.joint_anchors,
            recipe.block_attention,
        )  # fmt: skip
        total += recipe.joint_weight * metrics["block"]
    return total, (metrics, jnp.stack(counts))


def said_losses(config: KimiConfig, weights, tokens, attention: str):
    """Cross entropy of every label of `tokens` [b, t+1], and of [EOS] in its place, both [b, t]."""
    rows = forward.run(config, weights, tokens[:, :-1], attention)
    scores = forward.logits(weights, rows.hidden)
    shape, partition = (tokens.shape[0], -1), jax.nn.logsumexp(scores, axis=-1)
    label = pick(scores, tokens[:, 1:].reshape(-1))
    return tuple(
        (partition - score).reshape(shape) for score in (label, scores[:, config.eos_token_ids[0]])
    )


def unlikelihood(nats):
    """-log(1 - p) of -log p, finite."""
    return -jnp.log1p(-jnp.minimum(jnp.exp(-nats), 0.9999))


def train_step(scale: Scale, recipe: Recipe, streams: Streams, pools: tuple[Said, ...], state):
    step, total, optimizer = state["step"], recipe.rounds * recipe.steps, recipe.optimizer
    where, which, blocks = jax.random.split(
        jax.random.fold_in(jax.random.key(recipe.seed), step), 3
    )
    real = windows(where, streams, *recipe.real, recipe.code_share, recipe.loop_share)
    said = []
    for index, (count, pool) in enumerate(zip(recipe.said, pools, strict=True)):
        draw = jax.random.fold_in(which, index)
        rows = jax.random.randint(draw, (count,), 0, pool.tokens.shape[0])
        tokens, *weights = (field[rows] for field in pool)
        said.append(Said(tokens.astype(jnp.int32), *weights))
    grad = jax.value_and_grad(partial(loss, scale, recipe), has_aux=True)
    both = state["params"], state.get("drafter")
    (_, (metrics, load)), (grads, drafter_grads) = grad(both, real, tuple(said), blocks)
    params, moments, norm = optimizer.update(state["params"], grads, state["moments"], step, total)
    params = balance(scale.trained, params, load, 1e-4)
    out = {"params": params, "moments": moments, "step": step + 1}
    if drafter_grads is not None:
        out |= joint.update(optimizer, state, drafter_grads, step, total)
    return out, metrics | {"norm": norm}


@lru_cache
def chunk_step(scale: Scale, recipe: Recipe):
    def steps(state, streams, pools: tuple[Said, ...]):
        body = partial(train_step, scale, recipe, streams, pools)
        return lax.scan(lambda s, _: body(s), state, None, length=recipe.chunk)

    return jax.jit(steps, donate_argnums=0)


@lru_cache
def working(recipe: Recipe):
    return jax.jit(lambda masters: forward.working(masters, jnp.dtype(recipe.dtype), True))


def initial(scale: Scale, recipe: Recipe, params: Flat, drafter: Flat | None):
    moments = recipe.optimizer.init(params)
    state = {"params": params, "moments": moments, "step": jnp.int32(0)}
    if recipe.joint_weight:
        state |= joint.initial(recipe.optimizer, scale.drafter, recipe.seed, drafter)
    return state


def empty(recipe: Recipe) -> tuple[Said, ...]:
    types = (jnp.uint16, jnp.float32, jnp.float32, jnp.float32)
    shapes = ((recipe.kept * group.batch, group.length) for group in recipe.groups)
    return tuple(Said(*(jnp.zeros(shape, t) for t in types)) for shape in shapes)


def polish(
    scale: Scale, recipe: Recipe, streams: Streams, workdir: Path, pace: Pace,
    params: Flat, drafter: Flat | None = None,
) -> bool:  # fmt: skip
    """Go on from masters `params`; False if the deadline came first.

    Exports and checkpoints every few rounds. The drafter goes along, a fresh one without `drafter`.
    """
    config, log = scale.trained, store.Log(workdir / "polish_log.jsonl")
    checkpoints = store.Checkpoints(workdir / "polish")
    state, pools = initial(scale, recipe, params, drafter), None
    found = checkpoints.restore({"state": state, "pools": empty(recipe)})
    if found is not None:
        state, pools = found["state"], found["pools"]
        log.write(resumed=int(state["step"]))

    def save():
        checkpoints.save(int(state["step"]), {"state": state, "pools": pools})
        store.export(workdir, store.TARGET, store.published(state["params"]))
        if "drafter" in state:
            joint.export(workdir, state["drafter"])

    done = False
    while not done:
        begun = pace.now()
        index = int(state["step"]) // recipe.steps
        done = index == recipe.rounds
        key = jax.random.fold_in(jax.random.key(recipe.seed + 1), index)
        weights, texts = working(recipe)(state["params"]), []
        for number, group in enumerate(recipe.groups):
            own = jax.random.fold_in(key, number)
            texts.append(say(config, recipe, group, weights, streams, own))
        del weights
        log.write(round=index, seconds=pace.now(), looping={
            f"{group.name} {t}, {new}": sample.looping(part, t, new)
            for group, part in zip(recipe.groups, texts, strict=True)
            for t in (0.0, WARM) for new in (64, 128)
        })  # fmt: skip
        if not done:
            fresh = [weigh(part, recipe.again) for part in texts]
            old = pools or (None,) * len(fresh)
            pools = tuple(
                renew(pool, new, recipe.kept) for pool, new in zip(old, fresh, strict=True)
            )
            for _ in range(recipe.steps // recipe.chunk):
                state, metrics = chunk_step(scale, recipe)(state, streams, pools)
                means = {name: np.asarray(value).mean() for name, value in metrics.items()}
                log.write(repeated=True, step=int(state["step"]), **means)
        stopped = not done and pace.must_stop(pace.now() - begun + 15)
        if done or stopped or index % SAVE_EVERY == SAVE_EVERY - 1:
            save()
        if stopped:
            break
    checkpoints.close()
    log.write(finished=done, step=int(state["step"]))
    return done
