"""The drafter's training pass: many blocks of one sequence at once, each as inference has it.

At its anchor a block sees what it would have then: the taps of tokens before the anchor, the
anchor's embedding, and masks. All of a step's blocks go through the drafter together.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.config import DFlashConfig
from ddtree_jax.model.dflash import block_visibility, merge_dflash
from ddtree_jax.model.layers import precision
from ddtree_jax.train import forward
from ddtree_jax.train.params import Flat, leaves

GAMMA = 4.0  # row k weighs exp(-(k - 1) / GAMMA)


class Blocks(NamedTuple):
    anchors: Int[Array, "b a"]
    labels: Int[Array, "b a l"]  # tokens anchor + 1 .. anchor + horizon
    valid: Bool[Array, "b a l"]  # labels that count


def at(tokens: Int[Array, "b t"], anchors: Int[Array, "b a"], horizon: int):
    """Places anchor + 1 .. anchor + horizon and the tokens there (the last one past the end)."""
    places = anchors[..., None] + jnp.arange(1, horizon + 1, dtype=jnp.int32)[None, None]
    inside = jnp.minimum(places, tokens.shape[1] - 1)
    return places, jax.vmap(lambda row, where: row[where])(tokens, inside).astype(jnp.int32)


def context_visibility(
    config: DFlashConfig, layer: int, anchors: Int[Array, "b a"], length: int
) -> Bool[Array, "b q t"]:
    """Which context tokens block rows see, [b, anchors * block, t]: those before the anchor."""
    keys = jnp.arange(length, dtype=jnp.int32)
    offsets = jnp.arange(config.block_size, dtype=jnp.int32)

    def one(anchors):
        queries = (anchors[:, None] + offsets[None]).reshape(-1)
        before = keys[None] < jnp.repeat(anchors, config.block_size)[:, None]
        return before & block_visibility(config, layer, queries, keys, block=False)

    return jax.vmap(one)(anchors)


def own_visibility(config: DFlashConfig, layer: int) -> Bool[Array, "f f"]:
    place = jnp.arange(config.block_size, dtype=jnp.int32)
    return block_visibility(config, layer, place, place, block=True)


def attention(config: DFlashConfig, anchors: Int[Array, "b a"], keys, values, implementation: str):
    """Block attention over the context's `keys`, `values` [layers, b, t, kv, d] and own blocks.

    'plain' holds float32 scores [b, heads, anchors * block, t] of one layer at a time; 'cudnn' (a
    GPU, bf16) holds none, but masks [b, anchors * block, t + anchors * block]; 'xla' tests it.
    """
    attend = _plain if implementation == "plain" else partial(_fused, implementation)
    return lambda q, k, v, layer: attend(
        config, layer, anchors, q, k, v, keys[layer], values[layer]
    )


@partial(jax.checkpoint, static_argnums=(0, 1))
def _plain(config, layer, anchors, queries, own_keys, own_values, keys, values):
    (batch, count), length = anchors.shape, keys.shape[1]
    block, kv, d = config.block_size, config.num_key_value_heads, config.head_dim
    high = precision(queries.dtype)
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    dot = partial(jnp.einsum, precision=high, preferred_element_type=wide)
    q = queries.reshape(batch, count, block, kv, -1, d) * jnp.asarray(d**-0.5, queries.dtype)
    own_k = own_keys.reshape(batch, count, block, kv, d)
    own_v = own_values.reshape(batch, count, block, kv, d)
    far = dot("baqgid,bkgd->bgaqik", q, keys)
    near = dot("baqgid,bakgd->bgaqik", q, own_k)
    seen = context_visibility(config, layer, anchors, length)
    far = jnp.where(seen.reshape(batch, 1, count, block, 1, length), far, -jnp.inf)
    inside = own_visibility(config, layer)
    near = jnp.where(inside[None, None, None, :, None], near, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(far.max(-1), near.max(-1)))[..., None]
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = far.sum(-1, keepdims=True) + near.sum(-1, keepdims=True)
    far, near = ((w / total).astype(queries.dtype) for w in (far, near))
    out = dot("bgaqik,bkgd->baqgid", far, values) + dot("bgaqik,bakgd->baqgid", near, own_v)
    return out.astype(queries.dtype).reshape(queries.shape)


def _fused(implementation, config, layer, anchors, queries, own_keys, own_values, keys, values):
    """All blocks of a sequence as one attention, over its context and then over all block rows."""
    (batch, count), block = anchors.shape, config.block_size

    def flat(a):
        return a.reshape(batch, count * block, *a.shape[2:])

    of = jnp.arange(count * block, dtype=jnp.int32) // block
    same = (of[:, None] == of[None]) & jnp.tile(own_visibility(config, layer), (count, count))
    mask = jnp.concatenate(
        [
            context_visibility(config, layer, anchors, keys.shape[1]),
            jnp.broadcast_to(same[None], (batch, *same.shape)),
        ],
        axis=-1,
    )
    k, v = (
        jnp.concatenate([far, flat(own)], axis=1)
        for far, own in ((keys, own_keys), (values, own_values))
    )
    out = jax.nn.dot_product_attention(
        flat(queries), k, v, mask=mask[:, None], implementation=implementation
    )
    return out.reshape(queries.shape)


def block_logits(
    config: DFlashConfig, weights: Flat, target: Flat, taps, tokens, anchors, implementation="plain"
) -> Float[Array, "b a l v"]:
    """Logits of the masked rows of every block; taps [b, t, taps, hidden], tokens [b, t]."""
    batch, length = tokens.shape
    block = config.block_size
    model = merge_dflash(config, leaves(weights), weights["fc/weight"].dtype)
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    keys, values = model.context(taps, places)
    roots = jnp.take_along_axis(tokens, anchors, axis=1).astype(jnp.int32)[..., None]
    masks = jnp.full((*anchors.shape, block - 1), config.mask_token_id, jnp.int32)
    ids = jnp.concatenate([roots, masks], axis=-1).reshape(-1, block)
    x = jnp.take(target["embed_tokens/weight"], ids, axis=0)
    positions = anchors[..., None] + jnp.arange(block, dtype=jnp.int32)[None, None]
    attend = attention(config, anchors, keys, values, implementation)
    hidden = model(x, positions.reshape(-1, block), attend)
    out = forward.logits(target, hidden[:, 1:])
    return out.reshape(*anchors.shape, block - 1, -1)


def accepted(scores, blocks: Blocks) -> tuple[Array, Array]:
    """Tokens a chain would commit, bonus counted, and whether all labels of a block are valid."""
    match = (scores.argmax(axis=-1) == blocks.labels) & blocks.valid
    return 1 + jnp.cumprod(match.astype(jnp.int32), axis=-1).sum(-1), blocks.valid.all(-1)


def loss(scores: Float[Array, "b a l v"], blocks: Blocks, gamma: float = GAMMA):
    """Weighted mean cross entropy of valid labels, and the mean accept length of whole blocks."""
    vocabulary = jnp.arange(scores.shape[-1], dtype=jnp.int32).reshape(1, 1, 1, -1)
    picked = jnp.where(blocks.labels[..., None] == vocabulary, scores, 0).sum(-1)
    nats = jax.nn.logsumexp(scores, axis=-1) - picked
    fall = jnp.exp(-jnp.arange(scores.shape[2], dtype=jnp.float32) / gamma)
    share = blocks.valid * fall[None, None]
    value = (nats * share).sum() / jnp.maximum(share.sum(), 1)
    taken, whole = accepted(scores, blocks)
    return value, (taken * whole).sum() / jnp.maximum(whole.sum(), 1)


def default_attention(config: DFlashConfig) -> str:
    """'cudnn' where it gives values and gradients of 'plain' on a small case; else 'plain'."""
    if jax.default_backend() != "gpu":
        return "plain"
    try:
        error = _difference(config)
    except Exception as problem:  # whatever the library refuses
        print(f"block attention without cuDNN: {problem}", flush=True)
        return "plain"
    print(f"block attention of cuDNN: relative difference {error:.2g}", flush=True)
    return "cudnn" if error < 0.03 else "plain"


def _difference(config: DFlashConfig, implementation: str = "cudnn", dtype=jnp.bfloat16) -> float:
    """Greatest relative error of the fused attention and of its gradients."""
    batch, count, length = 2, 4, 256
    anchors = jnp.array([[1, 60, 130, 240], [9, 10, 200, 248]], jnp.int32)
    heads, kv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rows = (batch * count, config.block_size)
    shapes = ((*rows, heads, d), *((*rows, kv, d),) * 2, *((batch, length, kv, d),) * 2)
    keys = jax.random.split(jax.random.key(0), 6)
    inputs = [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=False)]
    pull = jax.random.normal(keys[5], shapes[0], dtype)

    def both(implementation, *inputs):
        def run(q, own_k, own_v, k, v):
            return attention(config, anchors, k[None], v[None], implementation)(q, own_k, own_v, 0)

        out, back = jax.vjp(run, *inputs)
        return out, *back(pull)

    pairs = zip(
        *(jax.jit(partial(both, i))(*inputs) for i in ("plain", implementation)), strict=True
    )
    norm = lambda a: jnp.linalg.norm(a.astype(jnp.float32).reshape(-1))  # noqa: E731
    return max(float(norm(a - b) / norm(a)) for a, b in pairs)
