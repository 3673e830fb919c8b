"""What a value may be, and the one form in which it is refused: `name=value: must be this`."""

import math
from dataclasses import fields
from typing import Any

import numpy as np


def is_int(value) -> bool:
    """Python's or NumPy's integer, but no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value) -> bool:
    """A finite number: neither a bool nor an integer that no float can hold."""
    if not is_int(value) and not isinstance(value, (float, np.floating)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def plain(value: Any) -> Any:
    """NumPy's scalars as Python's own; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def make_plain(config) -> None:
    """Put Python's own numbers into the fields of a frozen dataclass."""
    for entry in fields(config):
        object.__setattr__(config, entry.name, plain(getattr(config, entry.name)))


def check_types(config, prefix: str = "") -> None:
    """Raise ValueError for a field declared int, float or bool that holds something else."""
    make_plain(config)
    kinds = {
        int: (lambda value: is_int(value) and abs(value) < 2**31, "an integer below 2**31"),
        float: (is_number, "a finite number"),
        bool: (lambda value: isinstance(value, bool), "true or false"),
    }
    for entry in fields(config):
        if entry.type in kinds:
            fits, wanted = kinds[entry.type]
            value = getattr(config, entry.name)
            require(fits(value), prefix + entry.name, value, wanted)


def require(ok: bool, name: str, value: Any, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{name}={show(value)}: must be {wanted}")


def show(value: Any) -> str:
    """The value's repr on one line, its middle left out if it is long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-20:]}"
