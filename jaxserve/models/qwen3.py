"""The Qwen3 family (Yang et al., 2025, arXiv:2505.09388): Llama with RMS norms of the heads of q and k.

Covers Qwen3ForCausalLM and, with a mixture of experts in every layer, Qwen3MoeForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import INERT, ConfigReader, read_layer_windows, read_rope, require_decoder
from jaxserve.models.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    """The shared decoder as it is."""


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read config.json of Qwen3ForCausalLM; a key that is neither read nor known to be inert is an error."""
    read = ConfigReader(raw, inert=INERT)
    num_layers = read.integer("num_hidden_layers")
    window = _window(read)
    first = read.optional_integer("max_window_layers", minimum=0)
    first = 28 if first is None else first  # the config class's default
    windows = read_layer_windows(read, num_layers, window, lambda i: window is not None and i >= first)
    config = ModelConfig(
        **_common(read, "qwen3", default_head_dim=128),
        intermediate_size=read.integer("intermediate_size"),
        num_layers=num_layers,
        layer_windows=windows,
    )
    read.finish()
    return config


def moe_config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read config.json of Qwen3MoeForCausalLM; dense layers among the sparse ones are refused."""
    read = ConfigReader(raw, inert=INERT | {"output_router_logits", "router_aux_loss_coef"})
    read.require("decoder_sparse_step", 1, default=1)
    read.require("mlp_only_layers", [], default=[])
    # Where sliding windows are used, all layers have them: this says nothing.
    read.get("max_window_layers")
    num_layers = read.integer("num_hidden_layers")
    window = _window(read)
    num_experts = read.optional_integer("num_experts") or read.integer("num_local_experts")
    config = ModelConfig(
        **_common(read, "qwen3_moe", default_head_dim=None),
        # Of dense layers, of which there are none.
        intermediate_size=read.optional_integer("intermediate_size") or 0,
        num_layers=num_layers,
        layer_windows=() if window is None else (window,) * num_layers,
        num_experts=num_experts,
        num_experts_per_token=read.integer("num_experts_per_tok"),
        moe_intermediate_size=read.integer("moe_intermediate_size"),
        norm_topk_prob=read.boolean("norm_topk_prob", False),
    )
    read.get("num_local_experts")
    read.finish()
    if config.num_experts_per_token > num_experts:
        raise ConfigError(
            f"config.json: {config.num_experts_per_token} experts a token of {num_experts} experts"
        )
    return config


def _window(read: ConfigReader) -> int | None:
    """Published files state a window and do not use it."""
    read.get("sliding_window")
    return read.integer("sliding_window") if read.boolean("use_sliding_window", False) else None


def _common(read: ConfigReader, family: str, *, default_head_dim: int | None) -> dict[str, Any]:
    """The fields that both read alike."""
    read.require("hidden_act", "silu", default="silu")
    require_decoder(read)
    hidden, num_heads, num_kv_heads, head_dim = read.heads(default_head_dim)
    max_positions = read.integer("max_position_embeddings")
    bias = read.boolean("attention_bias", False)
    return {
        "family": family,
        "vocab_size": read.integer("vocab_size"),
        "hidden_size": hidden,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": read.number("rms_norm_eps", 1e-6),
        "rope": read_rope(read, head_dim, max_positions, default_theta=10000.0),
        "max_position_embeddings": max_positions,
        "qkv_bias": bias,
        "o_bias": bias,
        "tie_word_embeddings": read.boolean("tie_word_embeddings", False),
        "eos_token_ids": read.token_ids("eos_token_id"),
        "qk_norm": True,
    }
