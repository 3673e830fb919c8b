"""The two ways to decode: to the end on the device, or piece by piece as text."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ddtree_jax.checks import require
from ddtree_jax.config import Sampling, Speculation
from ddtree_jax.loading import Model
from ddtree_jax.prefill import Prompt, check_request, listed, prefill
from ddtree_jax.sharding import fetch, on_mesh
from ddtree_jax.state import REASONS, RUNNING, DecodeState, Weights
from ddtree_jax.step import autoregressive_step, ddtree_step, dflash_step, served_block_size
from ddtree_jax.stops import EVERY, end_requests, find, held_back, visible
from ddtree_jax.tokenizer import StreamDecoder

METHODS = ("ddtree", "dflash", "autoregressive")


@dataclass(frozen=True)
class Completion:
    """What one prompt became. Counts leave out the token that prefill sampled.

    `accept_length` is tokens committed per verify pass, the bonus counted; `accept_by_depth[d]` the
    share of passes that committed a drafted token at depth d+1, `accept_by_rank[k]` the share of
    accepted drafts that were their parent's (k+1)th candidate, `drafted_nodes` the tree nodes
    verified. `experts_touched[l]` is the number of distinct experts of MoE layer l that the
    request's rows went to, a mean over its passes; None unless asked for. `tokens` holds
    a final stop id, `text` does not; a stop string is cut from the text and ends the tokens.
    `seconds` is the decode time of the whole batch, prefill and compilation left out.
    """

    text: str | None
    tokens: list[int]
    prompt_tokens: int
    finish_reason: str
    verify_passes: int
    accept_length: float
    accept_by_depth: list[float]
    accept_by_rank: list[float]
    drafted_nodes: int
    seconds: float
    experts_touched: list[float] | None = None

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
    count_experts: bool = False,
) -> list[Completion]:
    """Complete prompts (texts or token id lists) as one batch, decoding on the device to the end.

    Every method gives the tokens plain decoding gives with the same sampling, up to near-ties of
    the number format; with `rejection` acceptance the same distribution. `count_experts` fills
    `Completion.experts_touched`. Returns one Completion a prompt, in order. Raises ValueError for
    input that cannot be honoured.
    """
    step = Method(method, speculation, model.weights)
    ids, samplings = check_request(model, prompts, sampling, max_new_tokens)
    state = prefill(model, ids, samplings, max_new_tokens, count_experts)
    state, _ = decode(model.weights, state, step, 0)  # compiles, runs no pass
    jax.block_until_ready(state)
    start = time.perf_counter()
    strings, running = any(s.stop for s in samplings), True
    while running:
        some = EVERY if strings else _FOREVER
        state, running = jax.block_until_ready(decode(model.weights, state, step, some))
        if strings:
            state = end_requests(model.tokenizer, state, samplings, model.stop_ids)
            running = (fetch(state.reason) == RUNNING).any()
    seconds = time.perf_counter() - start
    return [
        completion(model, state, r, samplings[r], len(ids[r]), seconds, step)
        for r in range(len(ids))
    ]


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
    ok = isinstance(prompt, str) or listed(prompt) is not None
    require(ok, "prompt", prompt, "a text or a list of token ids")
    require(isinstance(sampling, Sampling), "sampling", sampling, "a Sampling")
    step = Method(method, speculation, model.weights)
    check_request(model, [prompt], sampling, max_new_tokens)
    return _stream(model, prompt, step, sampling, max_new_tokens, done)


def _stream(model, prompt, step, sampling, max_new_tokens, done) -> Iterator[str]:
    state = prefill(model, [prompt], sampling, max_new_tokens)
    given = int(fetch(state.lengths)[0])
    state, _ = decode(model.weights, state, step, 0)
    decoder, shown, waiting, seconds = StreamDecoder(model.tokenizer), 0, "", 0.0
    while True:
        if sampling.stop:
            state = end_requests(model.tokenizer, state, [sampling], model.stop_ids)
        # Sliced on the host: compiles nothing.
        said = fetch(state.tokens)[0, : int(fetch(state.count)[0])].tolist()
        said = visible(said, model.stop_ids, sampling)
        waiting += decoder.push(said[shown:])
        shown = len(said)
        if fetch(state.reason)[0] != RUNNING:  # read on the host: compiles nothing
            break
        ready = len(waiting) - held_back(waiting, sampling.stop)
        if ready:
            yield waiting[:ready]
        waiting = waiting[ready:]
        start = time.perf_counter()
        state, _ = jax.block_until_ready(decode(model.weights, state, step, 1))
        seconds += time.perf_counter() - start
    last = completion(model, state, 0, sampling, given, seconds, step)
    waiting += decoder.finish()
    cut = find(model.tokenizer, said, sampling)
    if cut is not None:  # what is waiting ends with the string: drop it
        over = len(model.tokenizer.decode(said)) - len(last.text)
        waiting = waiting[: len(waiting) - over]
    if waiting:
        yield waiting
    if done is not None:
        done.append(last)


class Method:
    """A method with its settings: hashable, so that it is a static argument of `decode`."""

    def __init__(self, method: str, speculation: Speculation, weights: Weights):
        if method not in METHODS:
            raise ValueError(f"method={method!r}: must be one of {', '.join(METHODS)}")
        ok = isinstance(speculation, Speculation)
        require(ok, "speculation", speculation, "a Speculation")
        vocab = weights.config.vocab_size
        if speculation.top_k > vocab:
            raise ValueError(
                f"top_k={speculation.top_k}: must be at most the vocabulary's {vocab} tokens"
            )
        self.method, self.budget, self.horizon = method, 0, 0
        self.speculation = None
        if method != "autoregressive" or weights.drafter_config is not None:
            block = served_block_size(weights, speculation.block_size)
        if method != "autoregressive":
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

    def run(weights, state, passes):
        def running(state):
            return weights.plan.any(state.active.any())

        def more(carry):
            _, some, done = carry
            return some & (done < passes)

        def body(carry):
            state, _, done = carry
            state = step(weights, state)
            return state, running(state), done + 1

        state, some, _ = lax.while_loop(more, body, (state, running(state), jnp.int32(0)))
        return state, some

    return on_mesh(run, weights, state, passes, flag=True)


def completion(
    model: Model,
    state: DecodeState,
    request: int,
    sampling: Sampling,
    prompt_tokens: int,
    seconds: float,
    step: Method,
) -> Completion:
    """Read one request's result off the state."""
    # Sliced as NumPy arrays: a slice on the device would be a program of its own for each count.
    count, reason, tokens = (fetch(c)[request] for c in (state.count, state.reason, state.tokens))
    tokens = tokens[:count].tolist()
    depth, rank, nodes = (
        fetch(c)[request, 1:count] for c in (state.depth, state.rank, state.nodes)
    )
    # A pass ends with its bonus, or where the request was cut.
    ends = depth == 0
    ends[-1:] = True
    passes = int(ends.sum())
    experts = None
    if state.experts is not None:
        experts = fetch(state.experts)[request, 1:count][ends].astype(float)
        experts = (experts.sum(axis=0) / max(passes, 1)).tolist()
    depths = step.horizon if step.budget else 0
    drafted, ranks = rank[rank >= 0], step.speculation.top_k if step.speculation else 0
    text, shown = None, visible(tokens, model.stop_ids, sampling)
    if model.tokenizer is not None:
        cut = find(model.tokenizer, shown, sampling)
        said = model.tokenizer.decode_bytes(shown)
        text = said[: None if cut is None else cut.size].decode("utf-8", "replace")
    return Completion(
        text=text,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        finish_reason=REASONS[int(reason)] or "running",
        verify_passes=passes,
        accept_length=len(depth) / passes if passes else 1.0,
        accept_by_depth=[
            int((depth == d).sum()) / passes if passes else 0.0 for d in range(1, depths + 1)
        ],
        accept_by_rank=[
            int((drafted == r).sum()) / len(drafted) if len(drafted) else 0.0 for r in range(ranks)
        ],
        drafted_nodes=int(nodes[ends].sum()),
        seconds=seconds,
        experts_touched=experts,
    )


_FOREVER = 2**31 - 1
