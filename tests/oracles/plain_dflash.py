"""The DFlash drafter in plain NumPy, float64, written from the paper's description.

It keeps no state and takes no shortcut: every call recomputes everything. Weights are a dict of the
published keys (numpy arrays of any float type), config is the parsed config.json.

Context row j holds the taps of the token at position j; the root stands at position S, where its
own taps do not exist yet, and mask row k at S + k.
"""

import math

import numpy as np

UNSUPPORTED = (
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "attention_sink_bias",
    "attention_value_scale",
    "causal_head",
    "projector_type",
    "conv_kernel_size",
)


def array(values) -> np.ndarray:
    return np.asarray(values).astype(np.float64)


def rms_norm(x: np.ndarray, weight, eps: float) -> np.ndarray:
    """Normalise the last axis."""
    return array(weight) * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rope_frequencies(config: dict) -> tuple[np.ndarray, float]:
    """Return one frequency per pair [head_dim / 2] and the factor on cos and sin."""
    head_dim = config["head_dim"]
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or scaling["rope_theta"]
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return np.array(plain), 1.0
    if kind not in ("yarn", "deepseek_yarn"):
        raise ValueError(f"rope type {kind!r} is not described here")
    if scaling.get("attention_factor") is None:
        raise ValueError("YaRN needs an explicit attention_factor: sources disagree on a default")

    def pair_of(rotations):
        """The (fractional) pair that turns `rotations` times within the original context."""
        original = scaling["original_max_position_embeddings"]
        return head_dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_of(scaling["beta_slow"])), head_dim - 1)
    frequencies = []
    for i, frequency in enumerate(plain):
        slow = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append((1 - slow) * frequency + slow * frequency / scaling["factor"])
    return np.array(frequencies), float(scaling["attention_factor"])


def rotate(x: np.ndarray, positions, config: dict) -> np.ndarray:
    """Rotate x [T, heads, head_dim]; dimension i is paired with i + head_dim / 2."""
    frequencies, factor = rope_frequencies(config)
    half = config["head_dim"] // 2
    out = np.empty_like(x)
    for t, position in enumerate(positions):
        cos, sin = factor * np.cos(position * frequencies), factor * np.sin(position * frequencies)
        first, second = x[t, :, :half], x[t, :, half:]
        out[t, :, :half] = first * cos - second * sin
        out[t, :, half:] = second * cos + first * sin
    return out


def linear(weights: dict, key: str, x: np.ndarray) -> np.ndarray:
    """Apply the projection `key`, with its bias where one is stored."""
    y = x @ array(weights[key + ".weight"]).T
    return y + array(weights[key + ".bias"]) if key + ".bias" in weights else y


def heads(weights: dict, config: dict, layer: int, name: str, x: np.ndarray) -> np.ndarray:
    """Project x [T, H] to [T, heads, head_dim]; queries and keys are normalised per head."""
    attention = f"layers.{layer}.self_attn."
    y = linear(weights, f"{attention}{name}_proj", x).reshape(len(x), -1, config["head_dim"])
    if name == "v":
        return y
    return rms_norm(y, weights[f"{attention}{name}_norm.weight"], config["rms_norm_eps"])


def context_features(weights: dict, config: dict, context_taps) -> np.ndarray:
    """Fuse taps [S, m * H_target] into features [S, H], shared by all layers."""
    fused = linear(weights, "fc", array(context_taps))
    return rms_norm(fused, weights["hidden_norm.weight"], config["rms_norm_eps"])


def context_kv(weights: dict, config: dict, context_taps) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each layer's context keys (normalised, rotated) and values, [S, kv_heads, d]."""
    features = context_features(weights, config, context_taps)
    positions = range(len(features))
    return [
        (
            rotate(heads(weights, config, layer, "k", features), positions, config),
            heads(weights, config, layer, "v", features),
        )
        for layer in range(config["num_hidden_layers"])
    ]


def visible(q_position: int, k_position: int, window: int | None, causal: bool) -> bool:
    """Say whether a query sees a key. The window counts the query's own position.

    Where nothing is causal the window also bounds how far a query sees ahead, as in dflash 0.1.0;
    that matters only when the window is smaller than the block.
    """
    if causal and k_position > q_position:
        return False
    return window is None or abs(q_position - k_position) < window


def sliding_is_causal(config: dict) -> bool:
    """Say whether sliding layers are causal inside the block; without the flag they are.

    The flag stands in dflash_config or, as dflash 0.1.0 reads it, at the top level.
    """
    flag = config["dflash_config"].get("is_causal", config.get("is_causal"))
    return True if flag is None else bool(flag)


def drafter_logits(
    weights: dict,
    config: dict,
    embed,
    lm_head,
    context_taps,
    root_token: int,
    block_size: int | None = None,
    sliding_causal: bool | None = None,
) -> np.ndarray:
    """Return logits [block_size - 1, V] of the tokens after the root.

    Embed and lm_head [V, H] are the target's own; context_taps [S, m * H_target] belong to the
    tokens before the root. block_size counts the root and defaults to the config's.
    sliding_causal overrides the config's flag; full layers are never causal.
    """
    options = config["dflash_config"]
    if refused := [key for key in UNSUPPORTED if options.get(key) is not None]:
        raise ValueError(f"not described here: {refused}")
    rows = block_size or config.get("block_size") or options["block_size"]
    causal = sliding_is_causal(config) if sliding_causal is None else sliding_causal
    eps = config["rms_norm_eps"]
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    context, start = context_kv(weights, config, context_taps), len(context_taps)
    k_positions, q_positions = range(start + rows), range(start, start + rows)

    tokens = [root_token] + [options["mask_token_id"]] * (rows - 1)
    x = np.stack([array(embed[token]) for token in tokens])
    for layer, (context_k, context_v) in enumerate(context):
        block = f"layers.{layer}."
        sliding = config["layer_types"][layer] == "sliding_attention"
        window = config["sliding_window"] if sliding else None

        normed = rms_norm(x, weights[block + "input_layernorm.weight"], eps)
        q = rotate(heads(weights, config, layer, "q", normed), q_positions, config)
        block_k = rotate(heads(weights, config, layer, "k", normed), q_positions, config)
        k = np.concatenate([context_k, block_k])
        v = np.concatenate([context_v, heads(weights, config, layer, "v", normed)])
        out = np.empty_like(q)
        for row, q_position in enumerate(q_positions):
            seen = [j for j in k_positions if visible(q_position, j, window, sliding and causal)]
            for head in range(config["num_attention_heads"]):
                keys, values = k[seen, head // groups], v[seen, head // groups]
                scores = keys @ q[row, head] / math.sqrt(config["head_dim"])
                p = np.exp(scores - scores.max())
                out[row, head] = p @ values / p.sum()
        x = x + linear(weights, block + "self_attn.o_proj", out.reshape(rows, -1))

        normed = rms_norm(x, weights[block + "post_attention_layernorm.weight"], eps)
        gate = silu(linear(weights, block + "mlp.gate_proj", normed))
        up = linear(weights, block + "mlp.up_proj", normed)
        x = x + linear(weights, block + "mlp.down_proj", gate * up)
    return rms_norm(x, weights["norm.weight"], eps)[1:] @ array(lm_head).T
