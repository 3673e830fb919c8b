"""Write tests/golden/dflash_small: a small random drafter, published layout, and its logits.

The stored logits come from the vectorised torch implementation below (float64), which shares no
code with plain_dflash.py; both must agree to 1e-10. README.md names the environment it runs in.
"""

import json
import math
import pathlib
import sys

import numpy as np
import plain_dflash
import torch
from safetensors.torch import load_file, save_file

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
FOLDER = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else GOLDEN) / "dflash_small"
TOLERANCE = 1e-10
CASES = ((23, 8), (23, 5), (6, 8), (1, 8))  # context length, block size

CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
    "use_sliding_window": True,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "attention_factor": 1.4158883083359673,
    },
    "vocab_size": 96,
    "num_target_layers": 10,
    "block_size": 8,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "dflash_config": {"mask_token_id": 93, "target_layer_ids": [1, 4, 7], "is_causal": False},
}


def draw(seed: int) -> tuple[dict, dict]:
    """Return the drafter's weights under the published keys and the target's embed and lm_head.

    fc and the embedding are small, so that rms_norm_eps shows.
    """
    rng = np.random.default_rng(seed)
    hidden, inner, vocab = (
        CONFIG[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    head_dim = CONFIG["head_dim"]
    queries, keys = (
        CONFIG[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads")
    )
    taps = len(CONFIG["dflash_config"]["target_layer_ids"])

    def stored(values):
        return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)

    def matrix(rows, columns, scale=1.0):
        return stored(scale * rng.normal(size=(rows, columns)) / np.sqrt(columns))

    def norm(size):
        return stored(1 + 0.25 * rng.normal(size=size))

    weights = {
        "fc.weight": matrix(hidden, taps * hidden, 0.03),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        weights |= {
            f"layers.{layer}.{key}.weight": value
            for key, value in {
                "input_layernorm": norm(hidden),
                "post_attention_layernorm": norm(hidden),
                "self_attn.q_proj": matrix(queries, hidden),
                "self_attn.k_proj": matrix(keys, hidden),
                "self_attn.v_proj": matrix(keys, hidden),
                "self_attn.o_proj": matrix(hidden, queries),
                "self_attn.q_norm": norm(head_dim),
                "self_attn.k_norm": norm(head_dim),
                "mlp.gate_proj": matrix(inner, hidden, 1.5),
                "mlp.up_proj": matrix(inner, hidden, 1.5),
                "mlp.down_proj": matrix(hidden, inner),
            }.items()
        }
    embed = stored(0.05 * rng.normal(size=(vocab, hidden)))
    return weights, {"embed": embed, "lm_head": matrix(vocab, hidden)}


def torch_drafter(weights, config, target, taps, root, block_size, sliding_causal):
    """Return logits [block_size - 1, V] and context keys and values [layers, S, kv_heads, d]."""
    w = {key: value.double() for key, value in weights.items()}
    eps, width = config["rms_norm_eps"], config["head_dim"]
    context = len(taps)
    positions = torch.arange(context + block_size, dtype=torch.float64)

    rope = config["rope_scaling"]
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    base = torch.tensor(config["rope_theta"], dtype=torch.float64) ** -exponent
    turns = torch.tensor([rope["beta_fast"], rope["beta_slow"]], dtype=torch.float64)
    edge = width * torch.log(rope["original_max_position_embeddings"] / (2 * math.pi * turns))
    edge = edge / (2 * math.log(config["rope_theta"]))
    low, high = edge[0].floor().clamp(min=0), edge[1].ceil().clamp(max=width - 1)
    ramp = ((torch.arange(width // 2) - low) / (high - low)).clamp(0, 1)
    angle = torch.outer(positions, torch.lerp(base, base / rope["factor"], ramp))
    phase = torch.polar(torch.full_like(angle, rope["attention_factor"]), angle)[:, None]

    def norm(x, key):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], w[key + ".weight"], eps)

    def turn(x, phase):
        z = torch.complex(*x.chunk(2, dim=-1)) * phase
        return torch.cat([z.real, z.imag], dim=-1)

    features = norm(taps.double() @ w["fc.weight"].T, "hidden_norm")
    ids = torch.full((block_size,), config["dflash_config"]["mask_token_id"])
    ids[0] = root
    x = target["embed"].double()[ids]
    distance = positions[context:, None] - positions[None]
    all_keys, all_values = [], []
    for layer, kind in enumerate(config["layer_types"]):
        at = f"layers.{layer}."
        normed = norm(x, at + "input_layernorm")
        both = torch.cat([features, normed])
        q = (normed @ w[at + "self_attn.q_proj.weight"].T).unflatten(-1, (-1, width))
        k = (both @ w[at + "self_attn.k_proj.weight"].T).unflatten(-1, (-1, width))
        v = (both @ w[at + "self_attn.v_proj.weight"].T).unflatten(-1, (-1, width))
        q = turn(norm(q, at + "self_attn.q_norm"), phase[context:])
        k = turn(norm(k, at + "self_attn.k_norm"), phase)
        all_keys.append(k[:context])
        all_values.append(v[:context])
        mask = torch.ones_like(distance, dtype=torch.bool)
        if kind == "sliding_attention":
            mask = distance.abs() < config["sliding_window"]
            if sliding_causal:
                mask = mask & (distance >= 0)
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=mask, enable_gqa=True
        )
        x = x + attended[0].transpose(0, 1).flatten(1) @ w[at + "self_attn.o_proj.weight"].T
        normed = norm(x, at + "post_attention_layernorm")
        gate = torch.nn.functional.silu(normed @ w[at + "mlp.gate_proj.weight"].T)
        up = normed @ w[at + "mlp.up_proj.weight"].T
        x = x + (gate * up) @ w[at + "mlp.down_proj.weight"].T
    logits = norm(x, "norm")[1:] @ target["lm_head"].double().T
    return logits, torch.stack(all_keys), torch.stack(all_values)


def main(seed: int = 0) -> None:
    """Write the golden folder, read it back and compare both implementations on it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    drawn, drawn_target = draw(seed)
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    save_file(drawn, FOLDER / "model.safetensors", metadata={"format": "pt"})
    save_file(drawn_target, FOLDER / "target.safetensors")
    config = json.loads((FOLDER / "config.json").read_text())
    weights = load_file(FOLDER / "model.safetensors")
    target = load_file(FOLDER / "target.safetensors")
    plain_weights = {key: value.double().numpy() for key, value in weights.items()}
    plain_target = {key: value.double().numpy() for key, value in target.items()}

    rng = np.random.default_rng(seed + 1)
    longest = max(length for length, _ in CASES)
    columns = weights["fc.weight"].shape[1]
    taps = torch.from_numpy(rng.normal(size=(longest, columns)).astype(np.float32))
    roots = rng.integers(0, 90, size=len(CASES))
    expected, error = {"context_taps": taps}, 0.0
    for (length, block_size), root in zip(CASES, roots.tolist(), strict=True):
        case = f"S{length}.F{block_size}"
        inputs = weights, config, target, taps[:length], root, block_size
        free, keys, values = torch_drafter(*inputs, False)
        causal, _, _ = torch_drafter(*inputs, True)
        expected[case + ".root"] = torch.tensor([root], dtype=torch.int32)
        expected[case + ".logits"] = free
        expected[case + ".logits_sliding_causal"] = causal
        if length == longest:
            expected["context_keys"], expected["context_values"] = keys, values

        plain_taps = taps[:length].numpy()
        plain_inputs = plain_weights, config, *plain_target.values(), plain_taps, root, block_size
        for logits, flag in ((free, None), (causal, True)):
            plain = plain_dflash.drafter_logits(*plain_inputs, sliding_causal=flag)
            error = max(error, np.abs(plain - logits.numpy()).max())
        for layer, pair in enumerate(plain_dflash.context_kv(plain_weights, config, plain_taps)):
            for plain, stacked in zip(pair, (keys, values), strict=True):
                error = max(error, np.abs(plain - stacked[layer].numpy()).max())
        print(
            f"{case}: logits std {free.std():.2f},"
            f" causal sliding layers change logits by {(free - causal).abs().max():.2f}"
        )
    if error > TOLERANCE:
        raise ValueError(f"the two implementations differ by {error}")
    save_file({k: v.contiguous() for k, v in expected.items()}, FOLDER / "expected.safetensors")
    for path in FOLDER.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"dflash_small: {size} bytes, NumPy against torch {error:.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
