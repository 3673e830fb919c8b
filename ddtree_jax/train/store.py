"""What training leaves on disk: Orbax checkpoints, safetensors exports, a log of JSON lines."""

import json
import tarfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from safetensors import safe_open
from safetensors.flax import save_file

from ddtree_jax.pallas.expert_weights import dequantize
from ddtree_jax.train.forward import KEEP_WIDE, pack, quantize
from ddtree_jax.train.params import Flat

TARGET, DRAFTER = "nano_target", "nano_drafter"  # stems of the exports
SHARD_BYTES = 14 * 2**20
TAR_BYTES = 15 * 2**20  # of the compilation cache in one archive


class Checkpoints:
    """The newest two states of a run, in `folder`; a state is a tree of arrays."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self._manager = ocp.CheckpointManager(Path(folder).absolute(), options=options)

    def save(self, step: int, state) -> None:
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(state))
            self._manager.wait_until_finished()

    def restore(self, like):
        """The newest state, in the shapes and types of `like`; None if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like
        )
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        self._manager.close()


def published(masters: Flat) -> Flat:
    """Weights as exported: experts INT4, the rest bf16, the selection bias float32."""
    out: Flat = {}
    for name, value in masters.items():
        if name.startswith("experts/"):
            values, scales = quantize(value)
            out[f"{name}_words"], out[f"{name}_scales"] = pack(values), scales
        else:
            out[name] = value if name.endswith(KEEP_WIDE) else value.astype(jnp.bfloat16)
    return out


def export(folder: Path, stem: str, weights: Flat) -> list[Path]:
    """Write weights as `stem.safetensors`, or as shards of at most SHARD_BYTES; the files."""
    shards: list[Flat] = [{}]
    room = SHARD_BYTES
    for name, value in sorted(weights.items()):
        size = value.size * value.dtype.itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = value
        room -= size
    for old in Path(folder).glob(f"{stem}*.safetensors"):
        old.unlink()
    single = len(shards) == 1
    paths = []
    for i, shard in enumerate(shards, 1):
        path = Path(folder) / (f"{stem}.safetensors" if single else f"{stem}-{i:05d}.safetensors")
        partial = path.with_suffix(".part")
        save_file(shard, partial)
        partial.rename(path)
        paths.append(path)
    return paths


def read_export(folder: Path, stem: str) -> Flat:
    """Weights of `export`, on the default device."""
    paths = sorted(Path(folder).glob(f"{stem}*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no {stem}*.safetensors in {folder}")
    out: Flat = {}
    for path in paths:
        with safe_open(path, framework="flax") as tensors:
            out.update({name: tensors.get_tensor(name) for name in tensors.keys()})
    return out


def load_target(folder: Path, dtype=jnp.bfloat16) -> Flat:
    """The exported target as a training forward takes it: experts dequantised."""
    out: Flat = {}
    for name, value in (exported := read_export(folder, TARGET)).items():
        if name.endswith("_words"):
            stem = name.removesuffix("_words")
            out[stem] = dequantize(value, exported[f"{stem}_scales"], dtype)
        elif not name.endswith("_scales"):
            out[name] = value if name.endswith(KEEP_WIDE) else value.astype(dtype)
    return out


def pack_cache(workdir: Path) -> None:
    """XLA's compilation cache, `workdir`/xla, as xla-0000i.tar of about TAR_BYTES or less."""
    bins: list[list[Path]] = [[]]
    room = TAR_BYTES
    for path in sorted(p for p in (workdir / "xla").rglob("*") if p.is_file()):
        if (size := path.stat().st_size) > room and bins[-1]:
            bins.append([])
            room = TAR_BYTES
        bins[-1].append(path)
        room -= size
    for old in workdir.glob("xla-*.tar"):
        old.unlink()
    for i, paths in enumerate(filter(None, bins), 1):
        with tarfile.open(workdir / f"xla-{i:05d}.tar", "w") as tar:
            for path in paths:
                tar.add(path, path.relative_to(workdir))


def unpack_cache(workdir: Path, source: Path) -> None:
    if not (workdir / "xla").exists():
        for path in sorted(source.glob("xla-*.tar")):
            with tarfile.open(path) as tar:
                tar.extractall(workdir, filter="data")


class Log:
    """One JSON object a line, appended to `path`; shown on stdout, `repeated` lines at most every
    five seconds."""

    def __init__(self, path: Path):
        self.path, self.start, self.shown = Path(path), time.monotonic(), 0.0

    def write(self, repeated: bool = False, **fields) -> None:
        plain = {k: _plain(v) for k, v in fields.items()}
        with open(self.path, "a") as out:
            out.write(json.dumps(plain) + "\n")
        if not repeated or time.monotonic() - self.shown > 5:
            self.shown = time.monotonic()
            shown = " ".join(f"{k}={v}" for k, v in plain.items())
            print(f"[{time.monotonic() - self.start:6.1f}s] {shown}", flush=True)


def _plain(value):
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, str | int | bool | None):
        return value
    array = np.asarray(value, np.float64)
    return float(f"{array.item():.5g}") if array.ndim == 0 else [_plain(v) for v in array]
