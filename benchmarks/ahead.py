"""Programs compiled ahead for a described card, on a machine without one, and loaded on the card.

    build/cuda/bin/python scripts/compile_attention.py build/programs     (see compile_for_h200.py)
    python -m benchmarks.tree_attention --stage measure --programs build/programs      on the card

XLA compiles for a description of a card what it would compile on it, but for what it would have
timed there (autotuning). A program runs with the versions that made it only: others are refused.
Programs are pickles: load your own.
"""

import lzma
import pickle
from collections.abc import Callable
from pathlib import Path

import jax
import jaxlib
from jax.experimental.serialize_executable import deserialize_and_load, serialize

MADE_WITH = jax.__version__, jaxlib.__version__


def save(folder: Path, name: str, compiled) -> int:
    """Write a compiled program, and return its bytes."""
    packed = lzma.compress(pickle.dumps((MADE_WITH, serialize(compiled))), preset=1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.xz").write_bytes(packed)
    return len(packed)


def build(run: Callable, arguments: tuple, name: str, folder: Path | None = None) -> Callable:
    """`run`, jitted, compiled for `arguments`: loaded from `folder`, or compiled here without one.

    Raises ValueError for a program made with other versions, FileNotFoundError for a missing one.
    """
    if folder is None:
        return run.lower(*arguments).compile()
    path = folder / f"{name}.xz"
    if not path.exists():
        raise FileNotFoundError(f"no {path}: compile it ahead, or leave out --programs")
    made_with, program = pickle.loads(lzma.decompress(path.read_bytes()))
    if made_with != MADE_WITH:
        raise ValueError(
            f"{path}: made with jax {made_with[0]} and jaxlib {made_with[1]}, "
            f"here are {MADE_WITH[0]} and {MADE_WITH[1]}"
        )
    return deserialize_and_load(*program, execution_devices=jax.devices()[:1])
