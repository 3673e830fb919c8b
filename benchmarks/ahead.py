"""Programs compiled ahead for a described card, on a machine without one, and loaded on the card.

    build/cuda/bin/python scripts/compile_attention.py build/programs     (see compile_for_h200.py)
    python -m benchmarks.tree_attention --stage measure --programs build/programs      on the card

XLA compiles for a description of a card what it would compile on it, but for what it would have
timed there (autotuning). A program runs with the versions and the sources that made it only: others
are refused, so that no figure is of other code than it says. Programs are pickles: load your own.
"""

import hashlib
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path

import jax
import jaxlib
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import ddtree_jax


def made_with() -> dict[str, str]:
    """Versions, and a digest of the package's and the benchmarks' sources."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for folder in (here, Path(ddtree_jax.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "sources": digest.hexdigest()[:12],
    }


def save(folder: Path, name: str, compiled) -> int:
    """Write a compiled program, and return its bytes."""
    packed = lzma.compress(pickle.dumps((made_with(), serialize(compiled))), preset=1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.xz").write_bytes(packed)
    return len(packed)


def build(run: Callable, arguments: tuple, name: str, folder: Path | None = None) -> Callable:
    """`run`, jitted, compiled for `arguments`: loaded from `folder`, or compiled here without one.

    Raises ValueError for a program made with others, FileNotFoundError for a missing one.
    """
    if folder is None:
        return run.lower(*arguments).compile()
    path = folder / f"{name}.xz"
    if not path.exists():
        raise FileNotFoundError(f"no {path}: compile it ahead, or leave out --programs")
    found, program = pickle.loads(lzma.decompress(path.read_bytes()))
    if found != (here := made_with()):
        raise ValueError(f"{path}: made with {found}, here are {here}: compile it again")
    return deserialize_and_load(*program, execution_devices=jax.devices()[:1])
