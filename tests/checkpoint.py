"""A small random checkpoint on disk: INT4 experts, a drafter, a rank file of its vocabulary."""

import base64
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from tiny import DRAFTER, TARGET, draw_int4

from ddtree_jax.checkpoint import save_drafter, save_target
from ddtree_jax.model.dflash import DFlash
from ddtree_jax.model.kimi import Kimi
from ddtree_jax.tokenizer import RANKS, SPECIAL_TOKENS
from ddtree_jax.write_config import published_config, published_drafter_config

MERGES = [b"th", b"the", b" the", b"in", b"ing", b"\xe4\xbd", b"  ", b"    "]
TOKENS = [bytes([i]) for i in range(256)] + MERGES
VOCAB = len(TOKENS) + SPECIAL_TOKENS
SMALL_TARGET = replace(
    TARGET, vocab_size=VOCAB, hidden_size=64, expert_bits=4, max_position_embeddings=256
)
SMALL_DRAFTER = replace(
    DRAFTER, vocab_size=VOCAB, hidden_size=64, mask_token_id=VOCAB - 2, block_size=6
)


def write_checkpoint(folder: Path, **changes) -> Path:
    """Target in shards, `dflash/` and `tiktoken.model` in `folder`, as published.

    `changes` are fields of the target.
    """
    config = replace(SMALL_TARGET, **changes)
    target = Kimi(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    draw_int4(target.experts, 0)
    drafter = DFlash(SMALL_DRAFTER, rngs=nnx.Rngs(1), dtype=jnp.bfloat16)
    leaves = [tuple(jax.tree.leaves(nnx.state(m))) for m in (target, drafter)]
    save_target(folder, config, published_config(config), leaves[0], shard_bytes=120_000)
    save_drafter(
        folder / "dflash", SMALL_DRAFTER, published_drafter_config(SMALL_DRAFTER), leaves[1]
    )
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(TOKENS)]
    (folder / RANKS).write_bytes(b"".join(lines))
    return folder
