"""Run every notebook from top to bottom, in place; fail if a cell does."""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds for a whole notebook


def run(path: Path, check: bool) -> str | None:
    """Run one notebook and save it unless `check`; return what went wrong."""
    notebook = nbformat.read(path, as_version=4)
    deadline = time.monotonic() + TIMEOUT
    client = NotebookClient(
        notebook,
        kernel_name="python3",  # this interpreter, whatever the file names
        timeout_func=lambda cell: max(1, int(deadline - time.monotonic())),
        record_timing=False,  # times would change the file at each run
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute()
    except CellTimeoutError:
        return f"took longer than {TIMEOUT} s"
    except (CellExecutionError, DeadKernelError) as error:
        return str(error)
    if not check:
        nbformat.write(notebook, path)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="leave the files untouched")
    parser.add_argument("paths", nargs="*", type=Path, help="default: all under notebooks/")
    arguments = parser.parse_args()
    # The kernel imports this checkout, not one that the environment may have installed.
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)

    paths = arguments.paths or sorted((ROOT / "notebooks").glob("*.ipynb"))
    failed = []
    for path in paths:
        start = time.monotonic()
        error = run(path, arguments.check)
        print(f"{'failed' if error else 'ok':6} {time.monotonic() - start:6.1f} s  {path.name}")
        if error:
            print(error, file=sys.stderr)
            failed.append(path.name)
    print(f"{len(paths) - len(failed)} of {len(paths)} notebooks ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
