"""The corpus of kimi-nano: openly licensed Python source and English documentation.

    python -m ddtree_jax.train.corpus OUT_DIR

downloads the packages of `sources.json` (exact versions; pip wheels and Debian packages,
nothing is built or installed), extracts and cleans their text, drops near duplicates, holds
documents out, and writes `OUT_DIR/text/{split}_{kind}.jsonl`, one document a line, plus
`OUT_DIR/corpus.json` with what was kept and dropped.

Splits: `train`; `heldout`, documents chosen by a hash of package and path; `unseen`, whole
packages that training never sees. A held-out document that shares more than SHARED of its
windows with the training text is dropped.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from multiprocessing import Pool
from pathlib import Path
from urllib.parse import unquote

from .extract import documents, fraction

SOURCES = Path(__file__).with_name("sources.json")
HELDOUT = {"code": 0.05, "prose": 0.08}  # share of the documents
TRAIN_BYTES = {"code": 175_000_000, "prose": 100_000_000}  # less than there is
WINDOW = 5  # normalised lines hashed together
DUPLICATE, SHARED = 0.4, 0.05  # share of windows already seen that drops a document


def archive_path(source: dict, folder: Path) -> Path | None:
    """Where the package lies in the folder, or None."""
    name, version = source["name"], source["version"]
    if source["origin"] == "pypi":
        wanted = re.sub(r"[-_.]+", "_", f"{name}-{version}").lower() + "_"
        fits = (
            p
            for p in folder.glob("*.whl")
            if re.sub(r"[-_.]+", "_", p.name).lower().startswith(wanted)
        )
    else:
        fits = (p for p in folder.glob("*.deb") if unquote(p.name).startswith(f"{name}_{version}_"))
    return next(fits, None)


def download(source: dict, folder: Path) -> Path | None:
    """Fetch one package with its registry's own client unless it is there already."""
    if found := archive_path(source, folder):
        return found
    name, version = source["name"], source["version"]
    if source["origin"] == "pypi":
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            f"{name}=={version}",
        ]
    else:
        command = ["apt-get", "download", "--quiet", f"{name}={version}"]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    return archive_path(source, folder)


def windows(text: str, kind: str) -> set[int]:
    """Hashes of every WINDOW consecutive lines (sentences in prose), blanks and case ignored."""
    lines = text.split("\n") if kind == "code" else re.split(r"\n|(?<=[.;:]) ", text)
    lines = [key for line in lines if len(key := line.strip().lower()) > 3]
    return {hash(tuple(lines[i : i + WINDOW])) for i in range(max(1, len(lines) - WINDOW + 1))}


def extract(job: tuple[Path, dict]) -> tuple[dict, list[tuple[str, str]]]:
    """`documents` for a pool."""
    archive, source = job
    return source, documents(archive, source)


def split_of(source: dict, path: str) -> str:
    """The split a document belongs to, fixed by its package and path alone."""
    if source.get("unseen"):
        return "unseen"
    held = fraction("heldout", source["name"], path) < HELDOUT[source["kind"]]
    return "heldout" if held else "train"


def select(found: list[tuple[dict, list]], kind: str, stats: Counter) -> dict[str, list[dict]]:
    """Documents of one kind, by split, without near duplicates."""
    pool: dict[str, list[dict]] = {"train": [], "heldout": [], "unseen": []}
    for source, texts in found:
        for path, text in texts:
            pool[split_of(source, path)].append(
                {"package": source["name"], "path": path, "text": text}
            )
    seen: set[int] = set()
    kept: dict[str, list[dict]] = {}
    for split, limit in (("train", DUPLICATE), ("heldout", SHARED), ("unseen", SHARED)):
        kept[split] = []
        for document in sorted(pool[split], key=lambda d: fraction(d["package"], d["path"])):
            hashes = windows(document["text"], kind)
            if len(hashes & seen) > limit * len(hashes):
                stats[f"{split}_{kind}_dropped_as_duplicate"] += 1
                continue
            seen |= hashes
            kept[split].append(document)
    size = sum(len(d["text"]) for d in kept["train"])
    share = TRAIN_BYTES[kind] / size
    kept["train"] = [
        d for d in kept["train"] if fraction("sample", d["package"], d["path"]) < share
    ]
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", type=Path, help="folder of downloads; OUT/packages")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    packages = args.packages or args.out / "packages"
    for folder in (packages, args.out / "text"):
        folder.mkdir(parents=True, exist_ok=True)

    sources = json.loads(SOURCES.read_text())
    jobs = [(download(source, packages), source) for source in sources]
    if missing := [source["name"] for path, source in jobs if path is None]:
        raise SystemExit(f"not to be had: {', '.join(missing)}")
    with Pool(args.processes) as pool:
        extracted = pool.map(extract, jobs, chunksize=1)

    stats: Counter = Counter()
    table: dict[str, dict] = {}
    for kind in ("code", "prose"):
        found = [item for item in extracted if item[0]["kind"] == kind]
        for split, texts in select(found, kind, stats).items():
            with open(args.out / "text" / f"{split}_{kind}.jsonl", "w") as out:
                for document in texts:
                    out.write(json.dumps(document, ensure_ascii=False) + "\n")
                    row = table.setdefault(document["package"], {"kind": kind})
                    counts = row.setdefault(split, [0, 0])
                    counts[0] += 1
                    counts[1] += len(document["text"].encode())
            stats[f"{split}_{kind}_documents"] = len(texts)
            stats[f"{split}_{kind}_bytes"] = sum(len(d["text"].encode()) for d in texts)
    report = {"totals": dict(stats), "documents_and_bytes": table}
    (args.out / "corpus.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report["totals"], indent=1))


if __name__ == "__main__":
    main()
