"""Training of the DFlash drafter (arXiv 2602.06036, section 4.2) on text said by its target.

The frozen target runs over whole sequences and leaves its taps; at random anchors the drafter
guesses the tokens after the anchor from what it would have at inference: the taps of tokens
before the anchor, the anchor's embedding, and masks.
"""

from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.config import DFlashConfig
from ddtree_jax.model.dflash import DFlash, block_visibility, merge_dflash
from ddtree_jax.model.layers import precision
from ddtree_jax.pallas.expert_matmul import dequantize
from ddtree_jax.train import forward, store
from ddtree_jax.train.nano import Scale
from ddtree_jax.train.optimizer import Optimizer
from ddtree_jax.train.pace import UNDECIDED, Pace, drive
from ddtree_jax.train.params import Flat, initialise, leaves
from ddtree_jax.train.sample import Texts
from ddtree_jax.train.target import STEM as TARGET_STEM

STEM = "nano_drafter"


@dataclass(frozen=True)
class Recipe:
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(peak=3e-3, warmup=100))
    rows: int = 65536  # tokens of a step: sequences are rows // length
    anchors: int = 96  # of each sequence
    gamma: float = 4.0  # row k weighs exp(-(k - 1) / gamma)
    chunk: int = 20
    long_every: int = 3  # every third chunk is of the group of long texts
    least: int = 16  # texts with fewer said tokens are left out
    held: int = 256  # short texts kept for evaluation; of long texts half of it
    seed: int = 1
    dtype: str = "bfloat16"
    attention: str = "xla"


class Data(NamedTuple):
    """Texts on the device; ids from `prompt` to before `end` were said by the target."""

    tokens: Int[Array, "n t"]
    prompt: Int[Array, " n"]
    end: Int[Array, " n"]
    greedy: Bool[Array, " n"]


class Blocks(NamedTuple):
    anchors: Int[Array, "b a"]
    labels: Int[Array, "b a l"]  # tokens anchor + 1 .. anchor + horizon
    valid: Bool[Array, "b a l"]  # said by the target


def load_target(folder: Path, dtype=jnp.bfloat16) -> Flat:
    """The exported target as a training forward takes it: experts dequantised."""
    out: Flat = {}
    for name, value in (exported := store.read_export(folder, TARGET_STEM)).items():
        if name.endswith("_words"):
            stem = name.removesuffix("_words")
            out[stem] = dequantize(value, exported[f"{stem}_scales"], dtype)
        elif not name.endswith("_scales"):
            out[name] = value if name.endswith(forward.KEEP_WIDE) else value.astype(dtype)
    return out


def load_data(path: Path, least: int, held: int) -> tuple[Data, Data]:
    """(training, held-out) texts of one group."""
    texts = Texts.load(path)
    use = np.flatnonzero(texts.end - texts.prompt >= least)
    if len(use) <= held:
        raise ValueError(f"{path} has {len(use)} usable texts; {held} are to be held out")
    types = {"tokens": np.uint16, "prompt": np.int32, "end": np.int32, "greedy": bool}
    fields = [getattr(texts, name)[use].astype(dtype) for name, dtype in types.items()]
    train, rest = ([jnp.asarray(f[s]) for f in fields] for s in (slice(-held), slice(-held, None)))
    return Data(*train), Data(*rest)


def choose(key, data: Data, count: int, horizon: int) -> Blocks:
    """`count` random anchors of every text: said tokens whose next token was said too."""
    room = jnp.maximum(data.end - 1 - data.prompt, 0)[:, None]
    u = jax.random.uniform(key, (data.tokens.shape[0], count))
    anchors = data.prompt[:, None] + jnp.minimum((u * room).astype(jnp.int32), room - 1)
    anchors = jnp.maximum(anchors, 0)
    places = anchors[..., None] + jnp.arange(1, horizon + 1, dtype=jnp.int32)[None, None]
    last = data.tokens.shape[1] - 1
    labels = jax.vmap(lambda row, at: row[jnp.minimum(at, last)])(data.tokens, places)
    valid = (places < data.end[:, None, None]) & (room > 0)[..., None]
    return Blocks(anchors, labels.astype(jnp.int32), valid)


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


def attention(config: DFlashConfig, anchors: Int[Array, "b a"], keys, values):
    """Block attention over the context's `keys`, `values` [layers, b, t, kv, d] and own blocks."""
    batch, count = anchors.shape
    length, block = keys.shape[2], config.block_size
    kv, d = config.num_key_value_heads, config.head_dim

    @partial(jax.checkpoint, static_argnums=(5,))
    def attend(queries, own_keys, own_values, keys, values, layer):
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
        place = jnp.arange(block, dtype=jnp.int32)
        inside = block_visibility(config, layer, place, place, block=True)
        near = jnp.where(inside[None, None, None, :, None], near, -jnp.inf)
        top = lax.stop_gradient(jnp.maximum(far.max(-1), near.max(-1)))[..., None]
        far, near = jnp.exp(far - top), jnp.exp(near - top)
        total = far.sum(-1, keepdims=True) + near.sum(-1, keepdims=True)
        far, near = ((w / total).astype(queries.dtype) for w in (far, near))
        out = dot("bgaqik,bkgd->baqgid", far, values) + dot("bgaqik,bakgd->baqgid", near, own_v)
        return out.astype(queries.dtype).reshape(queries.shape)

    return lambda q, k, v, layer: attend(q, k, v, keys[layer], values[layer], layer)


def block_logits(
    config: DFlashConfig, weights: Flat, target: Flat, taps, tokens, anchors
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
    hidden = model(x, positions.reshape(-1, block), attention(config, anchors, keys, values))
    out = forward.logits(target, hidden[:, 1:])
    return out.reshape(*anchors.shape, block - 1, -1)


def taps_of(scale: Scale, target: Flat, tokens, implementation: str):
    ids = scale.drafter.target_layer_ids
    rows = forward.run(scale.trained, target, tokens, implementation, taps=ids)
    return lax.stop_gradient(rows.taps).reshape(*tokens.shape, len(ids), -1)


def accepted(scores, blocks: Blocks) -> tuple[Array, Array]:
    """Tokens a chain would commit, bonus counted, and whether all labels of a block are valid."""
    match = (scores.argmax(axis=-1) == blocks.labels) & blocks.valid
    return 1 + jnp.cumprod(match.astype(jnp.int32), axis=-1).sum(-1), blocks.valid.all(-1)


def loss(scale: Scale, recipe: Recipe, masters: Flat, target: Flat, taps, tokens, blocks: Blocks):
    dtype = jnp.dtype(recipe.dtype)
    weights = {n: v.astype(dtype) for n, v in masters.items()}
    scores = block_logits(scale.drafter, weights, target, taps, tokens, blocks.anchors)
    vocabulary = jnp.arange(scores.shape[-1], dtype=jnp.int32).reshape(1, 1, 1, -1)
    picked = jnp.where(blocks.labels[..., None] == vocabulary, scores, 0).sum(-1)
    nats = jax.nn.logsumexp(scores, axis=-1) - picked
    fall = jnp.exp(-jnp.arange(scores.shape[2], dtype=jnp.float32) / recipe.gamma)
    share = blocks.valid * fall[None, None]
    value = (nats * share).sum() / jnp.maximum(share.sum(), 1)
    taken, whole = accepted(scores, blocks)
    return value, (taken * whole).sum() / jnp.maximum(whole.sum(), 1)


def train_step(scale: Scale, recipe: Recipe, batch: int, target: Flat, data: Data, state):
    step, total = state["step"], state["total"]
    which, where = jax.random.split(jax.random.fold_in(jax.random.key(recipe.seed), step))
    rows = jax.random.randint(which, (batch,), 0, data.tokens.shape[0])
    part = Data(*(a[rows] for a in data))
    tokens = part.tokens.astype(jnp.int32)
    blocks = choose(where, part, recipe.anchors, scale.drafter.horizon)
    taps = taps_of(scale, target, tokens, recipe.attention)
    grad = jax.value_and_grad(partial(loss, scale, recipe), has_aux=True)
    (value, accept), grads = grad(state["params"], target, taps, tokens, blocks)
    params, moments, norm = recipe.optimizer.update(
        state["params"], grads, state["moments"], step, total
    )
    rate = recipe.optimizer.rate(step, total)
    metrics = {"loss": value, "accept": accept, "norm": norm, "rate": rate}
    return {"params": params, "moments": moments, "step": step + 1, "total": total}, metrics


@lru_cache
def chunk_step(scale: Scale, recipe: Recipe, batch: int):
    def steps(state, target, data):
        body = partial(train_step, scale, recipe, batch, target, data)
        return lax.scan(lambda s, _: body(s), state, None, length=recipe.chunk)

    return jax.jit(steps, donate_argnums=0)


def train(scale: Scale, recipe: Recipe, workdir: Path, source: Path, pace: Pace) -> bool:
    """Train or go on training on the texts in `source`; False if the deadline came first."""
    target = load_target(source, jnp.dtype(recipe.dtype))
    groups, held = {}, {}
    for name, count in (("short", recipe.held), ("long", recipe.held // 2)):
        groups[name], held[name] = load_data(source / f"sample_{name}.npz", recipe.least, count)
    checkpoints = store.Checkpoints(workdir / "drafter")
    log = store.Log(workdir / "drafter_log.jsonl")
    params = initialise(DFlash, scale.drafter, recipe.seed)
    state = {
        "params": params,
        "moments": recipe.optimizer.init(params),
        "step": jnp.int32(0),
        "total": jnp.int32(UNDECIDED),
    }
    if (found := checkpoints.restore(state)) is not None:
        state = found
        log.write(resumed=int(state["step"]), total=int(state["total"]))
    compiled = set()

    def group(step):
        turn = (step // recipe.chunk) % recipe.long_every
        return "long" if turn == recipe.long_every - 1 else "short"

    def work(state, step):
        data = groups[group(step)]
        compiled.add(group(step))
        batch = max(1, recipe.rows // data.tokens.shape[1])
        return chunk_step(scale, recipe, batch)(state, target, data)

    def save(state):
        checkpoints.save(int(state["step"]), state)
        half = {n: v.astype(jnp.bfloat16) for n, v in state["params"].items()}
        store.export(workdir, STEM, half)

    def report(step, total, took, metrics):
        m = jax.device_get(metrics)
        log.write(
            repeated=True, step=step, total=total, group=group(step - recipe.chunk),
            loss=m["loss"].mean(), accept=m["accept"].mean(), norm=m["norm"].mean(),
            lr=m["rate"][-1],
            tok_s=round(recipe.chunk * recipe.rows / took),
        )  # fmt: skip

    state, done = drive(
        state, work, save, report, pace, recipe.chunk,
        lambda step, total: group(step) not in compiled,
    )  # fmt: skip
    checkpoints.close()
    log.write(finished=done, step=int(state["step"]), total=int(state["total"]))
    if done:
        log.write(accept_length=evaluate(scale, recipe, state["params"], target, held))
    return done


def evaluate(scale: Scale, recipe: Recipe, masters: Flat, target: Flat, held: dict[str, Data]):
    """Mean accept length of a chain (bonus counted) at random anchors of held-out texts,
    teacher-forced: leading rows whose argmax is the token said, plus one."""
    dtype = jnp.dtype(recipe.dtype)

    @jax.jit
    def measure(masters, target, part, key):
        tokens = part.tokens.astype(jnp.int32)
        blocks = choose(key, part, recipe.anchors, scale.drafter.horizon)
        taps = taps_of(scale, target, tokens, recipe.attention)
        weights = {n: v.astype(jnp.bfloat16).astype(dtype) for n, v in masters.items()}
        scores = block_logits(scale.drafter, weights, target, taps, tokens, blocks.anchors)
        taken, whole = accepted(scores, blocks)
        kinds = jnp.stack([part.greedy, ~part.greedy]).astype(jnp.float32)
        return kinds @ (taken * whole).sum(1), kinds @ whole.sum(1)

    out = {}
    for name, data in held.items():
        batch = min(max(1, recipe.rows // data.tokens.shape[1]), data.tokens.shape[0])
        sums = np.zeros((2, 2))
        for start in range(0, data.tokens.shape[0] - batch + 1, batch):
            part = Data(*(a[start : start + batch] for a in data))
            key = jax.random.fold_in(jax.random.key(recipe.seed + 1), start)
            sums += np.stack(jax.device_get(measure(masters, target, part, key)))
        for kind, total, blocks in zip(("greedy", "sampled"), sums[0], sums[1], strict=True):
            out[f"{name}_{kind}"] = total / max(blocks, 1)
    return out
