"""Parameters as a flat dictionary, by path in the module ("layers/0/mlp/gate_proj/weight").

Everything in training is such a dictionary: the optimiser tells matrices by name, checkpoints
and exports store names, and `leaves` gives the order in which a module is put together.
"""

import jax
import numpy as np
from flax import nnx

from ddtree_jax.model.dflash import DFlash
from ddtree_jax.model.kimi import Kimi

Flat = dict[str, jax.Array]


def flatten(state) -> Flat:
    """Leaves of an nnx.State by path."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(state)
    return {_name(path): leaf for path, leaf in pairs}


def _name(path) -> str:
    keys = (str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
    return "/".join(k for k in keys if k != "value")


def leaves(weights: Flat) -> tuple[jax.Array, ...]:
    """Flat leaves in the order of the module's tree; dictionaries may have been re-sorted."""
    return tuple(weights[name] for name in sorted(weights, key=_order))


def _order(name: str) -> tuple:
    # As nnx orders its state: keys of one level sorted, integers as integers.
    return tuple((0, int(k), "") if k.isdigit() else (1, 0, k) for k in name.split("/"))


def initialise(kind: type[Kimi] | type[DFlash], config, seed: int) -> Flat:
    """Float32 parameters of a fresh module, made on the default device."""

    @jax.jit
    def make():
        return nnx.split(kind(config, rngs=nnx.Rngs(seed)))[1]

    return flatten(make())


def host(weights: Flat) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in jax.device_get(weights).items()}
