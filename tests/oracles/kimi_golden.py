"""Write tests/golden/kimi_*: small random targets, published layout, with transformers' outputs.

Weights are drawn with NumPy, rounded to bfloat16 and stored so; transformers computes in float32
from the stored values. README.md names the environment it runs in.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
if len(sys.argv) > 1:  # another folder to write to
    GOLDEN = pathlib.Path(sys.argv[1])
PREFIX = "language_model."
ROUTER_GAP = 2e-3  # smallest distance between the last chosen and the first rejected router score

COMMON = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 10,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "ep_size": 1,
    "pretraining_tp": 1,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 90,
    "eos_token_id": 92,
    "pad_token_id": 95,
    "dtype": "bfloat16",
}


def yarn(spelling: str, **fields) -> dict:
    """YaRN fields of K2.6, updated by `fields`; `spelling` is the key that names the type."""
    return {
        spelling: "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    } | fields


# name -> (text config, wrapped in text_config or not, prompt lengths)
CASES = {
    "kimi_k26": (
        COMMON
        | {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 64,
            "v_head_dim": 8,
            "num_experts_per_tok": 2,
            "rope_scaling": yarn("type"),
        },
        True,
        (37, 9),
    ),
    "kimi_k2": (
        COMMON
        | {
            "rms_norm_eps": 1e-06,
            "max_position_embeddings": 131072,
            "eos_token_id": 91,
            "rope_scaling": yarn("type", factor=32.0, beta_fast=1.0),
        },
        False,
        (37, 9),
    ),
    "kimi_small_yarn": (
        {key: value for key, value in COMMON.items() if key != "rope_theta"}
        | {
            "num_hidden_layers": 4,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "max_position_embeddings": 128,
            "rope_parameters": yarn(
                "rope_type",
                rope_theta=50000.0,
                factor=4.0,
                original_max_position_embeddings=32,
                beta_fast=8.0,
                beta_slow=0.25,
                mscale=0.707,
            ),
        },
        False,
        (70, 5),
    ),
    "kimi_moonlight": (
        COMMON
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "v_head_dim": 12,
            "routed_scaling_factor": 2.446,
            "max_position_embeddings": 8192,
        },
        False,
        (37, 9),
    ),
}


def draw(config: dict, seed: int) -> dict[str, torch.Tensor]:
    """Return random weights under the published keys: bfloat16, the router's bias float32.

    Embedding and latent rows are small, so that rms_norm_eps and the latent norms' 1e-6 both show.
    """
    rng = np.random.default_rng(seed)
    weights = {}

    def store(key, array, dtype=torch.bfloat16):
        weights[key] = torch.from_numpy(np.asarray(array, np.float32)).to(dtype)

    def matrix(key, rows, columns, scale=1.0):
        store(key + ".weight", scale * rng.normal(size=(rows, columns)) / np.sqrt(columns))

    def norm(key, size):
        store(key + ".weight", 1 + 0.25 * rng.normal(size=size))

    def mlp(key, width):
        matrix(key + ".gate_proj", width, hidden, 1.5)
        matrix(key + ".up_proj", width, hidden, 1.5)
        matrix(key + ".down_proj", hidden, width)

    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    latent, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
    store("model.embed_tokens.weight", 0.05 * rng.normal(size=(config["vocab_size"], hidden)))
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        attention = block + ".self_attn"
        norm(block + ".input_layernorm", hidden)
        if q_rank is None:
            matrix(attention + ".q_proj", heads * (nope + rope), hidden)
        else:
            matrix(attention + ".q_a_proj", q_rank, hidden, 0.03)
            norm(attention + ".q_a_layernorm", q_rank)
            matrix(attention + ".q_b_proj", heads * (nope + rope), q_rank)
        kv_a = rng.normal(size=(latent + rope, hidden)) / np.sqrt(hidden)
        kv_a[:latent] *= 0.03
        store(attention + ".kv_a_proj_with_mqa.weight", kv_a)
        norm(attention + ".kv_a_layernorm", latent)
        matrix(attention + ".kv_b_proj", heads * (nope + value), latent)
        matrix(attention + ".o_proj", hidden, heads * value)
        norm(block + ".post_attention_layernorm", hidden)
        if layer < config["first_k_dense_replace"]:
            mlp(block + ".mlp", config["intermediate_size"])
            continue
        experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
        matrix(block + ".mlp.gate", experts, hidden)
        store(
            block + ".mlp.gate.e_score_correction_bias",
            0.2 * rng.normal(size=experts),
            torch.float32,
        )
        for expert in range(experts):
            mlp(f"{block}.mlp.experts.{expert}", width)
        mlp(block + ".mlp.shared_experts", width * config["n_shared_experts"])
    norm("model.norm", hidden)
    matrix("lm_head", config["vocab_size"], hidden)
    return weights


def published_config(text: dict, wrapped: bool) -> dict:
    """Return config.json: `text` itself, or K2.6's multimodal wrapper around it."""
    if not wrapped:
        return text
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": text["bos_token_id"],
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": 94,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": text,
        "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27, "patch_size": 14},
    }


def merge_experts(weights: dict, experts: int) -> dict:
    """Return the state dict of transformers 5: gate rows then up rows, stacked over experts."""
    state = {key: value for key, value in weights.items() if ".mlp.experts." not in key}
    for block in {key.split(".experts.")[0] for key in weights if ".mlp.experts." in key}:
        one = [
            {
                part: weights[f"{block}.experts.{e}.{part}_proj.weight"]
                for part in ("gate", "up", "down")
            }
            for e in range(experts)
        ]
        state[f"{block}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([w["gate"], w["up"]]) for w in one]
        )
        state[f"{block}.experts.down_proj"] = torch.stack([w["down"] for w in one])
    return state


def hand_loaded(text: dict, weights: dict) -> DeepseekV3ForCausalLM:
    """Return the model with the experts merged by `merge_experts`."""
    fields = json.loads(json.dumps(text)) | {"model_type": "deepseek_v3"}
    config = DeepseekV3Config(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = DeepseekV3ForCausalLM(config).float().eval()
    state = {k: v.float() for k, v in merge_experts(weights, text["n_routed_experts"]).items()}
    model.load_state_dict(state, strict=True)
    return model


def library_loaded(folder: pathlib.Path) -> DeepseekV3ForCausalLM:
    """Return the model that transformers itself loads from a golden folder's stored files."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config) | {"model_type": "deepseek_v3"}
    weights = load_file(folder / "model.safetensors")
    with tempfile.TemporaryDirectory() as plain:
        stripped = {key.removeprefix(PREFIX): value for key, value in weights.items()}
        save_file(stripped, pathlib.Path(plain, "model.safetensors"), metadata={"format": "pt"})
        pathlib.Path(plain, "config.json").write_text(json.dumps(text))
        model, report = DeepseekV3ForCausalLM.from_pretrained(
            plain,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"{folder.name}: {report}")
    return model.eval()


@torch.no_grad()
def run(model: DeepseekV3ForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [T, V] and every layer's output [layers, T, hidden], before the final norm."""
    outputs = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: outputs.append(output[0].clone()))
        for layer in model.model.layers
    ]
    logits = model(input_ids=ids, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(outputs)


@torch.no_grad()
def router_facts(model: DeepseekV3ForCausalLM, ids: torch.Tensor) -> tuple[float, float]:
    """Return the smallest gap at the top-k boundary and the share of choices the bias changed."""
    gaps, changed = [], []

    def note(router, args, output):
        scores, k = output[0].sigmoid(), router.top_k
        best = (scores + router.e_score_correction_bias).sort(descending=True).values
        gaps.append((best[:, k - 1] - best[:, k]).min().item())
        plain = scores.topk(k).indices.sort().values
        changed.append((plain != output[2].sort().values).any(-1).float().mean().item())

    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [router.register_forward_hook(note) for router in routers]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(gaps), float(np.mean(changed))


def find_seed(text: dict, lengths: tuple[int, ...]):
    """Return the first seed whose routing has no near tie, with its weights, model and prompts."""
    for seed in range(1000):
        weights = draw(text, seed)
        model = hand_loaded(text, weights)
        rng = np.random.default_rng(10_000 + seed)
        prompts = [torch.from_numpy(rng.integers(0, 90, size=(1, t))) for t in lengths]
        if all(router_facts(model, ids)[0] > ROUTER_GAP for ids in prompts):
            return seed, weights, model, prompts
    raise ValueError("no seed without near ties")


def write(name: str) -> None:
    """Write one golden folder, reload it through transformers and print the agreement."""
    text, wrapped, lengths = CASES[name]
    seed, weights, model, prompts = find_seed(text, lengths)
    expected = {}
    for ids in prompts:
        logits, hidden_states = run(model, ids)
        case = f"T{ids.shape[1]}"
        expected[f"{case}.input_ids"] = ids.to(torch.int32)
        expected[f"{case}.logits"] = logits.contiguous()
        expected[f"{case}.hidden_states"] = hidden_states.contiguous()

    folder = GOLDEN / name
    folder.mkdir(parents=True, exist_ok=True)
    config = published_config(text, wrapped)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    prefix = PREFIX if wrapped else ""
    stored = {prefix + key: value for key, value in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(expected, folder / "expected.safetensors")
    for path in folder.iterdir():
        path.chmod(0o644)

    reloaded, error = library_loaded(folder), 0.0
    for ids in prompts:
        logits, hidden_states = run(reloaded, ids)
        case = f"T{ids.shape[1]}"
        for found, key in ((logits, "logits"), (hidden_states, "hidden_states")):
            error = max(error, (found - expected[f"{case}.{key}"]).abs().max().item())
    if error > 1e-6:
        raise ValueError(f"{name}: reloading changes outputs by {error}")
    gap, changed = router_facts(model, prompts[0])
    attention = model.model.layers[0].self_attn
    print(
        f"{name}: seed {seed}, {sum(path.stat().st_size for path in folder.iterdir())} bytes,"
        f" reload error {error:.1e}, logits std {expected[f'T{lengths[0]}.logits'].std():.2f},"
        f" router gap {gap:.1e}, bias changes {changed:.0%} of choices,"
        f" softmax scale {attention.scaling:.7f},"
        f" rope amplitude {model.model.rotary_emb.attention_scaling:.7f}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case_name in CASES:
        write(case_name)
