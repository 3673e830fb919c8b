"""Exports to the published layout: python -m ddtree_jax.train.publish WORKDIR MODEL_DIR

Writes the target into MODEL_DIR and, if WORKDIR has one, the drafter into MODEL_DIR/dflash. The
tokenizer's ranks, MODEL_DIR/tiktoken.model, are left alone. With --back the other way, to train on
from a published model.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes

from ddtree_jax import checkpoint
from ddtree_jax.train import nano, store
from ddtree_jax.train.params import host
from ddtree_jax.write_config import published_config, published_drafter_config

DRAFTER = "dflash"  # folder of the drafter in the target's


def publish(workdir: Path, folder: Path, scale: nano.Scale = nano.NANO) -> None:
    config = scale.target
    leaves = _leaves(config, workdir, store.TARGET)
    _clear(folder)
    checkpoint.save_target(folder, config, published_config(config), leaves)
    if not any(workdir.glob(f"{store.DRAFTER}*.safetensors")):
        return
    config = scale.drafter
    leaves = _leaves(config, workdir, store.DRAFTER)
    fields = published_drafter_config(
        config, max_position_embeddings=scale.target.max_position_embeddings
    )
    _clear(folder / DRAFTER)
    checkpoint.save_drafter(folder / DRAFTER, config, fields, leaves)


def unpublish(folder: Path, workdir: Path) -> None:
    """The exports that `publish` would make this published model of."""
    config, leaves = checkpoint.load_target(folder, jnp.bfloat16)
    _export(workdir, store.TARGET, config, leaves)
    if (folder / DRAFTER).is_dir():
        config, leaves = checkpoint.load_drafter(folder / DRAFTER, jnp.bfloat16, config)
        _export(workdir, store.DRAFTER, config, leaves)


def _export(workdir: Path, stem: str, config, leaves: checkpoint.Leaves) -> None:
    names = checkpoint.leaves_by_path(config, jnp.bfloat16)
    store.export(workdir, stem, dict(zip(names, leaves, strict=True)))


def _leaves(config, workdir: Path, stem: str) -> checkpoint.Leaves:
    tensors = host(store.read_export(workdir, stem))
    return checkpoint.leaves_from_internal(config, tensors, ml_dtypes.bfloat16)


def _clear(folder: Path) -> None:
    """Remove shards of an earlier call, of which there may have been more."""
    for path in folder.glob("model*.safetensors"):
        path.unlink()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workdir", type=Path)
    parser.add_argument("folder", type=Path, metavar="model_dir")
    parser.add_argument("--back", action="store_true", help="make exports of a published model")
    args = parser.parse_args(argv)
    if args.back:
        args.workdir.mkdir(parents=True, exist_ok=True)
        unpublish(args.folder, args.workdir)
        return 0
    publish(args.workdir, args.folder)
    total = 0
    for path in sorted(p for p in args.folder.rglob("*") if p.is_file()):
        total += path.stat().st_size
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.relative_to(args.folder)}")
    print(f"{total / 1e6:6.2f} MB in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
