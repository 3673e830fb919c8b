"""Text said by the quantised target, for its drafter to learn from.

A plain batched decoder of its own: one contiguous latent cache a layer, absorbed attention by
einsum, every expert on every row, in `fori_loop`s of a few hundred tokens. All sequences stand at
one position, so that a step writes one slice of the cache; prompts of different lengths are fed
token by token to their ends. Between loops the caches grow, so that early tokens read little.
"""

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax.config import KimiConfig
from ddtree_jax.model.layers import precision
from ddtree_jax.train import forward
from ddtree_jax.train.store import Log
from ddtree_jax.train.windows import Streams, sample

# A greedy text loops where a run of NGRAM tokens comes for the third time within SPAN.
NGRAM, TIMES, SPAN = 8, 3, 256
TEMPERATURES = (0.0, 0.6, 0.0, 1.0)  # of the texts, in turn


@dataclass(frozen=True)
class Group:
    """Sequences of one kind: `batch` at a time, prompts of low..high tokens, `length` in all."""

    name: str
    batch: int
    low: int
    high: int
    length: int
    segment: int = 512  # tokens between two growths of the cache
    share: float = 0.5  # of the seconds


@dataclass(frozen=True)
class Texts:
    """Sampled sequences; ids from `prompt` to before `end` were said by the target and count."""

    tokens: np.ndarray  # [n, t] uint16
    prompt: np.ndarray  # [n]
    end: np.ndarray  # [n]
    temperature: np.ndarray  # [n] float32, 0: greedy

    @property
    def greedy(self) -> np.ndarray:
        return self.temperature == 0

    def save(self, path: Path) -> None:
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> "Texts":
        with np.load(path) as arrays:
            return cls(**{name: arrays[name] for name in cls.__dataclass_fields__})

    @classmethod
    def join(cls, parts: list["Texts"]) -> "Texts":
        return cls(*(np.concatenate([getattr(p, n) for p in parts]) for n in vars(parts[0])))

    @property
    def said(self) -> int:
        return int(np.maximum(self.end - self.prompt, 0).sum())


def cached_attention(caches: list, position):
    """Attention of one row a sequence over contiguous caches [b, s, latent]; updates the list."""

    def attend(mla, x, positions, layer):
        c, high = mla.config, precision(x.dtype)
        nope, rope, latents = mla.project(x, positions)
        cache = lax.dynamic_update_slice(caches[layer], latents[:, None], (0, position, 0))
        caches[layer] = cache
        queries = mla.absorb(nope, rope)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scores = jnp.einsum(
            "bhc,bsc->bhs", queries, cache, precision=high, preferred_element_type=wide
        )
        seen = jnp.arange(cache.shape[1], dtype=jnp.int32)[None, None] <= position
        weights = jax.nn.softmax(jnp.where(seen, scores * c.softmax_scale, -jnp.inf), axis=-1)
        # Over whole rows: a slice of the cache would be a copy of it.
        out = jnp.einsum("bhs,bsc->bhc", weights.astype(x.dtype), cache, precision=high)
        return mla.output(out[..., : c.kv_lora_rank]), latents

    return attend


@lru_cache
def decoder(config: KimiConfig, group: Group, size: int, barred: int | None):
    """(weights, caches of `size`, tokens, prompt, temperature, key, start, stop) -> (.., tokens).

    Reads token[p], writes its latent, and writes token[p + 1] unless the prompt has it.
    """

    def segment(weights, caches, tokens, prompt, temperature, key, start, stop):
        def step(position, carry):
            caches, tokens = carry
            caches = list(caches)
            rows = lax.dynamic_slice_in_dim(tokens, position, 1, axis=1)[:, 0]
            positions = jnp.full(rows.shape, position, jnp.int32)
            out = forward.build(config, weights)(
                rows, positions, jnp.ones(rows.shape, bool),
                cached_attention(caches, position), (), forward.dense_experts(),
            )  # fmt: skip
            scores = forward.logits(weights, out.hidden)
            if barred is not None:
                scores = scores.at[:, barred].set(-jnp.inf)
            noise = jax.random.gumbel(jax.random.fold_in(key, position), scores.shape, jnp.float32)
            said = jnp.argmax(scores + noise * temperature[:, None], axis=-1).astype(tokens.dtype)
            given = lax.dynamic_slice_in_dim(tokens, position + 1, 1, axis=1)[:, 0]
            said = jnp.where(position + 1 < prompt, given, said)
            tokens = lax.dynamic_update_slice(tokens, said[:, None], (0, position + 1))
            return tuple(caches), tokens

        return lax.fori_loop(start, stop, step, (caches, tokens))

    return jax.jit(segment, donate_argnums=(1, 2))


@lru_cache
def prefiller(config: KimiConfig, rows: int, prefix: int, attention: str):
    """Latents [layers][b, prefix, latent] of the prompts' first tokens, `rows` sequences a time."""

    def latents(weights, tokens):
        def part(tokens):
            out = forward.run(config, weights, tokens, attention).latents
            return out.reshape(out.shape[0], *tokens.shape, -1)

        parts = lax.map(part, tokens[:, :prefix].reshape(-1, rows, prefix))
        stacked = jnp.moveaxis(parts, 1, 0)  # [layers, parts, rows, prefix, latent]
        return tuple(layer.reshape(-1, prefix, layer.shape[-1]) for layer in stacked)

    return jax.jit(latents)


@lru_cache
def grower(size: int):
    return jax.jit(
        lambda caches: tuple(jnp.pad(c, ((0, 0), (0, size - c.shape[1]), (0, 0))) for c in caches)
    )


def generate(
    config: KimiConfig, weights, group: Group, tokens, prompt, temperature, key, attention,
    barred: int | None = None,
):  # fmt: skip
    """Go on from prompts: tokens [b, length] int32 whose first prompt[i] ids are given.

    Token `barred` is never said.
    """
    rows = min(group.batch, max(1, 65536 // group.low))
    rows = next(r for r in range(rows, 0, -1) if group.batch % r == 0)
    caches = prefiller(config, rows, group.low, attention)(weights, tokens)
    position = group.low - 1
    while position < group.length - 1:
        size = min(((position + 1) // group.segment + 1) * group.segment, group.length)
        stop = min(size, group.length - 1)
        caches = grower(size)(caches)
        caches, tokens = decoder(config, group, size, barred)(
            weights, caches, tokens, prompt, temperature, key, position, stop
        )
        position = stop
    return tokens


def prompts(key, group: Group, streams: Streams, code_share: float):
    """Random training text as prompts: tokens [b, length], prompt lengths, temperatures."""
    windows, lengths, rest = jax.random.split(key, 3)
    given = sample(windows, streams, group.batch, group.length - 1, code_share, 0.0, 4).tokens
    prompt = jax.random.randint(lengths, (group.batch,), group.low, group.high + 1)
    temperature = jnp.resize(jnp.array(TEMPERATURES, jnp.float32), (group.batch,))
    return given, prompt, temperature, rest


def finish(tokens, prompt, temperature, eos: int) -> Texts:
    """Ends: past the first [EOS] said; below temperature 1, before the place where they loop."""
    tokens = np.asarray(tokens)
    prompt, temperature = np.asarray(prompt), np.asarray(temperature)
    places = np.arange(tokens.shape[1])[None]
    stops = (tokens == eos) & (places >= prompt[:, None])
    end = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, tokens.shape[1])
    rows = np.flatnonzero(temperature < 1)
    end[rows] = np.minimum(end[rows], loops(tokens[rows], prompt[rows]))
    return Texts(tokens.astype(np.uint16), prompt, np.maximum(end, prompt), temperature)


def hashes(tokens: np.ndarray, ngram: int) -> np.ndarray:
    """A polynomial hash of the n-gram that starts at each place, [n, t - ngram + 1] uint64."""
    n, length = tokens.shape
    grams = np.zeros((n, length - ngram + 1), np.uint64)
    with np.errstate(over="ignore"):
        for i in range(ngram):
            part = tokens[:, i : length - ngram + 1 + i].astype(np.uint64)
            grams = grams * np.uint64(0x9E3779B97F4A7C15) + part + np.uint64(1)
    return grams


def loops(tokens: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Where the first n-gram that comes for the third time starts; else the length.

    All three within SPAN tokens and after the prompt, which may repeat itself as it likes.
    """
    length = tokens.shape[1]
    grams = hashes(tokens, NGRAM)
    order = np.argsort(grams, axis=1, kind="stable")
    ranked = np.take_along_axis(grams, order, axis=1)
    back = TIMES - 1
    first = order[:, :-back]
    third = (ranked[:, back:] == ranked[:, :-back]) & (order[:, back:] - first < SPAN)
    third &= first >= prompt[:, None]
    return np.where(third, order[:, back:], length).min(axis=1, initial=length)


def occurrences(tokens: np.ndarray, ngram: int = NGRAM) -> np.ndarray:
    """How often the n-gram that ends at each place came before in its row, [n, t]."""
    n, length = tokens.shape
    grams = hashes(tokens, ngram)
    order = np.argsort(grams, axis=1, kind="stable")
    ranked = np.take_along_axis(grams, order, axis=1)
    place = np.broadcast_to(np.arange(ranked.shape[1]), ranked.shape)
    fresh = np.ones_like(ranked, bool)
    fresh[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    first = np.maximum.accumulate(np.where(fresh, place, 0), axis=1)
    out = np.zeros((n, length), np.int32)
    np.put_along_axis(out[:, ngram - 1 :], order, (place - first).astype(np.int32), axis=1)
    return out


def looping(texts: Texts, temperature: float, new: int) -> float:
    """Share of a temperature's texts whose first `new` said tokens hold an n-gram TIMES times.

    What comes after an [EOS] counts too."""
    said = texts.prompt + new <= texts.tokens.shape[1]
    rows = np.flatnonzero(said & (texts.temperature == np.float32(temperature)))
    if not len(rows):
        return float("nan")
    places = texts.prompt[rows, None] + np.arange(new)[None]
    said = np.take_along_axis(texts.tokens[rows], places, axis=1)
    return float((occurrences(said) >= TIMES - 1).any(axis=1).mean())


def run(
    config: KimiConfig, weights, groups: list[Group], streams: Streams, workdir: Path,
    seconds: float, attention: str, code_share: float, seed: int, batches: int | None = None,
) -> None:  # fmt: skip
    """Fill `seconds` (or `batches` of each group) with text; one file a group in `workdir`."""
    log = Log(workdir / "sample_log.jsonl")
    for index, group in enumerate(groups):
        parts: list[Texts] = []
        begun = fresh = time.monotonic()
        each = 0.0
        while batches is None or len(parts) < batches:
            # Two batches (the first one compiles); then while one more fits into the share.
            if (
                len(parts) > 1
                and batches is None
                and (time.monotonic() - begun + each > seconds * group.share)
            ):
                break
            fresh = time.monotonic()
            key = jax.random.fold_in(jax.random.key(seed + 1000 * (index + 1)), len(parts))
            given, prompt, temperature, rest = prompts(key, group, streams, code_share)
            tokens = generate(config, weights, group, given, prompt, temperature, rest, attention)
            part = finish(tokens, prompt, temperature, config.eos_token_ids[0])
            parts.append(part)
            each = time.monotonic() - fresh
            said = group.length * group.batch - int(part.prompt.sum())
            ended = part.end < group.length
            log.write(
                group=group.name, batch=len(parts), seconds=each, tok_s=round(said / each),
                usable=part.said,
                ended={t: ended[part.temperature == np.float32(t)].mean() for t in TEMPERATURES},
                looping={t: looping(part, t, 64) for t in TEMPERATURES},
            )  # fmt: skip
            Texts.join(parts).save(workdir / f"sample_{group.name}.npz")
