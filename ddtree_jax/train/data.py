"""Token streams of the corpus: packed for travel, read back for training.

    python -m ddtree_jax.train.data CORPUS_DIR MODEL_DIR OUT_DIR

encodes CORPUS_DIR/text with MODEL_DIR/tiktoken.model and writes to OUT_DIR

- `train_{kind}_{i}.xz`: documents, each closed by [EOS], as raw little-endian uint16 ids in an
  xz stream. A package lies in one file, sorted by path, so that like stands near like and packs
  well; `load_tokens` shuffles.
- `heldout.npz.xz`: `{split}_{kind}_tokens` uint16, `_offsets` (documents + 1, each [EOS] counted
  with its document) and `_bytes` (UTF-8 bytes of each document), for bits per byte.
- `manifest.json`: counts and sha256 sums.

The text of the held-out documents, in the same order, goes to CORPUS_DIR/heldout.json.gz: it
need not travel.

Reading needs numpy alone.
"""

import argparse
import gzip
import hashlib
import io
import json
import lzma
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pool
from pathlib import Path

import numpy as np

KINDS = ("code", "prose")
EOS = 2049
FILES = 8  # of each kind: they are unpacked in parallel
SAMPLE = 0.92  # share of the training documents written: what travels is at most 50 MiB
# Ids are two bytes wide, so positions are told apart by their lowest bit (lp, pb).
FILTERS = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 1 << 26,
        "lc": 2,
        "lp": 1,
        "pb": 1,
    }
]


def load_tokens(folder: str | Path, seed: int = 0) -> dict[str, np.ndarray]:
    """Training ids of each kind, uint16, documents in an order drawn with the seed."""
    out = {}
    for kind in KINDS:
        paths = sorted(Path(folder).glob(f"train_{kind}_*.xz"))
        with ThreadPoolExecutor() as threads:  # lzma releases the lock
            packed = threads.map(lambda path: lzma.decompress(path.read_bytes()), paths)
            ids = np.concatenate([np.frombuffer(data, "<u2") for data in packed])
        documents = np.split(ids, np.flatnonzero(ids == EOS)[:-1] + 1)
        order = np.random.default_rng(seed).permutation(len(documents))
        out[kind] = np.concatenate([documents[i] for i in order])
    return out


def load_heldout(folder: str | Path) -> dict[str, list[tuple[np.ndarray, int]]]:
    """(ids, bytes) of each document of `heldout_code`, `unseen_prose` and so on."""
    packed = (Path(folder) / "heldout.npz.xz").read_bytes()
    with np.load(io.BytesIO(lzma.decompress(packed))) as arrays:
        names = [name.removesuffix("_tokens") for name in arrays if name.endswith("_tokens")]
        return {
            name: list(
                zip(
                    np.split(arrays[f"{name}_tokens"], arrays[f"{name}_offsets"][1:-1]),
                    arrays[f"{name}_bytes"].tolist(),
                    strict=True,
                )
            )
            for name in names
        }


def read(folder: Path, split: str, kind: str) -> list[dict]:
    """The documents of one split, sorted by package and path."""
    with open(folder / "text" / f"{split}_{kind}.jsonl") as lines:
        documents = [json.loads(line) for line in lines]
    return sorted(documents, key=lambda d: (d["package"], d["path"]))


def encode(job: tuple[Path, list[str]]) -> list[np.ndarray]:
    """Ids of each text, closed by [EOS]."""
    from ..tokenizer import Tokenizer

    folder, texts = job
    tokenizer = Tokenizer(folder)
    return [np.array([*tokenizer.encode(text), EOS], "<u2") for text in texts]


def shard(job: tuple[Path, list[dict], Path]) -> dict[str, list[int]]:
    """Write one training file; documents, bytes and tokens of each package."""
    model, documents, path = job
    ids = encode((model, [d["text"] for d in documents]))
    path.write_bytes(lzma.compress(np.concatenate(ids).tobytes(), filters=FILTERS))
    counts: dict[str, list[int]] = {}
    for document, tokens in zip(documents, ids, strict=True):
        row = counts.setdefault(document["package"], [0, 0, 0])
        for i, n in enumerate((1, len(document["text"].encode()), len(tokens))):
            row[i] += n
    return counts


def balanced(documents: list[dict]) -> list[list[dict]]:
    """FILES groups of whole packages of about equal size."""
    packages: dict[str, list[dict]] = {}
    for document in documents:
        packages.setdefault(document["package"], []).append(document)
    groups: list[list[dict]] = [[] for _ in range(FILES)]
    sizes = [0] * FILES
    for members in sorted(packages.values(), key=lambda m: -sum(len(d["text"]) for d in m)):
        lightest = sizes.index(min(sizes))
        groups[lightest] += members
        sizes[lightest] += sum(len(d["text"]) for d in members)
    return groups


def main() -> None:
    from .extract import fraction

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("corpus", "model", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    corpus, folder = args.corpus, args.out
    folder.mkdir(parents=True, exist_ok=True)

    jobs = []
    for kind in KINDS:
        documents = [
            d
            for d in read(corpus, "train", kind)
            if fraction("pack", d["package"], d["path"]) < SAMPLE
        ]
        jobs += [
            (args.model, group, folder / f"train_{kind}_{i}.xz")
            for i, group in enumerate(balanced(documents))
        ]
    with Pool(args.processes) as pool:
        sources = dict(
            zip(
                ((f"train_{kind}", i) for kind in KINDS for i in range(FILES)),
                pool.map(shard, jobs, chunksize=1),
                strict=True,
            )
        )

    arrays, texts, packages = {}, {}, {}
    for (name, _), counts in sources.items():
        packages.setdefault(name, {}).update(counts)
    for split in ("heldout", "unseen"):
        for kind in KINDS:
            name, documents = f"{split}_{kind}", read(corpus, split, kind)
            ids = encode((args.model, [d["text"] for d in documents]))
            arrays[f"{name}_tokens"] = np.concatenate(ids)
            arrays[f"{name}_offsets"] = np.cumsum([0, *map(len, ids)])
            arrays[f"{name}_bytes"] = np.array([len(d["text"].encode()) for d in documents])
            texts[name] = documents
            for document, tokens in zip(documents, ids, strict=True):
                row = packages.setdefault(name, {}).setdefault(document["package"], [0, 0, 0])
                for i, n in enumerate((1, len(document["text"].encode()), len(tokens))):
                    row[i] += n
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    (folder / "heldout.npz.xz").write_bytes(lzma.compress(buffer.getvalue(), filters=FILTERS))
    with gzip.open(corpus / "heldout.json.gz", "wt") as out:
        json.dump(texts, out, ensure_ascii=False)

    totals = {
        name: dict(
            zip(
                ("documents", "bytes", "tokens"),
                map(sum, zip(*rows.values(), strict=True)),
                strict=True,
            )
        )
        for name, rows in packages.items()
    }
    for row in totals.values():  # each document's [EOS] stands for no byte
        row["bytes_per_token"] = round(row["bytes"] / (row["tokens"] - row["documents"]), 4)
    outputs = [*(job[2] for job in jobs), folder / "heldout.npz.xz"]
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in outputs
    }
    manifest = {"totals": totals, "files": files, "documents_bytes_tokens_of_packages": packages}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    print(json.dumps(totals, indent=1))
    print(sum(file["bytes"] for file in files.values()), "bytes in all")


if __name__ == "__main__":
    main()
