"""The model in numpy and double precision: the reference for the ONNX graph.

Deliberately plain: no cache tricks, one sequence at a time, explicit positions and an explicit
boolean mask, so that chains, trees and committed branches are all the same function.
"""

import numpy as np


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, positions, theta):
    """Rotary embedding, Hugging Face's rotate_half; x is [heads, tokens, dim]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def split(x, heads):
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def attend(w, prefix, x, positions, mask, config):
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (x @ w[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
    q = rotate(split(q, heads), positions, config["rope_theta"])
    k = rotate(split(k, kv), positions, config["rope_theta"]).repeat(heads // kv, 0)
    v = split(v, kv).repeat(heads // kv, 0)
    scores = np.where(mask, q @ k.swapaxes(1, 2) / np.sqrt(config["head_dim"]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = (weights @ v).swapaxes(0, 1).reshape(len(x), -1)
    return mixed @ w[f"{prefix}.o_proj.weight"].T


def logits(weights, config, ids, positions=None, mask=None):
    """Logits [tokens, vocabulary]; mask[i, j] is True if token i sees token j."""
    ids = np.asarray(ids)
    positions = np.arange(len(ids)) if positions is None else np.asarray(positions)
    mask = np.tri(len(ids), dtype=bool) if mask is None else mask
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    eps = config["rms_norm_eps"]
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        x = x + attend(w, f"{p}.self_attn", norm(x, w[f"{p}.input_layernorm.weight"], eps),
                       positions, mask, config)
        h = norm(x, w[f"{p}.post_attention_layernorm.weight"], eps)
        gate, up = h @ w[f"{p}.mlp.gate_proj.weight"].T, h @ w[f"{p}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{p}.mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, w["model.norm.weight"], eps) @ head.T
