"""Ranks of kimi-nano's tokenizer: byte-level BPE under Kimi's pre-tokeniser pattern.

    python -m ddtree_jax.train.bpe CORPUS_DIR MODEL_DIR

trains on a sample of the training text of CORPUS_DIR/text and writes MODEL_DIR/tiktoken.model:
one `base64(token) rank` a line, the 256 single bytes first (rank = byte), then the merges in
the order they were learnt. The 256 special tokens follow at N_RANKS + offset and are not in
the file, as in Kimi's own.
"""

import argparse
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import Regex, models, pre_tokenizers, trainers

from ..tokenizer import KIMI_PATTERN, RANKS, Tokenizer
from .extract import fraction

N_RANKS = 2048
SAMPLE_BYTES = {"code": 25_000_000, "prose": 15_000_000}


def sample(folder: Path) -> Iterator[str]:
    """Training documents, drawn by hash, SAMPLE_BYTES of each kind."""
    for kind, limit in SAMPLE_BYTES.items():
        path = folder / "text" / f"train_{kind}.jsonl"
        share = limit / path.stat().st_size
        with open(path) as lines:
            for line in lines:
                document = json.loads(line)
                if fraction("bpe", document["package"], document["path"]) < share:
                    yield document["text"]


def train(texts: Iterator[str]) -> tuple[tokenizers.Tokenizer, dict[bytes, int], dict]:
    """A trained tokenizer, its ranks, and the bytes that each of its ids spells."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated"), byte_level]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=N_RANKS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Byte-level BPE spells each byte as one printable character; this undoes it.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    to_byte = {chr(b): b for b in printable}
    to_byte |= {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*printable}))}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(to_byte[c] for c in token) for token, _ in vocabulary]
    ranks = {bytes([b]): b for b in range(256)}
    for token in tokens:
        ranks.setdefault(token, len(ranks))
    return tokenizer, ranks, {i: token for (_, i), token in zip(vocabulary, tokens, strict=True)}


def merge(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """BPE of one piece with the ranks under `below` only."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        pairs = [(ranks.get(parts[i] + parts[i + 1], below), i) for i in range(len(parts) - 1)]
        rank, i = min(pairs, default=(below, 0))
        if rank >= below:
            return parts
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("model", type=Path)
    args = parser.parse_args()

    trained, ranks, spelled = train(sample(args.corpus))
    unreachable = [
        token
        for token, rank in ranks.items()
        if rank >= 256 and len(merge(token, ranks, rank)) != 2
    ]
    if len(ranks) != N_RANKS or unreachable:
        raise ValueError(f"{len(ranks)} ranks; no merge reaches {unreachable}")
    args.model.mkdir(parents=True, exist_ok=True)
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (args.model / RANKS).write_bytes(b"".join(lines))

    checked, different, used = Tokenizer(args.model), 0, set()
    texts = [text for i, text in enumerate(sample(args.corpus)) if i % 10 == 0]
    for text in texts:
        ids = checked.encode(text)
        used.update(ids)
        if checked.decode(ids) != text:
            raise ValueError("decoding does not return the text")
        theirs = [ranks[spelled[i]] for i in trained.encode(text).ids]
        different += ids != theirs
    print(
        f"{len(ranks)} ranks, {len(used)} used in {len(texts)} documents; "
        f"{different} of them differ from the trainer's own encoding"
    )


if __name__ == "__main__":
    main()
