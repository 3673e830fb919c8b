"""Held-out prompts: the openings of documents that kimi-nano never trained on.

`prompts/heldout.json.gz` holds texts of {code, prose} x {short, long}, with package and path of
each. `python -m benchmarks.prompts HELDOUT.json.gz` makes it from what `ddtree_jax.train.data`
writes.
"""

import argparse
import gzip
import hashlib
import json
from pathlib import Path

from ddtree_jax.tokenizer import Tokenizer

FILE = Path(__file__).parent / "prompts" / "heldout.json.gz"
MIXES = ("code_short", "code_long", "prose_short", "prose_long")
SHORT, LONG = (32, 160), (1500, 1900)  # tokens of a prompt, at least and at most
EACH = 64


def load(mix: str, count: int = EACH) -> list[str]:
    """The first `count` texts of a mix."""
    if mix not in MIXES:
        raise ValueError(f"mix={mix!r}: must be one of {', '.join(MIXES)}")
    with gzip.open(FILE, "rt") as file:
        texts = [entry["text"] for entry in json.load(file)[mix]]
    if count > len(texts):
        raise ValueError(f"count={count}: the file holds {len(texts)} prompts of {mix}")
    return texts[:count]


def opening(tokenizer: Tokenizer, text: str, room: tuple[int, int], share: float) -> str | None:
    """The start of a document, cut at a line end (or, in a long line, a space)."""
    low, high = room
    wanted = int(low + share * (high - low))
    ids = tokenizer.encode(text[: 12 * high])
    if len(ids) < high + 160:  # there must be something left to say
        return None
    start = tokenizer.decode(ids[:wanted])
    for end in ("\n", " "):
        cut = start.rfind(end) + (end == "\n")
        if cut > 0 and len(tokenizer.encode(start[:cut])) >= low:
            return start[:cut]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model's folder")
    args = parser.parse_args()
    tokenizer = Tokenizer(args.tokenizer)
    with gzip.open(args.heldout, "rt") as file:
        documents = json.load(file)
    chosen = {}
    for kind in ("code", "prose"):
        # Drawn by hash, a document serving one mix, so that no package leads.
        pool = sorted(
            documents[f"heldout_{kind}"],
            key=lambda d: hashlib.sha256(f"{d['package']}/{d['path']}".encode()).digest(),
        )
        for name, room in (("long", LONG), ("short", SHORT)):
            taken, rest = [], []
            for document in pool:
                share = hashlib.sha256(document["text"].encode()).digest()[0] / 255
                text = None
                if len(taken) < EACH:
                    text = opening(tokenizer, document["text"], room, share)
                if text is None:
                    rest.append(document)
                else:
                    where = {k: document[k] for k in ("package", "path")}
                    taken.append({**where, "text": text})
            chosen[f"{kind}_{name}"], pool = taken, rest
    FILE.parent.mkdir(exist_ok=True)
    with gzip.GzipFile(FILE, "wb", mtime=0) as file:
        file.write(json.dumps({m: chosen[m] for m in MIXES}, ensure_ascii=False).encode())
    print({mix: len(chosen[mix]) for mix in MIXES}, FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
