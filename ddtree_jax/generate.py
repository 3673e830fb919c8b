"""Loading, prefill, and the two ways to decode: to the end on the device, or piece by piece."""

import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax import state as st
from ddtree_jax.cache import empty_cache, identity_tables, scatter_tokens
from ddtree_jax.checkpoint import load_drafter, load_target
from ddtree_jax.config import (
    PAGE_SIZE,
    DFlashConfig,
    KimiConfig,
    Sampling,
    Speculation,
    is_int,
)
from ddtree_jax.model.attention import causal_attention
from ddtree_jax.sampling import choose, keyed_noise, perturb
from ddtree_jax.state import DecodeState, Weights, emit
from ddtree_jax.step import autoregressive_step, ddtree_step, dflash_step, served_block_size
from ddtree_jax.tokenizer import RANKS, StreamDecoder, Tokenizer

METHODS = ("ddtree", "dflash", "autoregressive")
BUNDLED = Path(__file__).parent / "models"
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Model:
    """Weights, tokenizer and configs of a target and (perhaps) its drafter."""

    weights: Weights
    tokenizer: Tokenizer | None
    name: str

    @property
    def config(self) -> KimiConfig:
        return self.weights.config

    @property
    def drafter_config(self) -> DFlashConfig | None:
        return self.weights.drafter_config


@dataclass(frozen=True)
class Completion:
    """What one prompt became. Counts leave out the token that prefill sampled.

    `accept_length` is tokens committed per verify pass, the bonus counted; `accept_by_depth[d]` the
    share of passes that committed a drafted token at depth d+1. `tokens` holds a final stop id,
    `text` does not. `seconds` is the decode time of the whole batch, prefill and compilation left
    out.
    """

    text: str | None
    tokens: list[int]
    prompt_tokens: int
    finish_reason: str
    verify_passes: int
    accept_length: float
    accept_by_depth: list[float]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """This prompt's tokens from verify passes, per second of the whole batch's decoding."""
        return max(len(self.tokens) - 1, 0) / self.seconds if self.seconds > 0 else 0.0


def load(
    path: str | Path = "kimi-nano",
    drafter: str | Path | None = None,
    mesh=None,
    plan: str = "expert",
    dtype: str | None = None,
) -> Model:
    """Load a target and its drafter from published folders.

    `path` is a bundled name or a folder with `config.json`, safetensors and `tiktoken.model`; the
    drafter is looked for in `path/dflash` unless `drafter` names its folder. `dtype` is float32 or
    bfloat16 (default: float32 on CPU, bfloat16 elsewhere).

    Raises FileNotFoundError or ValueError naming the file or field that is wrong.
    """
    if mesh is not None:
        raise ValueError(f"mesh={mesh!r}: only one device is supported so far")
    if plan != "expert":
        raise ValueError(f"plan={plan!r}: without a mesh only the default 'expert' is accepted")
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: must be float32 or bfloat16")
    folder = BUNDLED / str(path) if (BUNDLED / str(path)).is_dir() else Path(path)
    if not folder.is_dir():
        names = ", ".join(sorted(p.name for p in BUNDLED.iterdir() if p.is_dir()))
        raise FileNotFoundError(f"no model {str(path)!r}: neither a folder nor bundled ({names})")
    config, target = load_target(folder, dtype)
    drafter_config, leaves = None, None
    if drafter is not None or (folder / "dflash").is_dir():
        where = folder / "dflash" if drafter is None else Path(drafter)
        drafter_config, leaves = load_drafter(where, dtype, config)
    tokenizer = Tokenizer(folder)
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(
            f"{folder / RANKS}: ranks and special tokens are {tokenizer.vocab_size}, must be "
            f"vocab_size={config.vocab_size}"
        )
    weights = Weights(target, leaves, config, drafter_config, str(jnp.dtype(dtype)))
    return Model(weights, tokenizer, folder.resolve().name)


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    method: str = "ddtree",
    speculation: Speculation = Speculation(),
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    max_new_tokens: int = 128,
) -> list[Completion]:
    """Complete prompts (texts or token id lists) as one batch, decoding on the device to the end.

    Every method gives the tokens plain decoding gives, with the same sampling. Returns one
    Completion a prompt, in order. Raises ValueError for input that cannot be honoured.
    """
    prompts = _as_list(prompts)
    step = Method(method, speculation, model.weights)
    state = prefill(model, prompts, sampling, max_new_tokens)
    state, _ = decode(model.weights, state, step, 0)  # compiles, runs no pass
    jax.block_until_ready(state)
    start = time.perf_counter()
    state, _ = jax.block_until_ready(decode(model.weights, state, step, _FOREVER))
    seconds = time.perf_counter() - start
    lengths = [len(_tokens(model, p)) for p in prompts]
    return [completion(model, state, r, lengths[r], seconds, step) for r in range(len(prompts))]


def stream(
    model: Model,
    prompt: Prompt,
    method: str = "ddtree",
    speculation: Speculation = Speculation(),
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 128,
    done: list | None = None,
) -> Iterator[str]:
    """Complete one prompt, yielding text after every verify pass, never half a character.

    The finished Completion is appended to `done`, if a list is given. Input that cannot be honoured
    raises ValueError here, not at the first piece.
    """
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: use generate with token ids")
    step = Method(method, speculation, model.weights)
    check_request(model, [prompt], sampling, max_new_tokens)
    return _stream(model, prompt, step, sampling, max_new_tokens, done)


def _stream(model, prompt, step, sampling, max_new_tokens, done) -> Iterator[str]:
    state = prefill(model, [prompt], sampling, max_new_tokens)
    state, running = decode(model.weights, state, step, 0)
    decoder, shown, seconds = StreamDecoder(model.tokenizer), 0, 0.0
    while True:
        count = int(state.count[0])
        fresh = np.asarray(state.tokens)[0, shown:count].tolist()  # sliced here: compiles nothing
        shown = count
        if text := decoder.push(t for t in fresh if t not in _stop_ids(model)):
            yield text
        if not bool(running):
            break
        start = time.perf_counter()
        state, running = jax.block_until_ready(decode(model.weights, state, step, 1))
        seconds += time.perf_counter() - start
    if text := decoder.finish():
        yield text
    if done is not None:
        done.append(completion(model, state, 0, len(_tokens(model, prompt)), seconds, step))


def prefill(
    model: Model,
    prompts: Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    max_new_tokens: int = 128,
) -> DecodeState:
    """Run the prompts through the target, fill both caches, and sample each first token.

    Each prompt runs alone, padded to a power of two, so that a batch changes nothing for it.
    """
    weights, config = model.weights, model.config
    ids, samplings = check_request(model, prompts, sampling, max_new_tokens)
    longest = max(len(i) for i in ids) + max_new_tokens
    pages = _power_of_two(-(-longest // PAGE_SIZE))
    requests = len(ids)
    stops = _stop_ids(model) or (-1,)
    horizon = 1 if weights.drafter_config is None else weights.drafter_config.horizon
    state = DecodeState(
        cache=empty_cache(config, weights.drafter_config, requests * pages, weights.dtype),
        block_tables=identity_tables(requests, pages),
        lengths=jnp.zeros(requests, jnp.int32),
        root=jnp.zeros(requests, jnp.int32),
        tokens=jnp.zeros((requests, _power_of_two(max_new_tokens)), jnp.int32),
        count=jnp.zeros(requests, jnp.int32),
        limit=jnp.full(requests, max_new_tokens, jnp.int32),
        stop_ids=jnp.tile(jnp.asarray(stops, jnp.int32)[None], (requests, 1)),
        seeds=jnp.asarray(np.array([s.seed for s in samplings], np.uint32)),
        temperature=jnp.asarray([s.temperature for s in samplings], jnp.float32),
        reason=jnp.zeros(requests, jnp.int32),
        passes=jnp.zeros(requests, jnp.int32),
        hits=jnp.zeros((requests, horizon), jnp.int32),
    )
    for request, tokens in enumerate(ids):
        padded = np.zeros(max(64, _power_of_two(len(tokens))), np.int32)
        padded[: len(tokens)] = tokens
        state = prefill_request(
            weights, state, jnp.int32(request), jnp.asarray(padded), jnp.int32(len(tokens))
        )
    return state


@partial(jax.jit, donate_argnames="state")
def prefill_request(weights: Weights, state: DecodeState, request, tokens, length) -> DecodeState:
    """Prefill one request of the batch: tokens [t], of which the first `length` are its prompt.

    Attention is expanded (keys and values per head): cheaper than absorbed for so many rows.
    """
    target, config = weights.target_module(), weights.config
    t = tokens.shape[0]
    positions = jnp.arange(t, dtype=jnp.int32)

    def attention(mla, x, positions, layer):
        nope, rope, latents = mla.project(x, positions)
        keys, values = mla.expand(latents)
        queries = jnp.concatenate([nope, rope], axis=-1)
        out = causal_attention(queries, keys, values, config.softmax_scale)
        return mla.o_proj(out.reshape(t, -1)), latents

    taps = () if weights.drafter_config is None else weights.drafter_config.target_layer_ids
    rows = target(tokens, positions, positions < length, attention, taps)
    place = (state.block_tables[request][None], jnp.zeros(1, jnp.int32), length[None])
    cache = state.cache
    cache = replace(cache, latents=scatter_tokens(cache.latents, rows.latents[:, None], *place))
    if weights.drafter is not None:
        keys, values = weights.drafter_module().context(rows.taps, positions)
        cache = replace(
            cache,
            keys=scatter_tokens(cache.keys, keys[:, None], *place),
            values=scatter_tokens(cache.values, values[:, None], *place),
        )
    logits = target.lm_head(rows.hidden[length - 1])[None]
    temperature = state.temperature[request][None]
    noise = keyed_noise(
        state.seeds[request][None], length[None, None], config.vocab_size, temperature
    )
    first = choose(perturb(logits, noise[:, 0], temperature))[0]
    # Emit for this request alone: every other one is given no token and no failure.
    own = jnp.arange(state.root.shape[0], dtype=jnp.int32) == request
    failed = own & (first < 0)
    state = replace(
        state,
        cache=cache,
        lengths=jnp.where(own, length, state.lengths),
        root=jnp.where(own & ~failed, first, state.root),
    )
    return emit(state, state.root[:, None], (own & ~failed).astype(jnp.int32), failed)[0]


class Method:
    """A method with its settings: hashable, so that it is a static argument of `decode`."""

    def __init__(self, method: str, speculation: Speculation, weights: Weights):
        if method not in METHODS:
            raise ValueError(f"method={method!r}: must be one of {', '.join(METHODS)}")
        vocab = weights.config.vocab_size
        if speculation.top_k > vocab:
            raise ValueError(
                f"top_k={speculation.top_k}: must be at most the vocabulary's {vocab} tokens"
            )
        self.method, self.budget, self.horizon = method, 0, 0
        self.speculation = None
        if method != "autoregressive":
            block = served_block_size(weights, speculation.block_size)
            self.horizon = block - 1
            self.budget = self.horizon if method == "dflash" else speculation.budget
            self.speculation = replace(speculation, block_size=block)
        self.key = (method, self.speculation)

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return isinstance(other, Method) and self.key == other.key

    def __call__(self, weights: Weights, state: DecodeState) -> DecodeState:
        if self.method == "autoregressive":
            return autoregressive_step(weights, state)
        if self.method == "dflash":
            return dflash_step(weights, state, block_size=self.speculation.block_size)
        return ddtree_step(weights, state, speculation=self.speculation)


@partial(jax.jit, static_argnames="step", donate_argnames="state")
def decode(weights: Weights, state: DecodeState, step: Method, passes):
    """Run `step` on the device until every request has ended, or for `passes` verify passes.

    Returns the state and whether any request still runs. One program serves whole generations and
    streaming.
    """

    def more(carry):
        state, done = carry
        return state.active.any() & (done < passes)

    def body(carry):
        state, done = carry
        return step(weights, state), done + 1

    state, _ = lax.while_loop(more, body, (state, jnp.int32(0)))
    return state, state.active.any()


def completion(
    model: Model, state: DecodeState, request: int, prompt_tokens: int, seconds: float, step: Method
) -> Completion:
    """Read one request's result off the state."""
    # Sliced as NumPy arrays: a slice on the device would be a program of its own for each count.
    count, passes, reason = (
        int(np.asarray(field)[request]) for field in (state.count, state.passes, state.reason)
    )
    tokens = np.asarray(state.tokens)[request, :count].tolist()
    hits = np.asarray(state.hits)[request, : step.horizon] if step.budget else []
    shown = [t for t in tokens if t not in _stop_ids(model)]
    return Completion(
        text=None if model.tokenizer is None else model.tokenizer.decode(shown),
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        finish_reason=st.REASONS[reason] or "running",
        verify_passes=passes,
        accept_length=(count - 1) / passes if passes else 1.0,
        accept_by_depth=[int(h) / passes if passes else 0.0 for h in hits],
        seconds=seconds,
    )


_FOREVER = 2**31 - 1


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _stop_ids(model: Model) -> tuple[int, ...]:
    """The config's, and the tokenizer's own: published configs name only one of Kimi's two."""
    own = () if model.tokenizer is None else model.tokenizer.eos_ids
    return tuple(dict.fromkeys((*model.config.eos_token_ids, *own)))


def _as_list(prompts) -> list:
    """One text, or one list of ids, is one prompt."""
    first = prompts[0] if len(prompts) else []
    single = isinstance(prompts, str) or (not isinstance(first, str) and np.ndim(first) == 0)
    return [prompts] if single else list(prompts)


def _tokens(model: Model, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        try:
            return [operator.index(t) for t in prompt]
        except TypeError as error:
            raise ValueError(f"{prompt!r}: a prompt is a text or a list of token ids") from error
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: give token ids instead of text")
    return model.tokenizer.encode(prompt)


def check_request(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling],
    max_new_tokens: int,
) -> tuple[list[list[int]], list[Sampling]]:
    """Token ids and sampling of every prompt; ValueError for what cannot be honoured."""
    config, prompts = model.config, _as_list(prompts)
    if not prompts:
        raise ValueError("prompts=[]: must hold at least one prompt")
    samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(samplings) != len(prompts):
        raise ValueError(f"sampling has {len(samplings)} entries: must be one, or {len(prompts)}")
    if not is_int(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: must be an integer, 1 or greater")
    ids = []
    for index, prompt in enumerate(prompts):
        tokens = _tokens(model, prompt)
        if not tokens:
            raise ValueError(f"prompts[{index}]={prompt!r}: must hold at least one token")
        for bad in (t for t in tokens if not 0 <= t < config.vocab_size):
            raise ValueError(
                f"prompts[{index}] holds token id {bad}: must be from 0 to {config.vocab_size - 1}"
            )
        if len(tokens) + max_new_tokens > config.max_position_embeddings:
            raise ValueError(
                f"prompts[{index}] of {len(tokens)} tokens with max_new_tokens={max_new_tokens}: "
                f"together at most max_position_embeddings={config.max_position_embeddings}"
            )
        ids.append(tokens)
    return ids, samplings
