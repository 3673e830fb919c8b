"""The two ways to decode: to the end on the device, or piece by piece as text."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax.config import Sampling, Speculation
from ddtree_jax.loading import Model
from ddtree_jax.prefill import Prompt, check_request, prefill
from ddtree_jax.state import REASONS, DecodeState, Weights
from ddtree_jax.step import autoregressive_step, ddtree_step, dflash_step, served_block_size
from ddtree_jax.tokenizer import StreamDecoder

METHODS = ("ddtree", "dflash", "autoregressive")


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
    step = Method(method, speculation, model.weights)
    state = prefill(model, prompts, sampling, max_new_tokens)
    given = np.asarray(state.lengths)
    state, _ = decode(model.weights, state, step, 0)  # compiles, runs no pass
    jax.block_until_ready(state)
    start = time.perf_counter()
    state, _ = jax.block_until_ready(decode(model.weights, state, step, _FOREVER))
    seconds = time.perf_counter() - start
    return [completion(model, state, r, int(n), seconds, step) for r, n in enumerate(given)]


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
    given = int(state.lengths[0])
    state, running = decode(model.weights, state, step, 0)
    decoder, shown, seconds = StreamDecoder(model.tokenizer), 0, 0.0
    while True:
        count = int(state.count[0])
        fresh = np.asarray(state.tokens)[0, shown:count].tolist()  # sliced here: compiles nothing
        shown = count
        if text := decoder.push(t for t in fresh if t not in model.stop_ids):
            yield text
        if not bool(running):
            break
        start = time.perf_counter()
        state, running = jax.block_until_ready(decode(model.weights, state, step, 1))
        seconds += time.perf_counter() - start
    if text := decoder.finish():
        yield text
    if done is not None:
        done.append(completion(model, state, 0, given, seconds, step))


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
            top_k = 1 if method == "dflash" else speculation.top_k
            self.speculation = Speculation(self.budget, top_k, block, speculation.acceptance)
        self.key = (method, self.speculation)

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return isinstance(other, Method) and self.key == other.key

    def __call__(self, weights: Weights, state: DecodeState) -> DecodeState:
        if self.method == "autoregressive":
            return autoregressive_step(weights, state)
        if self.method == "dflash":
            s = self.speculation
            return dflash_step(weights, state, block_size=s.block_size, acceptance=s.acceptance)
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
    shown = [t for t in tokens if t not in model.stop_ids]
    return Completion(
        text=None if model.tokenizer is None else model.tokenizer.decode(shown),
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        finish_reason=REASONS[reason] or "running",
        verify_passes=passes,
        accept_length=(count - 1) / passes if passes else 1.0,
        accept_by_depth=[int(h) / passes if passes else 0.0 for h in hits],
        seconds=seconds,
    )


_FOREVER = 2**31 - 1
