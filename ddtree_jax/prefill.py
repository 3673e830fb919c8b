"""Prefill: prompts through the target, one by one, into the caches of a batch."""

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.cache import empty_cache, identity_tables, scatter_tokens
from ddtree_jax.checks import is_int, require, show
from ddtree_jax.config import PAGE_SIZE, Sampling
from ddtree_jax.decide import coupled_tokens, shared_noise
from ddtree_jax.loading import Model
from ddtree_jax.model.attention import expanded_attention
from ddtree_jax.sampling import Law
from ddtree_jax.sharding import on_mesh, padded_heads, padded_requests, place_state
from ddtree_jax.state import RUNNING, STOP, DecodeState, Weights, emit

Prompt = str | Sequence[int]

# Tokens to generate and stop ids, the model's own counted: requests of fewer, in as many pages,
# share one compiled step.
LEAST_CAPACITY, LEAST_STOPS = 64, 4


def prefill(
    model: Model,
    prompts: Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    max_new_tokens: int = 128,
    count_experts: bool = False,
) -> DecodeState:
    """Run the prompts through the target, fill both caches, and sample each first token.

    Each prompt runs alone, padded to a power of two, so that a batch changes nothing for it.
    `count_experts` makes every step note how many experts its rows went to. Raises ValueError for
    input that cannot be honoured.
    """
    weights, config = model.weights, model.config
    ids, samplings = check_request(model, prompts, sampling, max_new_tokens)
    max_new_tokens = int(max_new_tokens)
    longest = max(len(i) for i in ids) + max_new_tokens
    pages = _power_of_two(-(-longest // PAGE_SIZE))
    stops = [model.stop_ids + s.stop_ids for s in samplings]
    widest = _power_of_two(max(LEAST_STOPS, *map(len, stops)))
    stop_ids = [s + (-1,) * (widest - len(s)) for s in stops]
    counted = config.num_moe_layers if count_experts else 0
    state = empty_state(weights, samplings, stop_ids, max_new_tokens, pages, counted)
    for request, tokens in enumerate(ids):
        padded = np.zeros(max(64, _power_of_two(len(tokens))), np.int32)
        padded[: len(tokens)] = tokens
        # NumPy, not jax: arrays of one process's device do not enter a program of many processes.
        state = prefill_request(weights, state, np.int32(request), padded, np.int32(len(tokens)))
    return state


def empty_state(
    weights: Weights,
    samplings: list[Sampling],
    stop_ids: list[tuple[int, ...]],
    max_new_tokens: int,
    pages: int,
    counted_layers: int,
) -> DecodeState:
    """Requests before their prefill, `pages` pages each, on the devices of the plan.

    Where requests are split over devices and do not divide, further ones stand at the end that have
    stopped from the start. Page numbers are those of the device that has the request.
    """
    plan, config, drafter = weights.plan, weights.config, weights.drafter_config
    given, capacity = len(samplings), _power_of_two(max(LEAST_CAPACITY, max_new_tokens))
    requests = padded_requests(plan, given)
    spare = requests - given
    heads = None if drafter is None else padded_heads(plan, drafter)
    samplings = [*samplings, *[Sampling()] * spare]
    stop_ids = [*stop_ids, *[(-1,) * len(stop_ids[0])] * spare]
    groups = plan.size if plan.splits("requests") else 1

    def make():
        return DecodeState(
            cache=empty_cache(config, drafter, requests * pages, weights.dtype, heads),
            block_tables=jnp.tile(identity_tables(requests // groups, pages), (groups, 1)),
            lengths=jnp.zeros(requests, jnp.int32),
            root=jnp.zeros(requests, jnp.int32),
            tokens=jnp.zeros((requests, capacity), jnp.int32),
            count=jnp.zeros(requests, jnp.int32),
            limit=jnp.full(requests, max_new_tokens, jnp.int32),
            stop_ids=jnp.asarray(stop_ids, jnp.int32),
            law=Law.of(samplings),
            reason=jnp.asarray([RUNNING] * given + [STOP] * spare, jnp.int32),
            depth=jnp.zeros((requests, capacity), jnp.int32),
            rank=jnp.full((requests, capacity), -1, jnp.int32),
            nodes=jnp.zeros((requests, capacity), jnp.int32),
            experts=(
                jnp.zeros((requests, capacity, counted_layers), jnp.int32)
                if counted_layers
                else None
            ),
        )

    return place_state(plan, make)


@partial(jax.jit, donate_argnames="state")
def prefill_request(weights: Weights, state: DecodeState, request, tokens, length) -> DecodeState:
    """Prefill one request of the batch: tokens [t], of which the first `length` are its prompt.

    Attention is expanded (keys and values per head): cheaper than absorbed for so many rows. All
    devices work on the same rows, also where they split requests.
    """
    return on_mesh(_prefill_request, weights, state, request, tokens, length, same_rows=True)


def _prefill_request(weights: Weights, state: DecodeState, request, tokens, length):
    target, plan, requests = weights.target_module(), weights.plan, state.root.shape[0]
    request = plan.own_request(request, requests)
    mine = (request >= 0) & (request < requests)
    # Another device's request is worked on with it, and leaves nothing here.
    place = jnp.clip(request, 0, requests - 1)
    table, kept = state.block_tables[place][None], jnp.where(mine, length, 0)
    t = tokens.shape[0]
    positions = jnp.arange(t, dtype=jnp.int32)

    taps = () if weights.drafter_config is None else weights.drafter_config.target_layer_ids
    rows = target(tokens, positions, positions < length, expanded_attention, taps)
    pages = (table, jnp.zeros(1, jnp.int32), kept[None])
    cache = state.cache
    cache = replace(cache, latents=scatter_tokens(cache.latents, rows.latents[:, None], *pages))
    if weights.drafter is not None:
        keys, values = weights.drafter_module().context(rows.taps, positions)
        cache = replace(
            cache,
            keys=scatter_tokens(cache.keys, keys[:, None], *pages),
            values=scatter_tokens(cache.values, values[:, None], *pages),
        )
    logits = target.lm_head(rows.hidden[length - 1])[None, None]
    law = jax.tree.map(lambda column: column[place][None], state.law)
    at, vocab = length[None, None], weights.config.vocab_size
    noise, barred = shared_noise(plan, law, at, vocab), law.min_new_tokens[:, None] > 0
    stops = state.stop_ids[place][None]
    first = coupled_tokens(plan, logits, law, at, noise, stops, barred, vocab)[0, 0]
    # Emit for this request alone: every other one is given no token and no failure.
    own = jnp.arange(requests, dtype=jnp.int32) == request
    failed = own & (first < 0)
    state = replace(
        state,
        cache=cache,
        lengths=jnp.where(own, length, state.lengths),
        root=jnp.where(own & ~failed, first, state.root),
    )
    token, zero = state.root[:, None], jnp.zeros_like(state.root[:, None])
    none = None if state.experts is None else jnp.zeros_like(state.experts[:, 0])
    given = (own & ~failed).astype(jnp.int32)
    return emit(state, token, given, failed, zero, zero - 1, zero[:, 0], none)


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
    samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    ok = isinstance(samplings, (list, tuple)) and all(isinstance(s, Sampling) for s in samplings)
    require(ok, "sampling", sampling, "a Sampling or a list of them")
    if len(samplings) != len(prompts):
        raise ValueError(f"sampling has {len(samplings)} entries: must be one, or {len(prompts)}")
    if not is_int(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={show(max_new_tokens)}: must be an integer, 1 or greater")
    ids = []
    for index, prompt in enumerate(prompts):
        tokens = _tokens(model, prompt)
        if not tokens:
            raise ValueError(f"prompts[{index}]={show(prompt)}: must hold at least one token")
        for bad in (t for t in tokens if not 0 <= t < config.vocab_size):
            raise ValueError(
                f"prompts[{index}] holds token id {bad}: must be from 0 to {config.vocab_size - 1}"
            )
        if len(tokens) + max_new_tokens > config.max_position_embeddings:
            raise ValueError(
                f"prompts[{index}] of {len(tokens)} tokens with max_new_tokens={max_new_tokens}: "
                f"together at most max_position_embeddings={config.max_position_embeddings}"
            )
        _check_stops(model, samplings[index], max_new_tokens)
        ids.append(tokens)
    return ids, list(samplings)


def _check_stops(model: Model, sampling: Sampling, max_new_tokens: int) -> None:
    config, stops = model.config, {*model.stop_ids, *sampling.stop_ids}
    for token in sampling.stop_ids:
        if token >= config.vocab_size:
            raise ValueError(f"stop_ids={token}: must be below vocab_size={config.vocab_size}")
    least = sampling.min_new_tokens
    if least > max_new_tokens:
        raise ValueError(f"min_new_tokens={least}: must be at most max_new_tokens={max_new_tokens}")
    if least and len(stops) >= config.vocab_size:
        raise ValueError(
            f"min_new_tokens={least} bars all {config.vocab_size} tokens: each is a stop id"
        )
    for text in sampling.stop:
        if model.tokenizer is None:
            raise ValueError(f"stop={text!r}: this model has no tokenizer, use stop_ids")
        size = len(model.tokenizer.encode(text))
        if size > config.max_position_embeddings:
            raise ValueError(
                f"stop={show(text)} of {size} tokens: must be at most "
                f"max_position_embeddings={config.max_position_embeddings}"
            )


def _as_list(prompts) -> list:
    """One text, or one list of ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items = listed(prompts)
    ok = items is not None
    require(ok, "prompts", prompts, "a text, a list of token ids, or a list of these")
    alone = items and not any(isinstance(p, str) or listed(p) is not None for p in items)
    return [items] if alone else items


def _tokens(model: Model, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids instead of text")
        if odd := [c for c in prompt if "\ud800" <= c <= "\udfff"]:  # what bytes not UTF-8 become
            raise ValueError(f"prompt {show(prompt)}: {odd[0]!r} is no character, must be UTF-8")
        return model.tokenizer.encode(prompt)
    ids = listed(prompt)
    if ids is not None and not any(isinstance(t, bool) for t in ids):
        try:
            return [operator.index(t) for t in ids]
        except TypeError:
            pass
    raise ValueError(f"{show(prompt)}: a prompt is a text or a list of token ids")


def listed(value) -> list | None:
    """A list, tuple or array as a list; None for anything else, texts and bytes among it."""
    if isinstance(value, (np.ndarray, jax.Array)):
        return np.asarray(value).tolist() if value.ndim else None
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        return list(value)
    return None


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
