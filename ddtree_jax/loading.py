"""A model as users hold it, and how it is loaded from published folders."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ddtree_jax.checkpoint import load_drafter, load_target
from ddtree_jax.checks import show
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.processes import check_agreement
from ddtree_jax.sharding import check_mesh, make_plan, placed_leaves
from ddtree_jax.state import Weights
from ddtree_jax.tokenizer import RANKS, Tokenizer

BUNDLED = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Model:
    """Weights, tokenizer and configs of a target and (perhaps) its drafter."""

    weights: Weights
    tokenizer: Tokenizer | None
    name: str

    @property
    def config(self) -> KimiConfig:
        return self.weights.config

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The config's, and the tokenizer's own: published configs name only one of Kimi's two."""
        own = () if self.tokenizer is None else self.tokenizer.eos_ids
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *own)))

    @property
    def drafter_config(self) -> DFlashConfig | None:
        return self.weights.drafter_config


def load(
    path: str | Path = "kimi-nano",
    drafter: str | Path | None = None,
    mesh: Mesh | None = None,
    plan: str = "expert",
    dtype: str | None = None,
) -> Model:
    """Load a target and its drafter from published folders.

    `path` is a bundled name or a folder with `config.json`, safetensors and `tiktoken.model`; the
    drafter is looked for in `path/dflash` unless `drafter` names its folder. `dtype` is float32 or
    bfloat16 (default: float32 on CPU, bfloat16 elsewhere). With a `mesh` the weights are split over
    its devices by `plan`: "expert" and "tensor" have whole experts or a part of each on every
    device and split all heads, "data" has whole experts and splits requests (docs/distributed.md).

    Raises FileNotFoundError or ValueError naming the file or field that is wrong.
    """
    if isinstance(mesh, AbstractMesh):  # enough to lower a program, but not to hold weights
        raise ValueError(f"mesh={show(mesh)}: must be a jax.sharding.Mesh of devices")
    wanted, plan = plan, make_plan(plan, mesh)
    if mesh is None and wanted != "expert":
        raise ValueError(
            f"plan={wanted!r}: without a mesh (on the command line --devices) only the default "
            "'expert' is accepted"
        )
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: must be float32 or bfloat16")
    names = sorted(p.name for p in BUNDLED.iterdir() if p.is_dir())
    folder = BUNDLED / str(path) if str(path) in names else Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no model {str(path)!r}: neither a folder nor bundled ({', '.join(names)})"
        )
    # The kernel that reads records takes bf16 rows; elsewhere experts stay as published.
    records = dtype == "bfloat16" and jax.default_backend() == "gpu"

    drafts = drafter is not None or os.path.lexists(folder / "dflash")

    def place(config):  # before a weight of it is read
        fields = {f"{type(config).__name__}.{name}": v for name, v in vars(config).items()}
        where = [d.id for d in plan.mesh.devices.flat]  # the same device has one id on all
        check_agreement(**fields, drafter=drafts, plan=plan.name, dtype=dtype, mesh=where)
        check_mesh(plan.mesh)
        return placed_leaves(plan, config, dtype)

    placed = None if mesh is None else place
    config, target = load_target(folder, dtype, records, placed)
    drafter_config, leaves = None, None
    if drafts:
        where = folder / "dflash" if drafter is None else Path(drafter)
        drafter_config, leaves = load_drafter(where, dtype, config, placed)
    tokenizer = Tokenizer(folder)
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(
            f"{folder / RANKS}: ranks and special tokens are {tokenizer.vocab_size}, must be "
            f"vocab_size={config.vocab_size}"
        )
    if mesh is not None:  # once more when all is read: an error of any has been told until here
        ranks = hashlib.sha256((folder / RANKS).read_bytes()).hexdigest()
        check_agreement(**{RANKS: ranks})
    weights = Weights(target, leaves, config, drafter_config, str(jnp.dtype(dtype)), plan)
    return Model(weights, tokenizer, folder.resolve().name)
