"""Kimi K2.6 in JAX, decoded with DFlash drafts verified as DDTree trees, losslessly."""

from ddtree_jax._version import __version__
from ddtree_jax.config import DFlashConfig, KimiConfig, Sampling, Speculation
from ddtree_jax.generate import Completion, generate, stream
from ddtree_jax.loading import Model, load
from ddtree_jax.prefill import prefill
from ddtree_jax.state import DecodeState, Weights
from ddtree_jax.step import autoregressive_step, ddtree_step, dflash_step
from ddtree_jax.tree import Tree

__all__ = [
    "Completion",
    "DFlashConfig",
    "DecodeState",
    "KimiConfig",
    "Model",
    "Sampling",
    "Speculation",
    "Tree",
    "Weights",
    "__version__",
    "autoregressive_step",
    "ddtree_step",
    "dflash_step",
    "generate",
    "load",
    "prefill",
    "stream",
]
