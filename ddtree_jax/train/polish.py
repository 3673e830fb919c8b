"""Less repetition: after training, the target learns from its own greedy texts where they loop.

Small models said greedily fall into loops. Sequence-level unlikelihood (Welleck et al. 2019,
arXiv 1908.04319), in rounds: the current, quantised weights say texts; where a token completes an
n-gram that its text has had before, the loss is -log(1 - p(token)); real windows go on with their
cross entropy beside it, which keeps the repetition that real text has.
"""

from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ddtree_jax.config import KimiConfig
from ddtree_jax.train import forward, sample, store
from ddtree_jax.train.drafter import load_target
from ddtree_jax.train.nano import Scale
from ddtree_jax.train.optimizer import Optimizer
from ddtree_jax.train.target import STEM, balance, token_losses
from ddtree_jax.train.windows import Streams
from ddtree_jax.train.windows import sample as windows

# One more than an even length: cuDNN wants inputs of an even length.
GROUP = sample.Group("polish", batch=2048, low=32, high=160, length=513, segment=513)


@dataclass(frozen=True)
class Recipe:
    optimizer: Optimizer = field(
        default_factory=lambda: Optimizer(peak=1e-3, warmup=20, decay_share=0.8)
    )
    group: sample.Group = GROUP
    rounds: int = 5
    steps: int = 140  # of a round
    chunk: int = 20
    real: tuple[int, int] = (16, 2048)  # windows of training text in a step
    said: int = 64  # texts of the target in a step
    strength: float = 1.0  # of the unlikelihood against the cross entropy
    again: float = 0.25  # weight of an n-gram's second occurrence; from the third on it is 1
    code_share: float = 0.62
    loop_share: float = 0.2
    seed: int = 2
    dtype: str = "bfloat16"
    attention: str = "xla"


def occurrences(tokens: Int[np.ndarray, "n t"], ngram: int = sample.NGRAM):
    """How often the n-gram that ends at each place came before in its row, [n, t]."""
    n, length = tokens.shape
    grams = sample.hashes(tokens, ngram)
    order = np.argsort(grams, axis=1, kind="stable")
    ranked = np.take_along_axis(grams, order, axis=1)
    place = np.broadcast_to(np.arange(ranked.shape[1]), ranked.shape)
    fresh = np.ones_like(ranked, bool)
    fresh[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    first = np.maximum.accumulate(np.where(fresh, place, 0), axis=1)
    out = np.zeros((n, length), np.int32)
    np.put_along_axis(out[:, ngram - 1 :], order, (place - first).astype(np.int32), axis=1)
    return out


def looping(texts: sample.Texts, new: int = 128) -> float:
    """Share of greedy texts whose first `new` said tokens hold an 8-gram three times."""
    rows = np.flatnonzero(texts.greedy & (texts.prompt + new <= texts.tokens.shape[1]))
    places = texts.prompt[rows, None] + np.arange(new)[None]
    said = np.take_along_axis(texts.tokens[rows], places, axis=1)
    return float((occurrences(said) >= 2).any(axis=1).mean())


def say(config: KimiConfig, recipe: Recipe, weights, streams: Streams, key) -> sample.Texts:
    """Texts of the current weights: three in four greedy, the others at temperature 0.5."""
    group = recipe.group
    given, prompt, _, rest = sample.prompts(key, group, streams, recipe.code_share)
    greedy = jnp.arange(group.batch, dtype=jnp.int32) % 4 > 0
    temperature = jnp.where(greedy, 0.0, 0.5)
    tokens = sample.generate(
        config, weights, group, given, prompt, temperature, rest, recipe.attention
    )
    tokens, prompt, greedy = (np.asarray(a) for a in (tokens, prompt, greedy))
    stops = (tokens == config.eos_token_ids[0]) & (np.arange(group.length) >= prompt[:, None])
    end = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, group.length)
    return sample.Texts(tokens.astype(np.uint16), prompt, end, greedy)


def penalties(texts: sample.Texts, again: float) -> Float[np.ndarray, "n t"]:
    """Weight of the unlikelihood at each place: only said tokens, by how often they repeat."""
    count = occurrences(texts.tokens)
    places = np.arange(texts.tokens.shape[1])[None]
    said = (places >= texts.prompt[:, None]) & (places < texts.end[:, None])
    return np.where(said, np.where(count >= 2, 1.0, np.where(count == 1, again, 0.0)), 0.0)


def loss(config: KimiConfig, recipe: Recipe, masters, real, tokens, penalty):
    weights = forward.working(masters, jnp.dtype(recipe.dtype), True)
    counts: list[jax.Array] = []
    nats, _ = token_losses(config, weights, real.tokens, recipe.attention, counts)
    likely = jnp.where(real.kept, nats, 0).sum() / real.kept.sum()
    nats, _ = token_losses(config, weights, tokens, recipe.attention)
    unlikely = -jnp.log1p(-jnp.minimum(jnp.exp(-nats), 0.9999)) * penalty[:, 1:]
    unlikely = unlikely.sum() / penalty[:, 1:].size
    return likely + recipe.strength * unlikely, (likely, unlikely, jnp.stack(counts))


def train_step(config: KimiConfig, recipe: Recipe, total: int, streams, texts, state):
    tokens, penalty = texts
    key = jax.random.fold_in(jax.random.key(recipe.seed), state["step"])
    where, which = jax.random.split(key)
    real = windows(where, streams, *recipe.real, recipe.code_share, recipe.loop_share)
    rows = jax.random.randint(which, (recipe.said,), 0, tokens.shape[0])
    grad = jax.value_and_grad(partial(loss, config, recipe), has_aux=True)
    (_, (likely, unlikely, load)), grads = grad(
        state["params"], real, tokens[rows].astype(jnp.int32), penalty[rows]
    )
    params, moments, norm = recipe.optimizer.update(
        state["params"], grads, state["moments"], state["step"], total
    )
    params = balance(config, params, load, 1e-4)
    state = {"params": params, "moments": moments, "step": state["step"] + 1}
    return state, {"likely": likely, "unlikely": unlikely, "norm": norm}


@lru_cache
def chunk_step(config: KimiConfig, recipe: Recipe):
    total = recipe.rounds * recipe.steps

    def steps(state, streams, texts: tuple[Array, Array]):
        body = partial(train_step, config, recipe, total, streams, texts)
        return lax.scan(lambda s, _: body(s), state, None, length=recipe.chunk)

    return jax.jit(steps, donate_argnums=0)


@lru_cache
def working(recipe: Recipe):
    return jax.jit(lambda masters: forward.working(masters, jnp.dtype(recipe.dtype), True))


def polish(scale: Scale, recipe: Recipe, streams: Streams, workdir: Path, source: Path) -> bool:
    """Go on from the exported target in `source`; exports to `workdir` after every round."""
    config, log = scale.trained, store.Log(workdir / "polish_log.jsonl")
    params = load_target(source, jnp.float32)
    state = {
        "params": params,
        "moments": recipe.optimizer.init(params),
        "step": jnp.int32(0),
    }
    for index in range(recipe.rounds + 1):
        key = jax.random.fold_in(jax.random.key(recipe.seed + 1), index)
        texts = say(config, recipe, working(recipe)(state["params"]), streams, key)
        log.write(round=index, looping=looping(texts), penalised=float(
            (penalties(texts, recipe.again) > 0).mean()))  # fmt: skip
        if index == recipe.rounds:
            return True
        data = jnp.asarray(texts.tokens), jnp.asarray(penalties(texts, recipe.again), jnp.float32)
        for _ in range(recipe.steps // recipe.chunk):
            state, metrics = chunk_step(config, recipe)(state, streams, data)
            means = {name: np.asarray(value).mean() for name, value in metrics.items()}
            log.write(repeated=True, step=int(state["step"]), **means)
        store.export(workdir, STEM, store.published(state["params"]))
    return True
