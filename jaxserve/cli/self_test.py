"""A model small enough to compute again by hand: the engine's tokens against plain numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def random_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 arrays by the names and shapes of a Hugging Face checkpoint."""
    rng = np.random.default_rng(seed)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    key_value = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]

    def matrix(*shape: int) -> np.ndarray:  # [out, in]
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(CONFIG["vocab_size"], hidden) * 8,
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(CONFIG["vocab_size"], hidden) * 4,
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": np.ones(hidden, np.float32),
            f"{at}post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{at}self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{at}self_attn.k_proj.weight": matrix(key_value, hidden),
            f"{at}self_attn.v_proj.weight": matrix(key_value, hidden),
            f"{at}self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{at}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{at}mlp.up_proj.weight": matrix(inner, hidden),
            f"{at}mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights


def logits(weights: Mapping[str, np.ndarray], token_ids: list[int]) -> np.ndarray:
    """float64 [vocab_size] after the last token: the Llama of the papers, without any cache."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    x = w["model.embed_tokens.weight"][token_ids]  # [tokens, hidden]
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        part = {name.removeprefix(at): value for name, value in w.items() if name.startswith(at)}
        x = x + _attention(part, _norm(x, part["input_layernorm.weight"]))
        y = _norm(x, part["post_attention_layernorm.weight"])
        gate = y @ part["mlp.gate_proj.weight"].T
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (y @ part["mlp.up_proj.weight"].T))
            @ part["mlp.down_proj.weight"].T
        )
    last: np.ndarray = _norm(x[-1], w["model.norm.weight"]) @ w["lm_head.weight"].T
    return last


def greedy(weights: Mapping[str, np.ndarray], prompt: list[int], num_tokens: int) -> list[int]:
    """The most likely continuation."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(logits(weights, token_ids).argmax()))
    return token_ids[len(prompt) :]


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight
    return scaled


def _attention(part: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    n, head_dim = len(x), CONFIG["hidden_size"] // heads
    q = _rotate((x @ part["self_attn.q_proj.weight"].T).reshape(n, heads, head_dim))
    k = _rotate((x @ part["self_attn.k_proj.weight"].T).reshape(n, kv_heads, head_dim))
    v = (x @ part["self_attn.v_proj.weight"].T).reshape(n, kv_heads, head_dim)
    k, v = (np.repeat(array, heads // kv_heads, axis=1) for array in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim)
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", shares, v).reshape(n, heads * head_dim)
    out: np.ndarray = mixed @ part["self_attn.o_proj.weight"].T
    return out


def _rotate(x: np.ndarray) -> np.ndarray:
    """Rotary embedding, halves rotated against each other. x: [tokens, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), CONFIG["rope_theta"] ** (-np.arange(half) / half))[:, None]
    low, high = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)
