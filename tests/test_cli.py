"""The command line on a small random checkpoint: output, options, and every kind of bad input."""

import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from checkpoint import SMALL_TARGET, VOCAB, write_checkpoint
from rich.console import Console
from safetensors.numpy import load_file, save_file

import ddtree_jax as dd
from ddtree_jax import cli
from ddtree_jax.cli import _summary, main
from ddtree_jax.generate import METHODS, Completion
from ddtree_jax.shards import INDEX
from ddtree_jax.tokenizer import RANKS

KEYS = [
    "text", "tokens", "prompt_tokens", "finish_reason", "method", "budget", "verify_passes",
    "accept_length", "accept_by_depth", "tokens_per_second",
]  # fmt: skip
PROMPTS = ("the thing", "x", "你好, \n world")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def copy(folder, tmp_path):
    """The checkpoint once more, to be damaged."""
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.fixture
def command(folder, capsys):
    """Runs `generate` in this process: (exit status, stdout, stderr)."""

    def run(*arguments, model=folder):
        try:
            status = main(["generate", *map(str, arguments), "--model", str(model)])
        except SystemExit as end:  # argparse
            status = end.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def lines(command):
    """Objects of a `--json` run."""

    def run(*arguments):
        status, out, _ = command("--json", "--max-new-tokens", 24, *arguments)
        assert status == 0
        return [json.loads(line) for line in out.splitlines()]

    return run


@pytest.fixture(scope="session")
def model(folder):
    return dd.load(folder)


def test_json(lines, model):
    found = {method: lines(*PROMPTS, "--method", method) for method in METHODS}
    prompt_tokens = [len(model.tokenizer.encode(prompt)) for prompt in PROMPTS]
    for method, objects in found.items():
        assert [list(o) for o in objects] == [KEYS] * len(PROMPTS)
        assert [o["prompt_tokens"] for o in objects] == prompt_tokens
        for o in objects:
            assert o["method"] == method
            assert o["budget"] == {"ddtree": 8, "dflash": 5, "autoregressive": 0}[method]
            assert o["finish_reason"] in ("length", "stop")
            assert 1 <= len(o["tokens"]) <= 24
            assert o["verify_passes"] <= len(o["tokens"]) - 1
            assert o["accept_length"] >= 1 and o["tokens_per_second"] >= 0
            assert len(o["accept_by_depth"]) == (0 if method == "autoregressive" else 5)
        texts = [(o["text"], o["tokens"]) for o in objects]
        assert texts == [(o["text"], o["tokens"]) for o in found["autoregressive"]]
    for o in found["autoregressive"]:
        assert o["accept_length"] == 1.0
        assert o["verify_passes"] == len(o["tokens"]) - 1
    assert len({o["text"] for o in found["ddtree"]}) > 1


def test_json_is_one_batch(lines, monkeypatch):
    """Devices that split requests have work; a prompt says what it says alone, stops included."""
    batches = []
    monkeypatch.setattr(cli, "generate", lambda *a: batches.append(a[1]) or dd.generate(*a))
    drawn = "--temperature", 1, "--seed", 3
    alone = [lines(prompt, *drawn)[0] for prompt in PROMPTS]
    stop = alone[1]["text"][3]
    alone = [lines(prompt, *drawn, "--stop", stop)[0] for prompt in PROMPTS]
    batches.clear()
    found = lines(*PROMPTS, *drawn, "--stop", stop)
    assert batches == [list(PROMPTS)]
    for a, b in zip(alone, found, strict=True):
        assert a | {"tokens_per_second": b["tokens_per_second"]} == b
    assert len(found[1]["text"]) <= 3 and found[1]["finish_reason"] == "stop"


def test_json_in_a_process_of_its_own(folder, lines):
    """Nothing but the objects on stdout, whatever the environment prints."""
    command = [
        sys.executable, "-m", "ddtree_jax", "generate", *PROMPTS[:2], "--json", "--temperature",
        "0.7", "--seed", "3", "--max-new-tokens", "24", "--model", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    wanted = lines(*PROMPTS[:2], "--temperature", 0.7, "--seed", 3)
    assert [o["tokens"] for o in found] == [o["tokens"] for o in wanted]


def test_streams_text_and_a_table(command, model):
    status, out, err = command(*PROMPTS[:2], "--max-new-tokens", 24)
    assert (status, err) == (0, "")
    for prompt in PROMPTS[:2]:
        (done,) = dd.generate(model, prompt, max_new_tokens=24)
        assert prompt + done.text in out
        out = out.partition(prompt + done.text)[2]
        assert "acceptance" in out and "tokens/s" in out
        assert f"{done.verify_passes}" in out and f"{done.accept_length:.2f}" in out


@pytest.mark.parametrize("accepted", [0.97, 1.0])
def test_the_table_fits_a_terminal(accepted):
    """Of 80 columns, at the horizon of the published drafter: a line of its own each method."""
    done = Completion("", [1] * 96, 9, "length", 9, 7.89, [accepted] * 7, [], 63, 0.009)
    console = Console(width=80, file=io.StringIO())
    console.print(_summary([("autoregressive", done), ("dflash", done)]))
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["method", "autoregressive", "dflash"]
    for line in lines[2:]:
        figures = ["9", "96", "7.89", *[f"{100 * accepted:.0f}"] * 7, "10555.6"]
        assert line.split()[1:] == figures


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streaming_equals_generate(model, temperature):
    sampling = dd.Sampling(temperature, seed=9)
    for prompt in PROMPTS:
        (whole,) = dd.generate(model, prompt, sampling=sampling, max_new_tokens=24)
        done = []
        pieces = list(dd.stream(model, prompt, sampling=sampling, max_new_tokens=24, done=done))
        assert "".join(pieces) == whole.text == done[0].text
        assert done[0].tokens == whole.tokens
        assert done[0].verify_passes == whole.verify_passes
        assert all(pieces)


def test_options_are_honoured(lines, model):
    """Each option has the effect it has in Python."""
    prompt = PROMPTS[0]
    sampled = lines(prompt, "--temperature", 1, "--seed", 4, "--method", "dflash")
    python = dd.generate(
        model, prompt, "dflash", sampling=dd.Sampling(1.0, seed=4), max_new_tokens=24
    )
    assert sampled[0]["tokens"] == python[0].tokens
    assert sampled[0]["tokens"] != lines(prompt, "--temperature", 1, "--seed", 5)[0]["tokens"]
    assert sampled[0]["tokens"] != lines(prompt)[0]["tokens"]
    again = lines(prompt, prompt, "--temperature", 1, "--seed", 4)
    assert [o["tokens"] for o in again] == [sampled[0]["tokens"]] * 2  # one seed for all prompts

    wide = lines(prompt, "--budget", 3, "--top-k", 2, "--block-size", 4)[0]
    assert wide["budget"] == 3 and len(wide["accept_by_depth"]) == 3
    assert lines(prompt, "--budget", 0)[0]["accept_by_depth"] == []
    chain = lines(prompt, "--method", "dflash", "--block-size", 2)[0]
    assert chain["budget"] == 1 and len(chain["accept_by_depth"]) == 1
    short = lines(prompt, "--max-new-tokens", 1)[0]
    assert len(short["tokens"]) == 1 and short["verify_passes"] == 0
    assert short["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_dtype(command, monkeypatch, name):
    seen = []

    def load(*arguments, **options):
        seen.append(dd.load(*arguments, **options))
        return seen[0]

    monkeypatch.setattr(cli, "load", load)
    status, out, _ = command("x", "--json", "--max-new-tokens", 3, "--dtype", name)
    assert status == 0 and len(json.loads(out)["tokens"]) == 3
    assert seen[0].weights.dtype == name


CONTEXT = SMALL_TARGET.max_position_embeddings
BAD_OPTIONS = {
    "empty prompt": (["x", ""], "prompts[1]=''"),
    "no prompt": ([], "PROMPT"),
    "negative budget": (["x", "--budget", "-1"], "budget=-1"),
    "budget of words": (["x", "--budget", "many"], "--budget: invalid int value: 'many'"),
    "budget of halves": (["x", "--budget", "1.5"], "--budget: invalid int value: '1.5'"),
    "no candidates": (["x", "--top-k", "0"], "top_k=0"),
    "more candidates than tokens": (["x", "--top-k", VOCAB + 1], f"top_k={VOCAB + 1}"),
    "block beyond the drafter's": (["x", "--block-size", "7"], "block_size=7"),
    "chain beyond the drafter's": (
        ["x", "--block-size", "7", "--method", "dflash"],
        "block_size=7: must be from 2 to the drafter's 6",
    ),
    "block of one": (["x", "--block-size", "1"], "block_size=1"),
    "negative temperature": (["x", "--temperature", "-0.5"], "temperature=-0.5"),
    "temperature nan": (["x", "--temperature", "nan"], "temperature=nan"),
    "temperature inf": (["x", "--temperature", "inf"], "temperature=inf"),
    "negative seed": (["x", "--seed", "-1"], "seed=-1"),
    "negative sample-top-k": (["x", "--sample-top-k", "-1"], "sample-top-k=-1"),
    "seed of 33 bits": (["x", "--seed", 2**32], f"seed={2**32}"),
    "no new tokens": (["x", "--max-new-tokens", "0"], "max_new_tokens=0"),
    "too many new tokens": (
        ["x", "--max-new-tokens", CONTEXT],
        f"prompts[0] of 1 tokens with max_new_tokens={CONTEXT}: together at most "
        f"max_position_embeddings={CONTEXT}",
    ),
    "long prompt": (["x" * CONTEXT], f"prompts[0] of {CONTEXT} tokens"),
    "unknown method": (["x", "--method", "magic"], "--method: invalid choice: 'magic'"),
    "unknown dtype": (["x", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
    "unknown option": (["x", "--colour", "red"], "--colour red"),
}


def assert_refused(result, said):
    status, out, err = result
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("ddtree_jax: error: ") and err.count("\n") == 1


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(command, name):
    arguments, said = BAD_OPTIONS[name]
    assert_refused(command(*arguments), said)


def test_missing_folder(command, tmp_path):
    assert_refused(command("x", model=tmp_path / "nowhere"), "nowhere")
    assert_refused(command("x", model=tmp_path), "config.json: no such file")
    assert_refused(command("x", model="kimi-giga"), "'kimi-giga'")


def test_missing_shard(command, copy):
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.unlink()
    assert_refused(command("x", model=copy), f"{shard.name}: no such shard")


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_truncated_shard(command, copy, size):
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:size])
    assert_refused(command("x", model=copy), f"{shard.name}: truncated")


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_truncated_json(command, copy, name):
    text = (copy / name).read_text()
    (copy / name).write_text(text[: len(text) // 2])
    assert_refused(command("x", model=copy), f"{name}: not valid JSON")


@pytest.mark.parametrize("cut", [-1, -3, -4, -9, 2000, 0])
def test_truncated_ranks(command, copy, cut):
    """Wherever the file ends, whole lines included; only the last line's end may be missing."""
    ranks = copy / RANKS
    whole = ranks.read_bytes()
    ranks.write_bytes(whole[:cut])
    if cut == -1:
        assert command("x", "--max-new-tokens", 1, model=copy)[0] == 0
    else:
        assert_refused(command("x", model=copy), RANKS)


def test_missing_ranks(command, copy):
    (copy / RANKS).unlink()
    assert_refused(command("x", model=copy), f"{RANKS}: no such file")


@pytest.mark.parametrize(
    ("where", "field", "value", "said"),
    [
        ("target", "attn_logit_softcapping", 30.0, "attn_logit_softcapping=30.0"),
        ("target", "scoring_func", "softmax", "scoring_func='softmax'"),
        ("target", "hidden_size", "64", "hidden_size='64'"),
        ("target", "kv_lora_rank", None, "kv_lora_rank is missing"),
        ("drafter", "block_size", 1, "block_size=1"),
        ("drafter", "query_scale", 2.0, "query_scale=2.0"),
        ("drafter", "hidden_size", 32, "hidden_size=32 (target: 64)"),
    ],
)
def test_config_fields(command, copy, where, field, value, said):
    path = copy / ("config.json" if where == "target" else "dflash/config.json")
    config = json.loads(path.read_text())
    (config["text_config"] if where == "target" else config)[field] = value
    path.write_text(json.dumps(config))
    assert_refused(command("x", model=copy), said)


def test_a_target_of_nan_ends_with_an_error(command, copy):
    """One line on stderr and exit status 1; the objects say which prompts ended so."""
    name = "language_model.lm_head.weight"
    shard = copy / json.loads((copy / INDEX).read_text())["weight_map"][name]
    tensors = load_file(shard)
    tensors[name][7] = np.nan
    save_file(tensors, shard)
    status, out, err = command("x", "the", "--json", model=copy)
    assert (status, err) == (1, "ddtree_jax: error: the target produced NaN or infinite logits\n")
    for line in out.splitlines():
        found = json.loads(line)
        assert (found["finish_reason"], found["text"], found["tokens"]) == ("error", "", [])
    assert command("x", model=copy)[0] == 1


def test_version_and_help(capsys):
    for arguments, said in (
        (["--version"], dd.__version__),
        (["--help"], "generate"),
        (["generate", "--help"], "--block-size"),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
        assert said in capsys.readouterr().out
