"""Files that are no checkpoint's: one error that names the file, whatever stands in it."""

import json
import shutil

import pytest
from checkpoint import write_checkpoint

import ddtree_jax as dd
from ddtree_jax.shards import CONFIG, INDEX


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def refused(folder, *said):
    with pytest.raises(ValueError) as caught:
        dd.load(folder)
    message = str(caught.value)
    assert all(part in message for part in said), message
    assert "\n" not in message and len(message) < 600


DEEP = "[" * 100_000 + "]" * 100_000
TEXTS = {
    "nothing": ("", "not valid JSON"),
    "a list": ("[1, 2]", "must hold a JSON object, not list"),
    "a text": ('"config"', "must hold a JSON object, not str"),
    "null": ("null", "must hold a JSON object, not NoneType"),
    "not UTF-8": (b'{"a": "\xff"}', "not valid JSON"),
    "NaN": ('{"rope_theta": NaN}', "not valid JSON: NaN is no JSON number"),
    "infinity": ('{"rope_theta": -Infinity}', "not valid JSON: -Infinity is no JSON number"),
    "5000 digits": ('{"rope_theta": 1' + "0" * 5000 + "}", "not valid JSON"),
    "deep": (DEEP, "not valid JSON"),
    "deep inside": ('{"id2label": ' + DEEP + "}", "not valid JSON"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_json(folder, name):
    text, said = TEXTS[name]
    for path in (folder / CONFIG, folder / "dflash" / CONFIG, folder / INDEX):
        before = path.read_bytes()
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        refused(folder, f"{path}: ", said)
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("rope_theta", "1e400", "rope_theta=inf: must be a finite number"),
        ("rope_theta", "1" + "0" * 400, "rope_theta=1000"),
        ("eos_token_id", "[[1]]", "eos_token_id=[1]: must be a token id"),
        ("hidden_size", "[" * 500 + "]" * 500, "hidden_size="),
        ("hidden_size", '{"a": 1}', "hidden_size="),
        ("rope_scaling", "[1]", "rope_scaling=[1]: must be an object or null"),
        ("dflash_config", "[1]", "dflash_config=[1]"),
        ("text_config", "[1]", "text_config=[1]"),
    ],
)
def test_fields(folder, field, text, said):
    """The file, the field and the value."""
    drafter, wrapper = field == "dflash_config", field == "text_config"
    path = folder / "dflash" / CONFIG if drafter else folder / CONFIG
    config = json.loads(path.read_text())
    (config if drafter or wrapper else config["text_config"])[field] = "HERE"
    path.write_text(json.dumps(config).replace('"HERE"', text))
    refused(folder, f"{path}: ", said)


@pytest.mark.parametrize(
    "shard", [5, None, True, ["a"], {"a": 1}, "", ".", "../copy/model.safetensors", "/etc/passwd"]
)
def test_weight_map(folder, shard):
    index = json.loads((folder / INDEX).read_text())
    key = sorted(index["weight_map"])[-1]
    index["weight_map"][key] = shard
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, f"{folder / INDEX}: 'weight_map' places {key!r} in {shard!r}")


@pytest.mark.parametrize("placed", [None, [], {}, "model.safetensors", 3])
def test_no_weight_map(folder, placed):
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    refused(folder, f"{folder / INDEX}: 'weight_map' must map")


def test_a_drafter_that_is_no_folder(folder):
    """Not the same as no drafter at all."""
    shutil.move(folder / "dflash", folder / "elsewhere")
    assert dd.load(folder).drafter_config is None
    (folder / "dflash").write_text("elsewhere")
    refused(folder, f"{folder / 'dflash'}: is a file")
    (folder / "dflash").unlink()
    (folder / "dflash").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match="dflash: no such folder"):
        dd.load(folder)
    (folder / "dflash").unlink()
    (folder / "dflash").symlink_to("elsewhere")
    assert dd.load(folder).drafter_config is not None
