"""The Gemma 3 family (Gemma Team, 2025, arXiv:2503.19786), text only.

Layers with a sliding window and their own rope alternate with global ones; norms multiply by 1 + weight and
stand before and after attention and MLP; embeddings are scaled by the root of the hidden size.

Covers Gemma3ForCausalLM and the text part of Gemma3ForConditionalGeneration, whose image encoder is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.attention import AttendFn, Attention, LayerPlace, Placement
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import INERT, ConfigReader, read_layer_windows, require_decoder, rope_from
from jaxserve.models.decoder import Decoder, layer_norm
from jaxserve.models.layers import MLP
from jaxserve.models.names import Path, decoder_names
from jaxserve.models.names import ignored_tensor as ignored_text_tensor
from jaxserve.models.rope import RopeConfig

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_PREFIX = "language_model."  # of the text part's tensors in a file that has images too


class Gemma3Layer(nnx.Module):
    """x += norm(attention(norm x)); x += norm(mlp(norm x))."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, placement: Placement) -> None:
        self.input_layernorm = layer_norm(config, dtype)
        self.self_attn = Attention(config, dtype=dtype, placement=placement)
        self.post_attention_layernorm = layer_norm(config, dtype)
        self.pre_feedforward_layernorm = layer_norm(config, dtype)
        self.mlp = MLP(config, dtype=dtype)
        self.post_feedforward_layernorm = layer_norm(config, dtype)

    def __call__(
        self, x: jax.Array, place: LayerPlace, attend: AttendFn, kv_pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [num_tokens, hidden] -> the same, and the pool."""
        attended, kv_pool = self.self_attn(self.input_layernorm(x), place, attend, kv_pool)
        x = x + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(x), place.num_live)
        return x + self.post_feedforward_layernorm(fed), kv_pool


class Gemma3ForCausalLM(Decoder):
    layer_class = Gemma3Layer


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read config.json of Gemma3ForCausalLM; a key that is neither read nor known to be inert is an error."""
    return _text_config(ConfigReader(raw, inert=INERT), "gemma3_text")


def conditional_config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """The text part of a Gemma3ForConditionalGeneration's config.json."""
    images = {
        "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image", "vision_config",
        "boi_token_id", "eoi_token_id", "image_token_id",
    }  # fmt: skip
    outer = ConfigReader(raw, inert=INERT | images)
    text = dict(outer.mapping("text_config"))
    require_decoder(outer)
    # The outer object decides these two where it has them.
    for key in ("eos_token_id", "tie_word_embeddings"):
        value = outer.get(key)
        if value is not None:
            text[key] = value
    outer.finish()
    return _text_config(ConfigReader(text, inert=INERT, source="config.json: text_config"), "gemma3")


def _text_config(read: ConfigReader, family: str) -> ModelConfig:
    """Published files leave out what equals the config class's defaults: they are the ones here."""
    # Not read by the reference: one stands in newer files, one in older ones.
    read.get("hidden_act")
    read.get("cache_implementation")
    read.require("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    read.require("use_bidirectional_attention", False, default=False)
    # The reference reads this and does not apply it.
    read.require("attn_logit_softcapping", None)
    require_decoder(read)
    hidden, num_heads, num_kv_heads, head_dim = read.heads(256, hidden=2304, num_heads=8, num_kv_heads=4)
    max_positions = read.optional_integer("max_position_embeddings") or 131072
    num_layers = read.optional_integer("num_hidden_layers") or 26
    period = read.optional_integer("sliding_window_pattern")
    period = period or read.optional_integer("_sliding_window_pattern") or 6
    window = read.optional_integer("sliding_window") or 4096
    windows = read_layer_windows(read, num_layers, window, lambda i: (i + 1) % period != 0)
    rope, local_rope = _ropes(read, head_dim, max_positions)
    cap = read.get("final_logit_softcapping")
    bias = read.boolean("attention_bias", False)
    config = ModelConfig(
        family=family,
        vocab_size=read.optional_integer("vocab_size") or 262208,
        hidden_size=hidden,
        intermediate_size=read.optional_integer("intermediate_size") or 9216,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        max_position_embeddings=max_positions,
        qkv_bias=bias,
        o_bias=bias,
        tie_word_embeddings=read.boolean("tie_word_embeddings", True),
        eos_token_ids=read.token_ids("eos_token_id"),
        activation="gelu_tanh",
        attention_scale=read.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_soft_cap=None if cap is None else read.number("final_logit_softcapping"),
        embedding_scale=math.sqrt(hidden),
        qk_norm=True,
        unit_offset_norms=True,
        sandwich_norms=True,
        layer_windows=windows,
    )
    read.finish()
    return config


def _ropes(read: ConfigReader, head_dim: int, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """Of global and of local layers: `rope_parameters` by layer type (transformers 5), or `rope_theta`,
    `rope_scaling` (global layers alone) and `rope_local_base_freq` (4)."""
    theta, local_theta = read.number("rope_theta", 1e6), read.number("rope_local_base_freq", 1e4)
    by_type = read.mapping("rope_parameters")
    if unknown := set(by_type) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"{read.source}: rope_parameters has the key {min(unknown)!r}")
    stated = {**(by_type.get("full_attention") or {}), **read.mapping("rope_scaling")}
    local = by_type.get("sliding_attention") or {}
    return (
        rope_from(read, stated, theta, head_dim, max_positions),
        rope_from(read, local, local_theta, head_dim, max_positions),
    )


def name_table(config: ModelConfig) -> dict[Path, str]:
    return decoder_names(config, _NORMS)


def conditional_name_table(config: ModelConfig) -> dict[Path, str]:
    return decoder_names(config, _NORMS, _PREFIX)


def conditional_ignored_tensor(name: str, config: ModelConfig) -> bool:
    """The image encoder's tensors too."""
    is_image = name.startswith(("vision_tower.", "multi_modal_projector."))
    return is_image or ignored_text_tensor(name.removeprefix(_PREFIX), config)
