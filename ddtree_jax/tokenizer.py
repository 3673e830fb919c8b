"""Kimi's tokenizer: tiktoken's byte-pair encoding over the ranks in `tiktoken.model`.

Ids are the ranks, then 256 special tokens. Text never turns into special tokens: they are put
between pieces of text by id, so that no prompt can forge a turn.
"""

import base64
import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiktoken

RANKS = "tiktoken.model"
SPECIAL_TOKENS = 256  # ids after the last rank

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Set intersection (&&) is the form of tiktoken's regex engine, not of Python's.
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_MAX_CHARACTERS = 400_000  # of one call into tiktoken
_MAX_RUN = 25_000  # (non-)whitespace characters in a row
_RUN = re.compile(r"\s+|\S+")
_NAMES = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
    6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>",
    17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip


class Tokenizer:
    """Text to token ids and back, with the ranks of a checkpoint folder."""

    def __init__(self, folder: str | Path):
        ranks = _read_ranks(Path(folder) / RANKS)
        base = len(ranks)
        self._special = {
            _NAMES.get(i, f"<|reserved_token_{base + i}|>"): base + i for i in range(SPECIAL_TOKENS)
        }
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=self._special
        )
        self.vocab_size = base + SPECIAL_TOKENS
        self.eos_ids = (self._special["<|im_end|>"], self._special["[EOS]"])

    def special_id(self, name: str) -> int:
        """The id of a special token, `<|im_end|>` for example."""
        if name not in self._special:
            raise ValueError(f"{name!r} is not a special token of this tokenizer")
        return self._special[name]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; names of special tokens in it are text like any other."""
        return [i for piece in _pieces(text) for i in self._encoding.encode_ordinary(piece)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens by name; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        known = [int(i) for i in ids]
        for i in known:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i}: must be from 0 to {self.vocab_size - 1}")
        return self._encoding.decode_bytes(known)


class StreamDecoder:
    """Text as tokens arrive, never half a character: bytes of an unfinished one are held back."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these further ids complete."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def finish(self) -> str:
        """What is left: U+FFFD if the last character never became whole."""
        return self._decoder.decode(b"", final=True)


def _pieces(text: str) -> Iterator[str]:
    """Kimi's cuts: every 400k characters, and every 25k of a run of (non-)whitespace."""
    for start in range(0, len(text), _MAX_CHARACTERS):
        part, begin = text[start : start + _MAX_CHARACTERS], 0
        for run in _RUN.finditer(part):
            for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield part[begin:cut]
                begin = cut
        yield part[begin:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes and their ranks: a line each, base64, a space, the rank."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; Kimi's tokenizer reads its ranks from it")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            value = int(rank)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not 'base64 rank': {line!r}") from error
        if token in ranks:
            raise ValueError(f"{path}, line {number}: the token {token!r} stands there twice")
        if value != len(ranks):
            raise ValueError(f"{path}, line {number}: rank {value}, must be {len(ranks)}")
        ranks[token] = value
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise ValueError(f"{path}: the single byte {byte:#04x} has no rank")
    return ranks
