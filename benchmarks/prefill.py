"""Attention of one Kimi K2.6 layer in prefill, plain and flash, from 1k to 32k tokens.

    python -m benchmarks.prefill

A time is that of the whole attention block of one prompt: projections, keys and values of 64
heads, causal softmax, output projection. Operations are those the mask leaves.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import ceilings, results_file
from ddtree_jax.config import KimiConfig
from ddtree_jax.model import attention

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
LAYER = KimiConfig(
    vocab_size=64, hidden_size=7168, num_hidden_layers=1, num_attention_heads=64,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    intermediate_size=64, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=1,
    n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.0, norm_topk_prob=True,
    rms_norm_eps=1e-5, rope_theta=50000.0, max_position_embeddings=262144,
)  # fmt: skip
NOTES = [
    "one attention block of Kimi K2.6, random bf16 weights, one prompt",
    "tflops: operations of the projections and of the causal half of attention, over the time",
    "temporary: bytes XLA sets aside for the call",
]


def operations(config: KimiConfig, t: int) -> float:
    c, heads = config, config.num_attention_heads
    key, value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    weights = (
        c.hidden_size * (c.q_lora_rank + c.latent_size)
        + c.q_lora_rank * heads * key
        + c.kv_lora_rank * heads * (c.qk_nope_head_dim + value)
        + heads * value * c.hidden_size
    )
    return 2.0 * t * weights + heads * (key + value) * t * (t + 1.0)


def compile_block(mla: attention.MLA, t: int, flash: bool):
    """The block over [t, hidden], with or without flash attention."""
    graph, params = nnx.split(mla)

    def block(params, x):
        positions = jnp.arange(t, dtype=jnp.int32)
        return attention.expanded_attention(nnx.merge(graph, params), x, positions, 0, flash)

    x = jax.ShapeDtypeStruct((t, LAYER.hidden_size), jnp.bfloat16)
    return partial(jax.jit(block).lower(params, x).compile(), params)


def forms(t: int) -> tuple[bool, ...]:
    """Plain, and flash where it would be taken: nothing is measured under another's name."""
    c, shape = LAYER, (t, LAYER.num_attention_heads)
    query = jax.ShapeDtypeStruct((*shape, c.qk_nope_head_dim + c.qk_rope_head_dim), jnp.bfloat16)
    value = jax.ShapeDtypeStruct((*shape, c.v_head_dim), jnp.bfloat16)
    return (False, True) if attention.flash_serves(query, value) else (False,)


def measure(mla: attention.MLA, t: int, flash: bool, samples: int) -> dict:
    run = compile_block(mla, t, flash)
    x = jax.random.normal(jax.random.key(t), (t, LAYER.hidden_size), jnp.bfloat16)
    out, seconds = jax.block_until_ready(run(x))[0], []
    for _ in range(samples):
        began = time.perf_counter()
        jax.block_until_ready(run(x))
        seconds.append(time.perf_counter() - began)
    us = statistics.median(seconds) * 1e6
    return {
        "tokens": t,
        "flash": flash,
        "us": us,
        "us_per_token": us / t,
        "tflops": operations(LAYER, t) / us / 1e6,
        "temporary": run.func.memory_analysis().temp_size_in_bytes,
        "norm": float(jnp.linalg.norm(out.astype(jnp.float32))),
    }


def summarise(points: list[dict]) -> dict[str, float]:
    us = {(p["tokens"], p["flash"]): p["us"] for p in points}
    gained = {f"plain_over_flash_{t}": us[t, False] / us[t, True] for t, flash in us if flash}
    return gained | {
        f"share_{p['tokens']}": p["tflops"] * 1e12 / ceilings.MATMUL for p in points if p["flash"]
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "prefill.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--samples", type=int, default=5)
    options = parser.parse_args(arguments)
    before = ceilings.measure()
    mla = attention.MLA(LAYER, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    points = []
    for t in options.tokens:
        for flash in forms(t):
            points.append(measure(mla, t, flash, options.samples))
            print({k: round(v, 3) for k, v in points[-1].items()}, flush=True)
    kept = {"ceilings_before": before, "ceilings_after": ceilings.measure()}
    results_file.write(options.output, summarise(points), points, NOTES, kept)


if __name__ == "__main__":
    main()
