"""The Llama family: pre-norm decoder, grouped-query attention, rotary positions, gated MLP.

Covers LlamaForCausalLM as transformers defines it, with its optional biases and tied embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import INERT, ConfigReader, read_rope, require_decoder
from jaxserve.models.decoder import Decoder
from jaxserve.models.names import Path, decoder_names


class LlamaForCausalLM(Decoder):
    """The shared decoder as it is."""


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read config.json of LlamaForCausalLM; a key that is neither read nor known to be inert is an error."""
    read = ConfigReader(raw, inert=INERT | {"is_llama_config", "pretraining_tp", "transformers.js_config"})
    read.require("hidden_act", "silu", default="silu")
    read.require("rope_interleaved", False, default=False)
    read.require("partial_rotary_factor", 1.0, default=1.0)
    require_decoder(read)
    hidden, num_heads, num_kv_heads, head_dim = read.heads()
    max_positions = read.integer("max_position_embeddings")
    bias = read.boolean("attention_bias", False)
    config = ModelConfig(
        family="llama",
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps"),
        rope=read_rope(read, head_dim, max_positions, default_theta=10000.0),
        max_position_embeddings=max_positions,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read.boolean("mlp_bias", False),
        tie_word_embeddings=read.boolean("tie_word_embeddings", False),
        eos_token_ids=read.token_ids("eos_token_id"),
    )
    read.finish()
    return config


def name_table(config: ModelConfig) -> dict[Path, str]:
    """Path of each parameter in the module -> its tensor's name in a Hugging Face file."""
    return decoder_names(config)
