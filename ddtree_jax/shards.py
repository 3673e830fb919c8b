"""A checkpoint folder's tensors by name: one `model.safetensors`, or shards behind an index."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (teaches NumPy, and so safetensors, the dtype bfloat16)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ddtree_jax.checks import show

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 15 * 2**20 - 2**16
_HEADER_BYTES = 128  # of one tensor, its name not counted; the header's own few bytes once


class Tensor(NamedTuple):
    """What stands in a shard's header."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def data_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def read_json(folder: str | Path, name: str) -> dict:
    """The object in one of the folder's JSON files; FileNotFoundError, ValueError name it."""
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"{folder}: is a file; a checkpoint is a folder that holds {CONFIG}")
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; a checkpoint folder holds {CONFIG}")
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file in the checkpoint folder")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if type(content) is not dict:
        raise ValueError(f"{path}: must hold a JSON object, not {type(content).__name__}")
    return content


def _refuse_constant(text: str):
    raise ValueError(f"{text} is no JSON number")


class Shards:
    """Reads tensors of a folder one at a time; shards are memory-mapped, never read whole."""

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        if (folder / INDEX).is_file():
            placed = read_json(folder, INDEX).get("weight_map")
            if type(placed) is not dict or not placed:
                raise ValueError(f"{folder / INDEX}: 'weight_map' must map tensors to shard files")
            for key, name in placed.items():
                if not isinstance(name, str) or not name or Path(name).name != name:
                    raise ValueError(
                        f"{folder / INDEX}: 'weight_map' places {show(key)} in {show(name)}, which "
                        "must be the name of a shard file"
                    )
            files = {name: _open(folder / name, INDEX) for name in sorted(set(placed.values()))}
            held = {name: set(file.keys()) for name, file in files.items()}
            lost = [key for key, name in placed.items() if key not in held[name]]
            if lost:
                raise ValueError(
                    f"{folder / INDEX}: places {lost[0]!r} in {placed[lost[0]]}, which does not "
                    f"hold it ({len(lost)} such tensors)"
                )
            self._file_of = {key: files[name] for key, name in placed.items()}
        elif (folder / SINGLE).is_file():
            file = _open(folder / SINGLE, SINGLE)
            self._file_of = dict.fromkeys(file.keys(), file)
        else:
            raise FileNotFoundError(f"{folder}: holds neither {SINGLE} nor {INDEX}")
        self.names = frozenset(self._file_of)

    def check(self, key: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """Raise ValueError unless the tensor has this shape and one of these safetensors dtypes."""
        header = self._file_of[key].get_slice(key)
        if tuple(header.get_shape()) != shape:
            raise ValueError(f"{key}: shape {header.get_shape()}, must be {list(shape)}")
        if header.get_dtype() not in dtypes:
            raise ValueError(f"{key}: dtype {header.get_dtype()}, must be {' or '.join(dtypes)}")

    def read(self, key: str, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """A tensor, or a rectangular part of it: then no other bytes are touched."""
        if part is None:
            return self._file_of[key].get_tensor(key)
        return self._file_of[key].get_slice(key)[part]


def _open(path: Path, named_by: str):
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such shard, though {named_by} names it")
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or not a safetensors file: {error}") from error


def write(
    folder: str | Path,
    config: dict,
    tensors: Iterable[Tensor],
    values: Callable[[str], np.ndarray],
    shard_bytes: int,
    single: bool,
) -> None:
    """Write `config.json` and the tensors, in order, to files of at most `shard_bytes` each.

    Only one shard's values are held at a time. `single` allows one file without an index.
    """
    shards: list[list[Tensor]] = []
    room = -1
    for tensor in tensors:
        size = tensor.data_bytes + len(tensor.key) + _HEADER_BYTES
        if size + _HEADER_BYTES > shard_bytes:
            raise ValueError(
                f"{tensor.key}: {tensor.data_bytes} bytes do not fit shard_bytes={shard_bytes}"
            )
        if size > room:
            shards.append([])
            room = shard_bytes - _HEADER_BYTES
        shards[-1].append(tensor)
        room -= size
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    alone = single and len(shards) == 1
    placed = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if alone else f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(
            {t.key: np.ascontiguousarray(values(t.key), t.dtype) for t in shard},
            folder / name,
            metadata={"format": "pt"},
        )
        placed |= dict.fromkeys((t.key for t in shard), name)
    if alone:
        (folder / INDEX).unlink(missing_ok=True)  # an older one would be read first
    else:
        total = sum(t.data_bytes for shard in shards for t in shard)
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
