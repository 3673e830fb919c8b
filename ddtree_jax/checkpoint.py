"""Published checkpoints <-> flat leaves of our modules, in the order of `jax.tree.leaves`.

Every leaf is made of rows of published tensors, and most of them are one published tensor under
its own name. The exceptions are all in `_target_pieces`: routed experts are stacked over layers
and experts, `kv_b_proj` is kept as two halves, and rows that RoPE turns are put from the published
order (pairs are neighbours) into half-split order (`model.rope`).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.fill import RECORDS, Piece, fill
from ddtree_jax.model.dflash import dflash_graph
from ddtree_jax.model.kimi import kimi_graph
from ddtree_jax.pallas.expert_weights import GROUP
from ddtree_jax.read_config import read_drafter_config, read_target_config
from ddtree_jax.shards import CONFIG, SHARD_BYTES, Shards, Tensor, read_json, write

Leaves = tuple[jax.Array, ...]

_PREFIX = "language_model."  # of text keys in checkpoints with a vision tower
_SKIPPED = re.compile(r"^(vision_tower|mm_projector)\.|\.rotary_emb\.inv_freq$")
Placed = Callable[[Any], Mapping[str, jax.ShapeDtypeStruct]]  # of a config: every leaf's place


def load_target(
    folder: str | Path, dtype, records: bool = False, placed: Placed | None = None
) -> tuple[KimiConfig, Leaves]:
    """Read a Kimi checkpoint; weights become `dtype`, but for INT4 experts and the router's bias.

    `records`: INT4 experts are packed for the Hopper kernel, where their sizes fit it; such a
    target cannot be saved. `placed` says where leaves go, and how they are padded (default: to the
    default device). FileNotFoundError or ValueError names what is missing, unexpected, or
    unlike the config.
    """
    config = _read_config(folder, read_target_config)
    config = replace(config, expert_records=records and config.fits_records)
    shards = Shards(folder)
    prefix = _PREFIX if any(key.startswith(_PREFIX) for key in shards.names) else ""
    places = None if placed is None else placed(config)
    wanted = leaves_by_path(config, dtype)
    return config, _load(shards, wanted, _target_pieces(config, prefix), places)


def load_drafter(
    folder: str | Path, dtype, target_config: KimiConfig, placed: Placed | None = None
) -> tuple[DFlashConfig, Leaves]:
    """Read a DFlash drafter that fits the target; raises as `load_target`."""
    config = _read_config(folder, read_drafter_config)
    config.check_target(target_config)
    places = None if placed is None else placed(config)
    wanted = leaves_by_path(config, dtype)
    return config, _load(Shards(folder), wanted, _drafter_pieces(config), places)


def save_target(
    folder: str | Path,
    config: KimiConfig,
    published: Mapping[str, Any],
    leaves: Leaves,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a target as K2.6 is published: shards and index, weights bf16, the bias float32.

    `published` becomes `config.json` and must describe `config`; keys carry `language_model.` if it
    has a `text_config`. Weights of a wider dtype are rounded to bf16.
    """
    if config.expert_records:
        raise ValueError("expert_records=True: load the target without records to save it")
    if read_target_config(published) != config:
        raise ValueError("the published config does not describe the target's config")
    prefix = _PREFIX if "text_config" in published else ""
    pieces = _target_pieces(config, prefix)
    _save(folder, published, config, pieces, leaves, shard_bytes, single=False)


def save_drafter(
    folder: str | Path,
    config: DFlashConfig,
    published: Mapping[str, Any],
    leaves: Leaves,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a drafter as published, in bf16: one file where `shard_bytes` allows."""
    if read_drafter_config(published) != config:
        raise ValueError("the published config does not describe the drafter's config")
    pieces = _drafter_pieces(config)
    _save(folder, published, config, pieces, leaves, shard_bytes, single=True)


def leaves_by_path(config: KimiConfig | DFlashConfig, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every leaf, in order, by module path: `layers/0/mlp/up_proj/weight`."""
    graph = kimi_graph if isinstance(config, KimiConfig) else dflash_graph
    _, abstract = graph(config, jnp.dtype(dtype))
    named = jax.tree_util.tree_leaves_with_path(abstract)
    name = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path).removesuffix("/value"): leaf for path, leaf in named}


def leaves_from_internal(
    config: KimiConfig | DFlashConfig, tensors: Mapping[str, np.ndarray], dtype
) -> Leaves:
    """Leaves out of arrays named by module path (what training exports), floats as `dtype`."""
    wanted = leaves_by_path(config, dtype)
    _check_keys(set(tensors), set(wanted))
    for path, leaf in wanted.items():
        if tensors[path].shape != leaf.shape:
            raise ValueError(f"{path}: shape {tensors[path].shape}, must be {leaf.shape}")
        floats = (jnp.issubdtype(a.dtype, jnp.floating) for a in (tensors[path], leaf))
        if len(set(floats)) == 2:
            raise ValueError(f"{path}: dtype {tensors[path].dtype}, must convert to {leaf.dtype}")
    return tuple(jnp.asarray(tensors[path], leaf.dtype) for path, leaf in wanted.items())


def _read_config(folder: str | Path, read: Callable[[Any], Any]):
    """What `read` makes of the folder's `config.json`; its ValueErrors name the file."""
    published = read_json(folder, CONFIG)
    try:
        return read(published)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{Path(folder) / CONFIG}: {error}") from error


def _target_pieces(config: KimiConfig, prefix: str) -> list[Piece]:
    rows = _special_rows(config)
    pieces = []
    for path, leaf in leaves_by_path(config, jnp.bfloat16).items():
        stack, _, name = path.partition("/")
        if stack == "experts":
            pieces += _expert_pieces(config, prefix, path, name, leaf.shape)
            continue
        *parents, owner, name = path.split("/")
        if name in ("kv_b_key", "kv_b_value"):
            parents, owner, special = [*parents, owner], "kv_b_proj", rows[name]
        else:
            special = rows.get(owner)
        shape = leaf.shape
        if owner == "kv_b_proj":
            heads, sizes = config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim
            shape, name = (heads * sizes, config.kv_lora_rank), "weight"
        words = [*parents, owner, name] if owner == "lm_head" else ["model", *parents, owner, name]
        pieces.append(Piece(prefix + ".".join(words), shape, path, rows=special))
    return pieces


def _expert_pieces(
    config: KimiConfig, prefix: str, path: str, name: str, shape: tuple[int, ...]
) -> Iterator[Piece]:
    """The tensors of one stacked leaf [moe layers, experts, out, ..]: `gate`, `gate_words`, .."""
    if name in RECORDS:
        hidden, width = config.hidden_size, config.moe_intermediate_size
        for part in RECORDS[name]:
            out, inner = (hidden, width) if part == "down" else (width, hidden)
            for kind, size in (("words", inner // 8), ("scales", inner // GROUP)):
                stack = (*shape[:2], out, size)
                yield from _expert_pieces(config, prefix, path, f"{part}_{kind}", stack)
        return
    projection, _, part = name.partition("_")
    suffix = {"": "weight", "words": "weight_packed", "scales": "weight_scale"}[part]
    for layer, expert in np.ndindex(shape[:2]):
        base = (
            f"{prefix}model.layers.{config.first_k_dense_replace + layer}.mlp.experts.{expert}"
            f".{projection}_proj."
        )
        yield Piece(base + suffix, shape[2:], path, (layer, expert))
        if part == "words":
            unpacked = (shape[2], shape[3] * 8)
            yield Piece(base + "weight_shape", (2,), "", value=unpacked)


def _special_rows(config: KimiConfig) -> dict[str, np.ndarray]:
    """Published row numbers, in our order, of the projections whose rows are not kept in place."""
    c, heads = config, config.num_attention_heads
    halves = np.r_[0 : c.qk_rope_head_dim : 2, 1 : c.qk_rope_head_dim : 2]
    query = np.r_[0 : c.qk_nope_head_dim, c.qk_nope_head_dim + halves]
    queries = (np.arange(heads)[:, None] * query.size + query).reshape(-1)
    pair = np.arange(heads * (c.qk_nope_head_dim + c.v_head_dim)).reshape(heads, -1)
    return {
        "q_proj": queries,
        "q_b_proj": queries,
        "kv_a_proj_with_mqa": np.r_[0 : c.kv_lora_rank, c.kv_lora_rank + halves],
        "kv_b_key": pair[:, : c.qk_nope_head_dim].reshape(-1),
        "kv_b_value": pair[:, c.qk_nope_head_dim :].reshape(-1),
    }


def _drafter_pieces(config: DFlashConfig) -> list[Piece]:
    leaves = leaves_by_path(config, jnp.bfloat16)
    return [Piece(path.replace("/", "."), leaf.shape, path) for path, leaf in leaves.items()]


def _load(shards: Shards, wanted: Mapping[str, Any], pieces: list[Piece], placed) -> Leaves:
    """Fill one leaf at a time from its pieces, after every header has been checked."""
    found = {key for key in shards.names if not _SKIPPED.search(key)}
    _check_keys(found, {piece.key for piece in pieces})
    of_leaf: dict[str, list[Piece]] = {path: [] for path in wanted}
    for piece in pieces:
        shards.check(piece.key, piece.shape, piece.dtypes[1])
        if piece.path:
            of_leaf[piece.path].append(piece)
        elif tuple(said := shards.read(piece.key).tolist()) != piece.value:
            raise ValueError(f"{piece.key}: says {said}, the config wants {list(piece.value)}")

    return tuple(
        fill(shards, wanted[path], of_leaf[path], None if placed is None else placed[path])
        for path in wanted
    )


def _save(folder, published, config, pieces, leaves, shard_bytes, single) -> None:
    wanted = leaves_by_path(config, jnp.bfloat16)
    if len(leaves) != len(wanted):
        raise ValueError(f"{len(leaves)} leaves, must be {len(wanted)}")
    held = {path: np.asarray(leaf) for path, leaf in zip(wanted, leaves, strict=True)}
    for path, leaf in wanted.items():
        if held[path].shape != leaf.shape:
            raise ValueError(f"{path}: shape {held[path].shape}, must be {leaf.shape}")
    of_key: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda p: re.sub(r"\d+", lambda n: n[0].zfill(6), p.key)):
        of_key.setdefault(piece.key, []).append(piece)

    def values(key: str) -> np.ndarray:
        first, dtype = of_key[key][0], of_key[key][0].dtypes[0]
        if first.value:
            return np.asarray(first.value, dtype)
        if first.rows is None:
            return held[first.path][first.index].astype(dtype)
        tensor = np.empty(first.shape, dtype)
        for piece in of_key[key]:
            tensor[piece.rows] = held[piece.path].reshape(-1, first.shape[-1])
        return tensor

    tensors = (Tensor(k, p[0].shape, np.dtype(p[0].dtypes[0])) for k, p in of_key.items())
    write(folder, dict(published), tensors, values, shard_bytes, single)


def _check_keys(found: set[str], wanted: set[str]) -> None:
    """Raise ValueError naming the first few tensors that are missing or that nobody asked for."""
    for keys, what in ((wanted - found, "missing"), (found - wanted, "unexpected")):
        if keys:
            some = ", ".join(sorted(keys)[:4]) + (", ..." if len(keys) > 4 else "")
            raise ValueError(f"{len(keys)} of {len(wanted)} tensors {what}: {some}")
