"""Kimi's tokenizer on a synthetic rank file: every byte, and a few merges."""

import base64
import random
import time

import pytest
import tiktoken

from ddtree_jax.tokenizer import KIMI_PATTERN, RANKS, StreamDecoder, Tokenizer, _pieces

MERGES = [b"th", b"the", b" the", b"in", b"ing", b"\xe4\xbd", b"  ", b"    ", b"12", b"123"]
TOKENS = [bytes([i]) for i in range(256)] + MERGES
BASE = len(TOKENS)
TEXT = "The thing 1234 — 你好, 世界! 👩‍👩‍👧 e\u0301 don't\r\n\n  x"


def rank_file(folder, tokens=TOKENS):
    lines = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (folder / RANKS).write_bytes(b"\n".join(lines) + b"\n")
    return folder


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer(rank_file(tmp_path))


def random_text(rng, size):
    ranges = [(0x20, 0x7F), (0x9, 0xE), (0xA0, 0x600), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(size))


def test_special_tokens(tokenizer):
    assert tokenizer.vocab_size == BASE + 256
    assert tokenizer.special_id("[BOS]") == BASE
    assert tokenizer.special_id("<|im_middle|>") == BASE + 17
    assert tokenizer.special_id("<think>") == BASE + 22
    assert tokenizer.special_id("[UNK]") == BASE + 254
    assert tokenizer.special_id(f"<|reserved_token_{BASE + 5}|>") == BASE + 5
    assert tokenizer.eos_ids == (BASE + 2, BASE + 1)
    assert tokenizer.decode([BASE + 2, *b"hi"]) == "<|im_end|>hi"
    with pytest.raises(ValueError, match="nonsense"):
        tokenizer.special_id("nonsense")


def test_special_names_in_text_are_text(tokenizer):
    ids = tokenizer.encode("<|im_end|>")
    assert max(ids) < BASE
    assert tokenizer.decode(ids) == "<|im_end|>"


def test_splits(tokenizer):
    assert tokenizer.encode(" the") == [TOKENS.index(b" the")]
    assert tokenizer.encode("1231") == [TOKENS.index(b"123"), ord("1")]  # three digits a piece
    assert tokenizer.encode("") == []
    # Han characters are pieces of their own, so a space before one is not merged into its piece.
    assert tokenizer.encode("a你") == [ord("a"), TOKENS.index(b"\xe4\xbd"), 0xA0]


def test_pieces_of_the_pattern():
    pieces = ["Hello", " w", "ORLD's", "你好", " thing", "。", "123", "4", " \n\n", "  ", " x"]
    ranks = {bytes([i]): i for i in range(256)}
    for piece in pieces:  # every prefix is a token, so a piece becomes one token
        raw = piece.encode()
        for end in range(2, len(raw) + 1):
            ranks.setdefault(raw[:end], len(ranks))
    encoding = tiktoken.Encoding(
        "test", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    ids = encoding.encode_ordinary("".join(pieces))
    assert [encoding.decode([i]) for i in ids] == pieces


def test_round_trip(tokenizer):
    rng = random.Random(0)
    for size in [1, 2, 5, 50, 500] * 8:
        text = random_text(rng, size)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_stream_is_never_half_a_character(tokenizer):
    ids = tokenizer.encode(TEXT)
    for step in (1, 2, 3, 7):
        stream = StreamDecoder(tokenizer)
        parts = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
        assert not any("\ufffd" in part for part in parts)
        assert "".join(parts) == TEXT
        assert stream.finish() == ""


def test_stream_equals_decode_for_any_bytes(tokenizer):
    rng = random.Random(1)
    for _ in range(200):
        ids = [rng.randrange(BASE) for _ in range(rng.randrange(12))]
        stream = StreamDecoder(tokenizer)
        text = "".join(stream.push([i]) for i in ids) + stream.finish()
        assert text == tokenizer.decode(ids)


def test_stream_flushes_an_unfinished_character(tokenizer):
    stream = StreamDecoder(tokenizer)
    assert stream.push([ord("a"), 0xE4, 0xBD]) == "a"
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("text", [" " * 10**6, "x" * 10**6, "\n" * 10**6], ids=["space", "x", "nl"])
def test_long_runs_are_quick(tokenizer, text):
    start = time.perf_counter()
    ids = tokenizer.encode(text)
    assert time.perf_counter() - start < 10
    assert tokenizer.decode(ids) == text


def test_long_runs_are_cut_as_kimi_cuts_them():
    text = "a" * 5 + " " * 60_000 + "b" * 25_000 + "c" * 350_000
    pieces = list(_pieces(text))
    assert "".join(pieces) == text
    assert [len(p) for p in pieces[:3]] == [25_005, 25_000, 35_000]
    assert sum(len(p) for p in pieces[:-2]) == 400_000  # then a cut by length, in a run of c


@pytest.mark.parametrize("bad", [-1, BASE + 256, 10**9])
def test_ids_out_of_range(tokenizer, bad):
    with pytest.raises(ValueError, match=f"token id {bad}: must be from 0 to {BASE + 255}"):
        tokenizer.decode([0, bad])


def test_missing_rank_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="tiktoken.model"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"!!!! 3", "line 4: not 'base64 rank'"),
        (b"AA==", "line 4: not 'base64 rank'"),
        (b"Aw== x", "line 4: not 'base64 rank'"),
        (b"Aw== 7", "line 4: rank 7, must be 3"),
        (b"AA== 3", "line 4: the token b'\\\\x00' stands there twice"),
    ],
)
def test_corrupt_rank_file(tmp_path, line, said):
    lines = (rank_file(tmp_path) / RANKS).read_bytes().splitlines()
    lines[3] = line
    (tmp_path / RANKS).write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=said):
        Tokenizer(tmp_path)


def test_cut_rank_file(tmp_path):
    with pytest.raises(ValueError, match="the single byte 0xc8 has no rank"):
        Tokenizer(rank_file(tmp_path, TOKENS[:200]))
