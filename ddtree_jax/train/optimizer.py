"""Muon for matrices, AdamW for the rest, warm-up / constant / linear decay.

Muon (Jordan 2024; scaled as in Moonlight, arXiv 2502.16982): momentum, made orthogonal by
Newton-Schulz steps, times 0.2 sqrt(max(out, in)), so that AdamW's learning rates carry over.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddtree_jax.train.params import Flat

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Optimizer:
    peak: float = 4e-3
    warmup: int = 150
    decay_share: float = 0.35
    matrices: str = "muon"  # or "adamw"
    weight_decay: float = 0.1
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0

    def __post_init__(self):
        if self.matrices not in ("muon", "adamw"):
            raise ValueError(f"matrices={self.matrices!r}: must be 'muon' or 'adamw'")

    def rate(self, step, total):
        """Warm-up, constant, then linear to 0 over the last `decay_share` of `total` steps."""
        up = (step + 1) / self.warmup
        down = (total - step) / jnp.maximum(self.decay_share * total, 1)
        return self.peak * jnp.clip(jnp.minimum(up, down), 0, 1)

    def muon(self, name: str, value) -> bool:
        return self.matrices == "muon" and value.ndim >= 2 and not _adam_matrix(name)

    def init(self, params: Flat) -> "Moments":
        params = {n: v for n, v in params.items() if not _frozen(n)}
        second = {n: jnp.zeros_like(v) for n, v in params.items() if not self.muon(n, v)}
        return Moments({n: jnp.zeros_like(v) for n, v in params.items()}, second)

    def update(self, params: Flat, grads: Flat, moments: "Moments", step, total):
        """New parameters and moments, and the gradient's norm. A step without a finite
        gradient changes nothing."""
        grads = {n: grads[n].astype(jnp.float32) for n in moments.first}
        norm = jnp.sqrt(sum((g * g).sum() for g in grads.values()))
        sound = jnp.isfinite(norm)
        scale = jnp.minimum(1.0, self.clip / (norm + 1e-6))
        grads = {n: jnp.where(sound, g * scale, 0) for n, g in grads.items()}
        rate = self.rate(step, total)

        first, second, matrices, steps = {}, {}, {}, {}
        count = (step + 1).astype(jnp.float32)
        for name, g in grads.items():
            old = moments.first[name]
            if self.muon(name, g):
                first[name] = self.momentum * old + (1 - self.momentum) * g
                matrices[name] = (1 - self.momentum) * g + self.momentum * first[name]
                continue
            first[name] = self.beta1 * old + (1 - self.beta1) * g
            second[name] = self.beta2 * moments.second[name] + (1 - self.beta2) * g * g
            mean = first[name] / (1 - self.beta1**count)
            spread = jnp.sqrt(second[name] / (1 - self.beta2**count))
            steps[name] = mean / (spread + self.eps)
        for name, u in orthogonal(matrices).items():
            steps[name] = u * 0.2 * max(u.shape[-2:]) ** 0.5

        out = dict(params)
        for name, change in steps.items():
            decay = self.weight_decay if _decays(name, change) else 0.0
            moved = params[name] * (1 - rate * decay) - rate * change
            out[name] = jnp.where(sound, moved, params[name])
        return out, Moments(first, second), norm


class Moments(NamedTuple):
    first: Flat
    second: Flat  # of AdamW's parameters only


def orthogonal(updates: Flat) -> Flat:
    """Each matrix (the last two axes) with its singular values near 1; like shapes together."""
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, u in updates.items():
        groups[min(u.shape[-2:]), max(u.shape[-2:])].append(name)
    out = {}
    for shape, names in groups.items():
        flat = [_wide(updates[n]).reshape(-1, *shape) for n in names]
        stack = _newton_schulz(jnp.concatenate(flat))
        start = 0
        for name, part in zip(names, flat, strict=True):
            piece, start = stack[start : start + part.shape[0]], start + part.shape[0]
            u = updates[name]
            tall = u.shape[-2] > u.shape[-1]
            piece = piece.reshape(*u.shape[:-2], *shape)
            out[name] = jnp.swapaxes(piece, -1, -2) if tall else piece
    return out


def _wide(u):
    return jnp.swapaxes(u, -1, -2) if u.shape[-2] > u.shape[-1] else u


def _newton_schulz(x: Float[Array, "n r c"]) -> Float[Array, "n r c"]:
    a, b, c = NEWTON_SCHULZ
    x = x / (jnp.sqrt((x * x).sum(axis=(-1, -2), keepdims=True)) + 1e-12)
    x = x.astype(jnp.bfloat16)
    for _ in range(5):
        gram = jnp.einsum("nrc,nsc->nrs", x, x)
        poly = b * gram + c * jnp.einsum("nrs,nst->nrt", gram, gram)
        x = a * x + jnp.einsum("nrs,nsc->nrc", poly, x)
    return x.astype(jnp.float32)


def _adam_matrix(name: str) -> bool:
    router = name.endswith("mlp/gate/weight")
    return router or name.startswith(("embed_tokens/", "lm_head/"))


def _frozen(name: str) -> bool:
    return name.endswith("e_score_correction_bias")


def _decays(name: str, value: jax.Array) -> bool:
    return value.ndim >= 2 and not name.startswith("embed_tokens/")
