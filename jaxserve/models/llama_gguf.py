"""Llama from GGUF files: their names, their order of rows, their keys."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError, UnsupportedModelError
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import ConfigReader
from jaxserve.models.rope import RopeConfig

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_ROPE_FACTORS = "rope_freqs.weight"


def gguf_name(hf_name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    stem, _, kind = hf_name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def from_gguf(hf_name: str, value: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Undo GGUF's reordering of q and k rows (it pairs 2i with 2i+1 where this module pairs halves)."""
    for projection, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
        if f".{projection}." in hf_name:
            pairs = value.reshape(heads, config.head_dim // 2, 2, *value.shape[1:])
            return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)
    return value


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    """Read the `llama.*` keys; an unknown one is an error."""
    prefix = "llama."
    read = ConfigReader(
        {k.removeprefix(prefix): metadata[k] for k in metadata if k.startswith(prefix)},
        inert=frozenset({"vocab_size", "tensor_data_layout"}),
        source="GGUF metadata",
    )
    hidden = read.integer("embedding_length")
    num_heads = read.integer("attention.head_count")
    head_dim = read.optional_integer("attention.key_length") or hidden // num_heads
    if (read.optional_integer("attention.value_length") or head_dim) != head_dim:
        raise UnsupportedModelError("GGUF metadata: value heads of another length than key heads")
    read.require("rope.dimension_count", head_dim, default=head_dim)
    read.require("expert_count", 0, default=0)
    read.require("expert_used_count", 0, default=0)
    max_positions = read.integer("context_length")
    vocab_size, embed_hidden = tensors["token_embd.weight"].shape
    config = ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=read.integer("feed_forward_length"),
        num_layers=read.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=read.optional_integer("attention.head_count_kv") or num_heads,
        head_dim=head_dim,
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(read, head_dim, max_positions),
        max_position_embeddings=max_positions,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
        eos_token_ids=_token_id(metadata, "tokenizer.ggml.eos_token_id"),
    )
    read.finish()
    if embed_hidden != hidden:
        raise ConfigError(
            f"GGUF metadata: embedding_length {hidden} but token_embd.weight has {embed_hidden} columns"
        )
    return config


def _token_id(metadata: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = metadata.get(key)
    return () if value is None else (int(value),)


def _gguf_rope(read: ConfigReader, head_dim: int, max_positions: int) -> RopeConfig:
    theta = read.number("rope.freq_base", 10000.0)
    kind = read.text("rope.scaling.type", "none")
    factor = read.number("rope.scaling.factor", 1.0)
    legacy = read.number("rope.scale_linear", 1.0)
    original = read.optional_integer("rope.scaling.original_context_length")
    read.require("rope.scaling.finetuned", True, False, default=False)
    attention_factor = read.number("rope.scaling.attn_factor", 1.0)
    if attention_factor != 1.0:
        raise UnsupportedModelError("GGUF metadata: rope.scaling.attn_factor is not supported")
    base = functools.partial(RopeConfig, theta, head_dim, max_positions)
    if kind == "none" and legacy != 1.0:
        kind, factor = "linear", legacy
    if kind == "none":
        return base()
    if kind == "linear":
        return base("linear", {"factor": factor})
    if kind == "yarn":
        parameters = {"factor": factor, "original_max_position_embeddings": original}
        return base("yarn", parameters)
    raise UnsupportedModelError(f"GGUF metadata: rope.scaling.type {kind!r} is not supported")
