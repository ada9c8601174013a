"""Tensor names of decoders in Hugging Face files.

A name table maps a parameter's path in a module with a list of layers to its tensor's name. A path that
ends in a number means that row of the parameter: experts are one tensor each in files, one array here.
`jaxserve.weights` finds the same paths in modules whose layers are stacked.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.models.config import ModelConfig

Path = tuple[str | int, ...]
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def decoder_names(config: ModelConfig, norms: Sequence[str] = _NORMS, prefix: str = "") -> dict[Path, str]:
    """The table of a `Decoder`; `norms` are a layer's own, `prefix` goes before every name."""
    table: dict[Path, str] = {
        ("embed_tokens", "weight"): f"{prefix}model.embed_tokens.weight",
        ("norm", "weight"): f"{prefix}model.norm.weight",
    }
    if not config.tie_word_embeddings:
        table["lm_head", "weight"] = f"{prefix}lm_head.weight"
    parts = [*((norm, "weight") for norm in norms), *_attention(config), *_mlp(config)]
    for i in range(config.num_layers):
        for part in parts:
            table["layers", i, *part] = f"{prefix}model.layers.{i}.{'.'.join(part)}"
        for e in range(config.num_experts):
            for projection in _MLP:
                name = f"{prefix}model.layers.{i}.mlp.experts.{e}.{projection}.weight"
                table["layers", i, "mlp", "experts", projection, e] = name
    return table


def _attention(config: ModelConfig) -> list[tuple[str, ...]]:
    """Parts whose path in the layer reads as their name does."""
    parts: list[tuple[str, ...]] = [("self_attn", projection, "weight") for projection in _ATTENTION]
    if config.qkv_bias:
        parts += [("self_attn", projection, "bias") for projection in _ATTENTION[:3]]
    if config.o_bias:
        parts.append(("self_attn", "o_proj", "bias"))
    if config.qk_norm:
        parts += [("self_attn", norm, "weight") for norm in ("q_norm", "k_norm")]
    return parts


def _mlp(config: ModelConfig) -> list[tuple[str, ...]]:
    if config.num_experts:
        return [("mlp", "gate", "weight")]
    kinds = ("weight", "bias") if config.mlp_bias else ("weight",)
    return [("mlp", projection, kind) for projection in _MLP for kind in kinds]


def ignored_tensor(name: str, config: ModelConfig) -> bool:
    """Tensors that files carry and the forward pass does not read."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
