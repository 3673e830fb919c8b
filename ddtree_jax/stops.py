"""Stop strings: found on the host in what was said, between calls of the decode loop.

A string may end inside an accepted run, so the overrun is cut from tokens and counters, and the
text ends before the string.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ddtree_jax.config import Sampling
from ddtree_jax.sharding import fetch
from ddtree_jax.state import STOP, DecodeState
from ddtree_jax.tokenizer import Tokenizer

EVERY = 8  # passes between two looks


class Cut(NamedTuple):
    tokens: int  # said up to the end of the string
    size: int  # bytes of text before it


def find(tokenizer: Tokenizer, tokens: list[int], sampling: Sampling) -> Cut | None:
    """The first stop string in the order in which the strings end; None without one.

    One that is complete within the first `min_new_tokens` tokens does not count.
    """
    if not sampling.stop:
        return None
    ends = np.cumsum([len(tokenizer.decode_bytes([t])) for t in tokens])
    said = tokenizer.decode_bytes(tokens)
    found = []
    for text in sampling.stop:
        wanted = text.encode()
        at = said.find(wanted)
        while at >= 0:
            count = int(np.searchsorted(ends, at + len(wanted))) + 1
            if count > sampling.min_new_tokens:
                found.append((at + len(wanted), at, count))
                break
            at = said.find(wanted, at + 1)
    if not found:
        return None
    _, at, count = min(found)
    return Cut(count, at)


def end_requests(
    tokenizer: Tokenizer, state: DecodeState, samplings: list[Sampling], stop_ids: tuple[int, ...]
) -> DecodeState:
    """Requests whose text holds a stop string end there, also if they ran on for other reasons."""
    count, reason = fetch(state.count).copy(), fetch(state.reason).copy()
    tokens = fetch(state.tokens)
    for request, sampling in enumerate(samplings):
        said = visible(tokens[request, : count[request]].tolist(), stop_ids, sampling)
        cut = find(tokenizer, said, sampling)
        if cut is not None:  # also at the limit, as a stop id there is a stop
            count[request], reason[request] = cut.tokens, STOP
    return replace(state, count=_as(count, state.count), reason=_as(reason, state.reason))


def _as(values: np.ndarray, like: jax.Array) -> jax.Array:
    """On the devices that the replaced array is on, so that no program is compiled anew."""
    if isinstance(like.sharding, NamedSharding):
        return jax.device_put(values, like.sharding)
    return jnp.asarray(values)


def visible(tokens: list[int], stop_ids: tuple[int, ...], sampling: Sampling) -> list[int]:
    """Tokens without the stop id at their end."""
    ends = tokens and tokens[-1] in (*stop_ids, *sampling.stop_ids)
    return tokens[:-1] if ends else tokens


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """How many last characters of `text` may be the beginning of a stop string."""
    longest = max((len(s) for s in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-size:]) for s in stops):
            return size
    return 0
