"""The layers everything is made of: a bias-free linear map, RMS normalisation, MLP, both ends."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


def matmul(x: Float[Array, "*rows i"], weight: Float[Array, "o i"]) -> Float[Array, "*rows o"]:
    """x times the transpose of a weight in the published orientation [out, in].

    Float32 stays float32 on every device (no tf32): exactness tests compare batch shapes with it.
    """
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision(x.dtype))


def precision(dtype) -> lax.Precision | None:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


class Linear(nnx.Module):
    """y = x W^T without bias; `weight` is [out, in] as published."""

    def __init__(self, size_in: int, size_out: int, *, rngs: nnx.Rngs, dtype, gain: float = 1.0):
        scale = gain * size_in**-0.5
        values = jax.random.normal(rngs.params(), (size_out, size_in), jnp.float32) * scale
        self.weight = nnx.Param(values.astype(dtype))

    def __call__(self, x):
        return matmul(x, self.weight[...])


class Head(Linear):
    """Logits as they are summed, in float32 or wider: rounded to bf16, whose steps are 1/16 from 8
    on and 1/8 from 16 on, the best two of a row would often be equal."""

    def __call__(self, x):
        weight, wide = self.weight[...], jnp.promote_types(x.dtype, jnp.float32)
        return jnp.einsum(
            "...i,oi->...o", x, weight, precision=precision(x.dtype), preferred_element_type=wide
        )


class RMSNorm(nnx.Module):
    """x / rms(x) * weight in the weight's dtype, the mean in float32 or wider."""

    def __init__(self, size: int, eps: float, *, dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(size, dtype))

    def __call__(self, x):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return weight * (wide * scale).astype(weight.dtype)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, size: int, width: int, *, rngs: nnx.Rngs, dtype, gain: float = 1.0):
        self.gate_proj = Linear(size, width, rngs=rngs, dtype=dtype)
        self.up_proj = Linear(size, width, rngs=rngs, dtype=dtype)
        self.down_proj = Linear(width, size, rngs=rngs, dtype=dtype, gain=gain)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Embedding(nnx.Module):
    """Rows of `weight` [vocabulary, hidden] by token id."""

    def __init__(self, vocab_size: int, size: int, *, rngs: nnx.Rngs, dtype):
        values = jax.random.normal(rngs.params(), (vocab_size, size), jnp.float32)
        self.weight = nnx.Param(values.astype(dtype))

    def __call__(self, tokens):
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")
