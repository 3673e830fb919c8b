"""Parts of Kimi K2.6 that one GPU holds: random weights made on the device, no communication.

    k1        one MoE layer with all experts
    k12       the dense layer, 11 MoE layers, head and drafter
    k61-tp8   all 61 layers at an eighth of heads, expert width, dense width, vocabulary and drafter
    k61-ep8   all 61 layers with 48 of the experts each, and an eighth of the requests in attention
    k30-ep4   30 layers with 96 of the experts each, and a quarter of the requests

In the ep slices the experts see the rows of all requests: those of the other devices are made of
this one's (`Part`). Where devices would sum or exchange, nothing is done: a time is that of one
device's own work. Head and drafter of the ep slices are whole, for the device's own requests.
"""

import math
import re
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from ddtree_jax import Sampling
from ddtree_jax.cache import PAGE_SIZE
from ddtree_jax.checkpoint import leaves_by_path
from ddtree_jax.config import DFlashConfig, KimiConfig, Yarn
from ddtree_jax.parallel import ALONE, Plan
from ddtree_jax.prefill import empty_state
from ddtree_jax.state import DecodeState, Weights

YARN = Yarn(
    factor=64.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0,
    mscale_all_dim=1.0,
)  # fmt: skip
KIMI = KimiConfig(
    vocab_size=163_840, hidden_size=7168, num_hidden_layers=61, num_attention_heads=64,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    intermediate_size=18_432, moe_intermediate_size=2048, n_routed_experts=384,
    num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1,
    routed_scaling_factor=2.827, norm_topk_prob=True, rms_norm_eps=1e-5, rope_theta=50_000.0,
    max_position_embeddings=262_144, yarn=YARN, expert_bits=4, expert_records=True,
)  # fmt: skip
DRAFTER = DFlashConfig(
    hidden_size=7168, intermediate_size=18_432, num_hidden_layers=6, num_attention_heads=64,
    num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=50_000.0,
    vocab_size=163_840, num_target_layers=61, target_layer_ids=(1, 12, 24, 35, 47, 58),
    mask_token_id=163_838, block_size=8, layer_types=("sliding_attention",) * 5
    + ("full_attention",), sliding_window=2048, yarn=YARN,
)  # fmt: skip


@dataclass(frozen=True)
class Part(Plan):
    """One of `devices` that hold a part of the experts each, and requests of their own.

    The rows of the others are this device's, their columns turned: other numbers of the same kind,
    so that the router sends them to other experts.
    """

    devices: int = 1

    @property
    def size(self) -> int:
        return self.devices

    def splits(self, logical: str) -> bool:
        return logical == "experts"

    def first_expert(self, count: int):
        return jnp.int32(0)

    def all_rows(self, x):
        turn = x.shape[-1] // self.devices if x.ndim > 1 else 0
        rows = [jnp.roll(x, i * turn, axis=-1) if turn else x for i in range(self.devices)]
        return jnp.concatenate(rows)

    def own_rows(self, x):
        return x[: x.shape[0] // self.devices]

    def sum_experts(self, routed, shared):
        routed = self.own_rows(routed)
        return routed if shared is None else routed + shared


@dataclass(frozen=True)
class Slice:
    """What a device holds: configs of its sizes, and who else takes part."""

    target: KimiConfig
    drafter: DFlashConfig | None
    plan: Plan = ALONE

    def shapes(self) -> tuple[dict, dict]:
        """Shape and dtype of every leaf of target and drafter, by path."""
        target = leaves_by_path(self.target, "bfloat16")
        for path, leaf in target.items():
            if re.match("experts/", path):
                held = leaf.shape[1] // self.plan.size
                shape = leaf.shape[0], held, *leaf.shape[2:]
                target[path] = jax.ShapeDtypeStruct(shape, leaf.dtype)
        drafter = {} if self.drafter is None else leaves_by_path(self.drafter, "bfloat16")
        return target, drafter


def eighth(config: KimiConfig) -> KimiConfig:
    """A tensor-parallel device's sizes."""
    names = (
        "num_attention_heads", "moe_intermediate_size", "intermediate_size", "vocab_size",
    )  # fmt: skip
    return replace(config, **{name: getattr(config, name) // 8 for name in names})


def drafter_of(target: KimiConfig) -> DFlashConfig:
    """The drafter, tapping the layers there are at equal distances; an eighth with an eighth."""
    last, taps = target.num_hidden_layers - 2, len(DRAFTER.target_layer_ids)
    layers = tuple(round(1 + i * (last - 2) / (taps - 1)) for i in range(taps))
    if target.num_hidden_layers == 61:
        layers = DRAFTER.target_layer_ids
    share = DRAFTER.vocab_size // target.vocab_size
    return replace(
        DRAFTER,
        num_attention_heads=DRAFTER.num_attention_heads // share,
        num_key_value_heads=DRAFTER.num_key_value_heads // share,
        intermediate_size=DRAFTER.intermediate_size // share,
        vocab_size=target.vocab_size,
        mask_token_id=target.vocab_size - 2,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=layers,
    )


def slice_of(name: str) -> Slice:
    """A slice by name; raises ValueError naming those there are."""
    layers = partial(replace, KIMI)
    targets = {
        "k1": (layers(num_hidden_layers=1, first_k_dense_replace=0, vocab_size=1024), ALONE),
        "k12": (layers(num_hidden_layers=12), ALONE),
        "k61-tp8": (eighth(KIMI), ALONE),
        "k61-ep8": (KIMI, Part(devices=8)),
        "k30-ep4": (layers(num_hidden_layers=30), Part(devices=4)),
    }
    if name not in targets:
        raise ValueError(f"slice {name!r}: must be one of {', '.join(targets)}")
    target, plan = targets[name]
    return Slice(target, None if name == "k1" else drafter_of(target), plan)


def nbytes(shape: jax.ShapeDtypeStruct) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize


def foreseen(part: Slice, requests: int, context: int, room: int) -> dict[str, int]:
    """Bytes of weights and caches, before anything is allocated; temporaries are not in it."""
    target, drafter = part.shapes()
    state = jax.eval_shape(partial(_empty, part, requests, context, room))
    found = {
        "experts": sum(nbytes(x) for path, x in target.items() if path.startswith("experts/")),
        "drafter": sum(map(nbytes, drafter.values())),
        "cache": sum(map(nbytes, jax.tree.leaves(state.cache))),
    }
    found["other weights"] = sum(map(nbytes, target.values())) - found["experts"]
    return found


def check_memory(part: Slice, requests: int, context: int, room: int, free: int) -> None:
    """Raise ValueError with the table, and the most requests that fit, if these do not.

    A sixteenth of the memory is left for temporaries.
    """
    usable = free - free // 16

    def total(requests: int) -> int:
        return sum(foreseen(part, requests, context, room).values())

    if total(requests) <= usable:
        return
    most = next((r for r in range(requests - 1, 0, -1) if total(r) <= usable), 0)
    table = ", ".join(
        f"{name} {size / 1e9:.1f} GB"
        for name, size in foreseen(part, requests, context, room).items()
    )
    raise ValueError(
        f"requests={requests}, context={context}: {table}; of {usable / 1e9:.1f} GB that are "
        f"free for them; requests={most} would fit"
    )


def make_weights(part: Slice, seed: int = 0) -> Weights:
    """Random weights of unit gain, leaf by leaf on the device; norms are ones, biases zeros."""
    target, drafter = part.shapes()
    keys = iter(jax.random.split(jax.random.key(seed), len(target) + len(drafter)))
    made = tuple(draw_leaf(path, leaf, next(keys)) for path, leaf in target.items())
    drafted = tuple(draw_leaf(path, leaf, next(keys)) for path, leaf in drafter.items())
    leaves = made, drafted if part.drafter else None
    return Weights(*leaves, part.target, part.drafter, "bfloat16", part.plan)


def draw_leaf(path: str, leaf: jax.ShapeDtypeStruct, key) -> jax.Array:
    """A random weight of unit gain; INT4 records get scales that give it."""
    if path.endswith("_records"):
        inner = leaf.shape[3] * 128
        return random_records(key, leaf.shape, inner)
    if leaf.ndim == 1:
        return (jnp.zeros if path.endswith("bias") else jnp.ones)(leaf.shape, leaf.dtype)
    return _draw_matrix(key, leaf.shape, leaf.dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _draw_matrix(key, shape, dtype):
    gain = 1.0 if len(shape) == 2 else 0.5
    return (jax.random.normal(key, shape, dtype) * (gain * shape[-1] ** -0.5)).astype(dtype)


@partial(jax.jit, static_argnums=(1, 2))
def random_records(key, shape, inner: int):
    """Records [layers, experts, tiles, steps, 4, 9, 128]: nibbles, then a pair of bf16 scales."""

    def one(key):
        words, scales = jax.random.split(key)
        bits = jax.random.bits(words, (*shape[2:5], 8, 128), jnp.uint32)
        pair = jax.random.uniform(scales, (*shape[2:5], 1, 128, 2), jnp.float32, 0.5, 1.5)
        pair = (pair * (inner**-0.5 / 4.6)).astype(jnp.bfloat16)
        pair = jax.lax.bitcast_convert_type(pair, jnp.uint16).astype(jnp.uint32)
        joined = jnp.concatenate([bits, pair[..., 0] | pair[..., 1] << 16], axis=-2)
        return jax.lax.bitcast_convert_type(joined, jnp.int32)

    layers, experts = shape[:2]
    return jax.lax.map(one, jax.random.split(key, layers * experts)).reshape(shape)


def make_state(part: Slice, requests: int, context: int, room: int) -> DecodeState:
    """Greedy requests of `context` cached tokens, random ones, that may say `room` more."""
    state = _empty(part, requests, context, room)
    roots = jax.random.randint(jax.random.key(1), (requests,), 0, part.target.vocab_size)
    return replace(
        state,
        cache=_fill(state.cache),
        lengths=jnp.full(requests, context, jnp.int32),
        root=roots.astype(jnp.int32),
        count=jnp.ones(requests, jnp.int32),
    )


def _empty(part: Slice, requests: int, context: int, room: int) -> DecodeState:
    pages = -(-(context + room + 64) // PAGE_SIZE)
    none = Weights((), None, part.target, part.drafter, "bfloat16", part.plan)
    return empty_state(none, [Sampling()] * requests, [(-1,)] * requests, room, pages, 0)


@partial(jax.jit, donate_argnums=0)
def _fill(cache):
    """Random latents, keys and values, one layer after another: their noise is float32."""
    leaves, tree = jax.tree.flatten(cache)

    def fill(i, leaf):
        keys = jax.random.split(jax.random.key(i), leaf.shape[0])
        return jax.lax.map(lambda key: jax.random.normal(key, leaf.shape[1:], leaf.dtype), keys)

    return jax.tree.unflatten(tree, [fill(i, leaf) for i, leaf in enumerate(leaves)])
