"""The router's choice: sigmoid scores, a bias for selection only, the best k, their weights.

`choose_reference` defines it. On a GPU XLA makes five launches of it after the logits;
`choose_kernel` makes one, a block a row. Any NaN logit makes weights of its row NaN on either path:
the row's output is NaN, and its request ends with the error flag.
"""

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

_LANES = 128


def choose(
    logits: Float[Array, "m e"],
    bias: Float[Array, " e"],
    valid: Bool[Array, " m"],
    k: int,
    normalize: bool,
    factor: float,
) -> tuple[Int[Array, "m k"], Float[Array, "m k"]]:
    """`choose_reference` on the platform at hand."""
    how = k, normalize, factor
    # Large batches are not waiting for launches, and the kernel does nothing fast but start.
    small = logits.shape[1] % _LANES == 0 and logits.shape[0] <= 256
    fits = small and logits.dtype == jnp.float32
    return lax.platform_dependent(
        logits, bias, valid,
        cuda=lambda *a: (choose_kernel if fits else choose_reference)(*a, *how),
        default=lambda *a: choose_reference(*a, *how),
    )  # fmt: skip


def choose_reference(
    logits: Float[Array, "m e"],
    bias: Float[Array, " e"],
    valid: Bool[Array, " m"],
    k: int,
    normalize: bool,
    factor: float,
) -> tuple[Int[Array, "m k"], Float[Array, "m k"]]:
    """Expert ids, best first (ties: the lower id), and weights; rows not valid get id e."""
    broken = jnp.isnan(logits).any(axis=-1, keepdims=True)  # or top_k passes a NaN over in silence
    scores = jax.nn.sigmoid(logits)
    _, ids = lax.top_k(scores + bias.astype(scores.dtype)[None], k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    weights = jnp.where(broken, jnp.nan, weights * factor)
    return jnp.where(valid[:, None], ids, logits.shape[1]), weights


@partial(jax.jit, static_argnames=("k", "normalize", "factor", "interpret"))  # once for all layers
def choose_kernel(
    logits: Float[Array, "m e"],
    bias: Float[Array, " e"],
    valid: Bool[Array, " m"],
    k: int,
    normalize: bool,
    factor: float,
    *,
    interpret=None,
) -> tuple[Int32[Array, "m k"], Float[Array, "m k"]]:
    """As the reference, for float32 logits of a multiple of 128 experts."""
    m, experts = logits.shape
    if experts % _LANES or logits.dtype != jnp.float32:
        raise ValueError(f"logits {logits.dtype}{logits.shape}: must be float32, multiples of 128")

    def body(logits_g, bias_g, valid_g, ids_g, weights_g, scores_s):
        row = lax.axis_index("row")
        layout = plgpu.Layout.WG_STRIDED((experts,), 1)
        scores = 1 / (1 + jnp.exp(-plgpu.load(logits_g.at[row], layout=layout)))
        scores_s[...] = scores
        left = scores + plgpu.load(bias_g, layout=layout)
        left = jnp.where(left != left, jnp.inf, left)
        # Ids as floats, negative: the largest of them is the lowest id.
        index = -plgpu.broadcasted_iota(jnp.int32, (experts,), 0, layout=layout).astype(jnp.float32)
        chosen, total = [], jnp.float32(0)
        for _ in range(k):
            best = jnp.max(left)
            lowest = jnp.max(jnp.where(left == best, index, -jnp.inf))
            left = jnp.where(index == lowest, -jnp.inf, left)
            expert = (-lowest).astype(jnp.int32)
            score = scores_s[expert]
            chosen.append((expert, score))
            total = total + score
        scale = factor / (total + 1e-20) if normalize else factor
        for j, (expert, score) in enumerate(chosen):
            ids_g[row, j] = jnp.where(valid_g[row] != 0, expert, experts)
            weights_g[row, j] = score * scale

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((m, k), jnp.int32),
            jax.ShapeDtypeStruct((m, k), jnp.float32),
        ),
        scratch_types=(plgpu.SMEM((experts,), jnp.float32),),
        grid=(m,),
        grid_names=("row",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(logits, bias.astype(jnp.float32), valid.astype(jnp.int32))
