"""Published layouts: round trips of every branch, the order of rows, and every refusal."""

import json
import shutil
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ddtree_jax.checkpoint import (
    _target_pieces,
    leaves_by_path,
    leaves_from_internal,
    load_drafter,
    load_target,
    save_drafter,
    save_target,
)
from ddtree_jax.config import DFlashConfig, KimiConfig, Yarn
from ddtree_jax.read_config import read_drafter_config, read_target_config
from ddtree_jax.shards import INDEX, SINGLE, Tensor
from ddtree_jax.write_config import published_config, published_drafter_config

TARGET = KimiConfig(
    vocab_size=300, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, q_lora_rank=16,
    kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=6, intermediate_size=48,
    moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    first_k_dense_replace=1, routed_scaling_factor=2.827, norm_topk_prob=True, rms_norm_eps=1e-5,
    rope_theta=50000.0, max_position_embeddings=262144, expert_bits=4, eos_token_ids=(46,),
    yarn=Yarn(64.0, 4096, mscale_all_dim=1.0),
)  # fmt: skip
TARGETS = {
    "k26": TARGET,
    "dense experts": replace(TARGET, expert_bits=None, eos_token_ids=(46, 45)),
    "plain queries": replace(TARGET, q_lora_rank=None, yarn=None, n_shared_experts=2),
    "no shared expert": replace(TARGET, n_shared_experts=0, latent_norm_eps=1e-5),
    "no moe layer": replace(TARGET, first_k_dense_replace=3, expert_bits=None, eos_token_ids=()),
    "odd amplitude": replace(TARGET, yarn=Yarn(4.0, 32, 8.0, 0.25, 1.1, 0.7)),
}
DRAFTER = DFlashConfig(
    hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=50000.0, vocab_size=300,
    num_target_layers=3, target_layer_ids=(0, 2), mask_token_id=298, block_size=8,
    layer_types=("sliding_attention", "full_attention"), sliding_window=16,
    yarn=Yarn(64.0, 4096, attention_factor=1.41589, mscale_all_dim=1.0),
)  # fmt: skip
DRAFTERS = {
    "k26": DRAFTER,
    "causal": replace(DRAFTER, causal_sliding=True, yarn=None),
    "full": replace(DRAFTER, layer_types=("full_attention",) * 2, sliding_window=None),
}
EXPERT = "language_model.model.layers.1.mlp.experts.0.gate_proj."
NORM = "language_model.model.norm.weight"


def random_leaves(config, dtype=jnp.bfloat16):
    """Leaves of random values that bf16 holds exactly; all bits of the INT4 words used."""
    rng = np.random.default_rng(0)
    leaves = []
    for leaf in leaves_by_path(config, dtype).values():
        if leaf.dtype == jnp.int32:
            values = rng.integers(-(2**31), 2**31, leaf.shape)
        else:
            values = rng.normal(size=leaf.shape).astype(ml_dtypes.bfloat16)
        leaves.append(jnp.asarray(values.astype(leaf.dtype)))
    return tuple(leaves)


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("name", TARGETS)
def test_target_round_trip(tmp_path, name, wrapped):
    config = TARGETS[name]
    published = published_config(config, wrapped=wrapped)
    assert read_target_config(published) == config
    leaves = random_leaves(config)
    save_target(tmp_path, config, published, leaves, shard_bytes=60_000)
    found_config, found = load_target(tmp_path, jnp.bfloat16)
    assert found_config == config
    assert_same(found, leaves)
    assert_same(load_target(tmp_path, jnp.float32)[1], random_leaves(config, jnp.float32))


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_round_trip(tmp_path, name):
    config = DRAFTERS[name]
    published = published_drafter_config(config)
    assert read_drafter_config(published) == config
    assert published["dflash_config"]["is_causal"] is config.causal_sliding
    leaves = random_leaves(config)
    for shard_bytes, file in ((30_000, INDEX), (2**20, SINGLE)):
        save_drafter(tmp_path, config, published, leaves, shard_bytes)
        assert (tmp_path / file).is_file()
        found_config, found = load_drafter(tmp_path, jnp.bfloat16, TARGET)
        assert found_config == config
        assert_same(found, leaves)
    assert not (tmp_path / INDEX).exists()


@pytest.fixture
def saved(tmp_path):
    save_target(tmp_path, TARGET, published_config(TARGET), random_leaves(TARGET), 60_000)
    return tmp_path


@pytest.fixture
def single(saved):
    """The same checkpoint as one file, easy to damage."""
    tensors = {}
    for shard in sorted(saved.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (saved / INDEX).unlink()
    save_file(tensors, saved / SINGLE)
    return saved


def damage(folder, change):
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def test_layout_is_the_published_one(saved):
    index = json.loads((saved / INDEX).read_text())
    shards = sorted(saved.glob("*.safetensors"))
    assert shards[0].name == f"model-00001-of-{len(shards):06d}.safetensors"
    assert len(shards) > 2 and all(s.stat().st_size < 60_000 for s in shards)
    tensors = {key: value for shard in shards for key, value in load_file(shard).items()}
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    shapes = {
        EXPERT + "weight_packed": ((32, 8), np.int32),
        EXPERT + "weight_scale": ((32, 2), ml_dtypes.bfloat16),
        EXPERT + "weight_shape": ((2,), np.int32),
        "language_model.model.layers.1.mlp.gate.e_score_correction_bias": ((4,), np.float32),
        "language_model.model.layers.2.mlp.shared_experts.up_proj.weight": (
            (32, 64), ml_dtypes.bfloat16,
        ),
        "language_model.model.layers.0.self_attn.kv_b_proj.weight": (
            (36, 32), ml_dtypes.bfloat16,
        ),
        "language_model.lm_head.weight": ((300, 64), ml_dtypes.bfloat16),
    }  # fmt: skip
    for key, expected in shapes.items():
        assert (tensors[key].shape, tensors[key].dtype) == expected
    assert tensors[EXPERT + "weight_shape"].tolist() == [32, 64]
    # A layer: 7 tensors of attention, 2 norms, then 3 of a dense MLP, or router and bias, 3 of the
    # shared expert, and 3 of each of 3 projections an expert. Then embedding, norm and head.
    assert len(tensors) == 3 * 9 + 3 + 2 * (2 + 3 + 4 * 9) + 3


def test_kimi_k26_in_full():
    """Number and size of K2.6's text tensors are those of the public index."""
    config = replace(
        TARGET, vocab_size=163840, hidden_size=7168, num_hidden_layers=61, num_attention_heads=64,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=384,
        num_experts_per_tok=8,
    )  # fmt: skip
    pieces = {piece.key: piece for piece in _target_pieces(config, "language_model.")}
    tensors = [Tensor(p.key, p.shape, np.dtype(p.dtypes[0])) for p in pieces.values()]
    assert len(tensors) == 208_215
    assert sum(t.data_bytes for t in tensors) / 2**30 == pytest.approx(553.3974, abs=1e-4)
    down = pieces["language_model.model.layers.60.mlp.experts.383.down_proj.weight_packed"]
    assert (down.shape, down.index) == ((7168, 256), (59, 383))


def test_order_of_rows(single):
    """Published pairs of RoPE are neighbours, ours are half a head apart; kv_b_proj is two."""
    tensors = load_file(single / SINGLE)
    config, leaves = load_target(single, jnp.bfloat16)
    ours = dict(zip(leaves_by_path(config, jnp.bfloat16), leaves, strict=True))
    attention = "language_model.model.layers.2.self_attn."
    published = tensors[attention + "q_b_proj.weight"].reshape(2, 20, 16)
    order = [*range(12), 12, 14, 16, 18, 13, 15, 17, 19]
    found = np.asarray(ours["layers/2/self_attn/q_b_proj/weight"]).reshape(2, 20, 16)
    assert (found == published[:, order]).all()
    published = tensors[attention + "kv_a_proj_with_mqa.weight"]
    order = [*range(32), 32, 34, 36, 38, 33, 35, 37, 39]
    found = np.asarray(ours["layers/2/self_attn/kv_a_proj_with_mqa/weight"])
    assert (found == published[order]).all()
    published = tensors[attention + "kv_b_proj.weight"].reshape(2, 18, 32)
    assert (np.asarray(ours["layers/2/self_attn/kv_b_key"]) == published[:, :12]).all()
    assert (np.asarray(ours["layers/2/self_attn/kv_b_value"]) == published[:, 12:]).all()
    packed = tensors["language_model.model.layers.2.mlp.experts.3.up_proj.weight_packed"]
    assert (np.asarray(ours["experts/up_words"])[1, 3] == packed).all()


def test_skipped_and_tolerated_tensors(single):
    def change(tensors):
        tensors["vision_tower.patch_embed.proj.weight"] = np.zeros(3, np.float32)
        tensors["mm_projector.proj.0.weight"] = np.zeros(3, np.float32)
        attention = "language_model.model.layers.0.self_attn."
        tensors[attention + "rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        for key in tensors:
            if key.endswith("weight_shape"):
                tensors[key] = tensors[key].astype(np.int64)

    damage(single, change)
    assert_same(load_target(single, jnp.bfloat16)[1], random_leaves(TARGET))


def put(key, value):
    return lambda tensors: tensors.update({key: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(NORM), f"1 of .* tensors missing: {NORM}$"),
        (
            lambda t: [t.pop(k) for k in list(t) if ".experts.3." in k],
            r"18 of .* tensors missing: language_model\.model\.layers\.1.*, \.\.\.",
        ),
        (put("language_model.model.extra", np.zeros(1)), "1 of .* tensors unexpected: .*extra"),
        (put(NORM, np.zeros(65, ml_dtypes.bfloat16)), r"norm.weight: shape \[65\], must be \[64\]"),
        (put(NORM, np.zeros(64, np.int32)), "norm.weight: dtype I32, must be BF16 or"),
        (
            put(EXPERT + "weight_packed", np.zeros((32, 8), np.float32)),
            "weight_packed: dtype F32, must be I32",
        ),
        (
            put(EXPERT + "weight_scale", np.zeros((32, 2), np.float32)),
            "weight_scale: dtype F32, must be BF16",
        ),
        (
            put(EXPERT + "weight_shape", np.array([64, 32], np.int32)),
            r"gate_proj.weight_shape: says \[64, 32\], the config wants \[32, 64\]",
        ),
    ],
)
def test_refuses_tensors(single, change, said):
    damage(single, change)
    with pytest.raises(ValueError, match=said):
        load_target(single, jnp.bfloat16)


def test_refuses_incomplete_folders(saved, tmp_path_factory):
    def copy():
        folder = tmp_path_factory.mktemp("copy")
        return shutil.copytree(saved, folder, dirs_exist_ok=True)

    first = sorted(saved.glob("*.safetensors"))[0].name
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_target(saved / "nowhere", jnp.bfloat16)
    folder = copy()
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        load_target(folder, jnp.bfloat16)
    folder = copy()
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        load_target(folder, jnp.bfloat16)
    folder = copy()
    (folder / INDEX).unlink()
    with pytest.raises(FileNotFoundError, match=f"holds neither {SINGLE} nor {INDEX}"):
        load_target(folder, jnp.bfloat16)
    folder = copy()
    (folder / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="'weight_map' must map"):
        load_target(folder, jnp.bfloat16)
    folder = copy()
    (folder / first).unlink()
    with pytest.raises(FileNotFoundError, match=f"{first}: no such shard, though {INDEX} names it"):
        load_target(folder, jnp.bfloat16)
    folder = copy()
    (folder / first).write_bytes((saved / first).read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{first}: truncated or not a safetensors file"):
        load_target(folder, jnp.bfloat16)
    folder = copy()
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["language_model.lm_head.weight"] = "model-00002-of-" + first[-18:]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which does not hold it"):
        load_target(folder, jnp.bfloat16)


def test_refuses_a_drafter_of_another_target(tmp_path):
    save_drafter(tmp_path, DRAFTER, published_drafter_config(DRAFTER), random_leaves(DRAFTER))
    with pytest.raises(ValueError, match="the drafter does not fit the target: vocab_size=300"):
        load_drafter(tmp_path, jnp.bfloat16, replace(TARGET, vocab_size=301))


def test_refuses_to_save(tmp_path):
    leaves, published = random_leaves(TARGET), published_config(TARGET)
    with pytest.raises(ValueError, match="does not describe"):
        save_target(tmp_path, replace(TARGET, rope_theta=1e4), published, leaves)
    with pytest.raises(ValueError, match="leaves, must be"):
        save_target(tmp_path, TARGET, published, leaves[1:])
    with pytest.raises(ValueError, match="embed_tokens/weight: shape"):
        save_target(tmp_path, TARGET, published, leaves[::-1])
    with pytest.raises(ValueError, match="lm_head.weight: 38400 bytes do not fit"):
        save_target(tmp_path, TARGET, published, leaves, shard_bytes=30_000)
    assert not any(tmp_path.iterdir())


def test_leaves_from_internal():
    leaves = random_leaves(TARGET)
    paths = leaves_by_path(TARGET, jnp.float32)
    assert {"layers/0/self_attn/q_b_proj/weight", "experts/gate_words"} <= set(paths)
    tensors = {path: np.asarray(leaf) for path, leaf in zip(paths, leaves, strict=True)}
    assert_same(leaves_from_internal(TARGET, tensors, jnp.bfloat16), leaves)
    wide = random_leaves(TARGET, jnp.float32)
    assert_same(leaves_from_internal(TARGET, tensors, jnp.float32), wide)
    drafter = dict(zip(leaves_by_path(DRAFTER, jnp.bfloat16), random_leaves(DRAFTER), strict=True))
    assert_same(leaves_from_internal(DRAFTER, drafter, jnp.bfloat16), random_leaves(DRAFTER))
    with pytest.raises(ValueError, match="tensors unexpected: extra"):
        leaves_from_internal(TARGET, tensors | {"extra": np.zeros(1)}, jnp.float32)
    with pytest.raises(ValueError, match="norm/weight: shape"):
        bad = tensors | {"norm/weight": np.zeros(3, np.float32)}
        leaves_from_internal(TARGET, bad, jnp.float32)
    with pytest.raises(ValueError, match="experts/gate_words: dtype float32"):
        bad = tensors | {"experts/gate_words": tensors["experts/gate_words"].astype(np.float32)}
        leaves_from_internal(TARGET, bad, jnp.float32)
