"""Result files: what was measured, on what, with what (design: "Result files")."""

import argparse
import datetime
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import jax

import ddtree_jax

RESULTS = Path(__file__).parent / "results"


def write(
    path: Path, summary: dict, points: list[dict], notes: list[str], ceilings: dict | None = None
) -> None:
    """Write one result file; `summary` is flat, each point a case with its settings.

    `ceilings` (before and after, `ceilings.measure`) stand beside the card's name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "summary": summary,
        "notes": notes,
        "machine": machine() | (ceilings or {}),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "points": points,
    }
    path.write_text(json.dumps(content, indent=1, default=float) + "\n")


def machine() -> dict:
    """The device and, on NVIDIA, its driver."""
    device = jax.devices()[0]
    found = {"device": device.device_kind, "platform": device.platform, "count": jax.device_count()}
    if device.platform == "cpu":
        return found | {"processor": platform.machine()}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        name, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError):
        return found
    return found | {"card": name, "driver": driver}


def versions() -> dict:
    names = ("jax", "jaxlib", "flax", "jax-cuda13-plugin")
    found = {"python": platform.python_version(), "ddtree-jax": ddtree_jax.__version__}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the working folder, or what DDTREE_JAX_COMMIT says of a copy without one."""
    if named := os.environ.get("DDTREE_JAX_COMMIT"):
        return named
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], text=True, capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return asked.stdout.strip()


def parser(description: str, name: str) -> argparse.ArgumentParser:
    """The options all benchmark scripts share."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--model", default="kimi-nano", help="bundled name or folder")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default=None)
    made.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    return made


def count(text: str) -> int:
    """An option type: an integer, 1 or greater."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)
