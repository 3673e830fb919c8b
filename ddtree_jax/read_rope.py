"""`rope_theta`, `rope_scaling` and `rope_parameters` of a published config: one theta, one YaRN."""

from collections.abc import Mapping
from typing import Any

from ddtree_jax.checks import is_number, require
from ddtree_jax.config import Yarn, yarn_mscale
from ddtree_jax.known_fields import Known, check_fields

_TYPE = frozenset({"type", "rope_type", "rope_theta"})
_NUMBERS = (
    "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "attention_factor",
)  # fmt: skip
_DEFAULT = Known(read=_TYPE, harmless=frozenset(), fixed={})
_YARN = Known(read=_TYPE.union(_NUMBERS), harmless=frozenset(), fixed={"truncate": (True,)})
_KINDS = {"default": "default", "yarn": "yarn", "deepseek_yarn": "yarn"}


def read_rope(fields: Mapping[str, Any]) -> tuple[Any, Yarn | None]:
    """Theta (None if nobody names it) and scaling; the old spelling and the new must agree.

    Raises ValueError for an unknown or malformed field, and where two places disagree.
    """
    thetas, scalings = {}, {}
    if fields.get("rope_theta") is not None:
        thetas["rope_theta"] = fields["rope_theta"]
    for name in ("rope_scaling", "rope_parameters"):
        found = section(fields, name)
        if found:
            scalings[name] = read_yarn(found, f"{name}.")
        if found.get("rope_theta") is not None:
            thetas[f"{name}.rope_theta"] = found["rope_theta"]
    return _agreed(thetas), _agreed(scalings)


def read_yarn(fields: Mapping[str, Any], prefix: str = "rope_scaling.") -> Yarn | None:
    """Read one of the two; None where no scaling is asked for. Raises ValueError.

    `attention_factor`, where the file names none, is the ratio of the two mscale terms, or
    0.1 ln(factor) + 1 if the file gives no mscale at all (transformers' rule).
    """
    kinds = [fields[key] for key in ("type", "rope_type") if fields.get(key) is not None]
    for kind in kinds:
        known = isinstance(kind, str) and kind in _KINDS
        require(known, f"{prefix}type", kind, "'yarn' or 'default'")
    if len({_KINDS[kind] for kind in kinds}) > 1:
        raise ValueError(f"{prefix}type={kinds[0]!r} but {prefix}rope_type={kinds[1]!r}")
    if not kinds or _KINDS[kinds[0]] == "default":
        check_fields(fields, _DEFAULT, prefix)
        return None
    check_fields(fields, _YARN, prefix)
    given = {name: fields[name] for name in _NUMBERS if fields.get(name) is not None}
    for name in ("factor", "original_max_position_embeddings"):
        if name not in given:
            raise ValueError(f"config field {prefix}{name} is missing")
    for name, value in given.items():
        require(is_number(value), prefix + name, value, "a finite number")
    mscale, all_dim = given.pop("mscale", 0.0), given.get("mscale_all_dim", 0.0)
    for name, value in (("mscale", mscale), ("mscale_all_dim", all_dim)):
        require(value >= 0, prefix + name, value, "0 or greater")
    if "attention_factor" not in given:
        amplitude = yarn_mscale(given["factor"], mscale if mscale and all_dim else 1.0)
        if mscale and all_dim:
            amplitude /= yarn_mscale(given["factor"], all_dim)
        given["attention_factor"] = amplitude
    whole = given.pop("original_max_position_embeddings")
    return Yarn(
        original_max_position_embeddings=whole,
        **{name: float(value) for name, value in given.items()},
    )


def section(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object under this name, empty if there is none or null."""
    value = fields.get(name)
    require(value is None or isinstance(value, Mapping), name, value, "an object or null")
    return dict(value or {})


def _agreed(found: Mapping[str, Any]) -> Any:
    """The value all these places hold, None for no place."""
    (first, value), *others = found.items() or [("", None)]
    for name, other in others:
        if other != value:
            raise ValueError(f"{first}={value!r} but {name}={other!r}: they must agree")
    return value
