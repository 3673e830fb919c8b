"""What the card can do at this moment: reading memory, multiplying in bf16."""

import time

import jax
import jax.numpy as jnp

READ = 4.49e12  # bytes/s and
MATMUL = 785e12  # operations/s of the H200: shares of a limit use these everywhere


def measure(read_bytes: int = 4 << 30, size: int = 8192, bursts: int = 10) -> dict[str, float]:
    """`read_tb_s`, `matmul_tflops`, best of ten bursts; below 770 on an H200 means: rerun."""
    data = jax.random.bits(jax.random.key(0), (read_bytes // 4,), jnp.uint32)
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in (1, 2))
    fold = jax.jit(lambda d: jnp.bitwise_xor.reduce(d.reshape(-1, 4096), axis=1))
    read = _best(fold, bursts, data)
    product = _best(jax.jit(jnp.matmul), bursts, a, b)
    return {"read_tb_s": read_bytes / read / 1e12, "matmul_tflops": 2 * size**3 / product / 1e12}


def _best(fn, bursts: int, *args) -> float:
    """Seconds of a call: the best mean of `bursts` bursts of five."""
    jax.block_until_ready(fn(*args))
    seconds = []
    for _ in range(bursts):
        start = time.perf_counter()
        for _ in range(5):
            last = fn(*args)
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - start) / 5)
    return min(seconds)
