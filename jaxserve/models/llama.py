"""The Llama family: pre-norm decoder, grouped-query attention, rotary positions, gated MLP.

Covers LlamaForCausalLM as transformers defines it, with its optional biases and tied embeddings, from
Hugging Face names and from GGUF names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.errors import ConfigError, UnsupportedModelError
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import ConfigReader, read_rope
from jaxserve.models.layers import Embedding, Linear, RMSNorm, loop_layers, sharded_param
from jaxserve.models.rope import RopeConfig, apply_rope, rope_tables

# [num_tokens, num_heads, head_dim] x3, pool -> ([num_tokens, num_heads, head_dim], pool)
AttendFn = Callable[
    [int | jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]
]


class CausalLM(Protocol):
    """What the step asks of a family's module."""

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, attend: AttendFn, kv_pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]: ...

    def logits(self, hidden: jax.Array) -> jax.Array: ...


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, shard_heads: bool) -> None:
        h, d = config.hidden_size, config.head_dim
        out, inp = ("out", "in") if shard_heads else (None, None)
        kw: dict[str, Any] = {"dtype": dtype}
        self.q_proj = Linear(h, config.num_heads * d, bias=config.qkv_bias, shard=out, **kw)
        self.k_proj = Linear(h, config.num_kv_heads * d, bias=config.qkv_bias, shard=out, **kw)
        self.v_proj = Linear(h, config.num_kv_heads * d, bias=config.qkv_bias, shard=out, **kw)
        self.o_proj = Linear(config.num_heads * d, h, bias=config.o_bias, shard=inp, **kw)
        self.head_dim = d

    def __call__(
        self,
        layer: int | jax.Array,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        attend: AttendFn,
        kv_pool: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        num_tokens = x.shape[0]
        q = self.q_proj(x).reshape(num_tokens, -1, self.head_dim)  # [num_tokens, num_heads, head_dim]
        k = self.k_proj(x).reshape(num_tokens, -1, self.head_dim)  # [num_tokens, num_kv_heads, head_dim]
        v = self.v_proj(x).reshape(num_tokens, -1, self.head_dim)  # [num_tokens, num_kv_heads, head_dim]
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        out, kv_pool = attend(layer, q, k, v, kv_pool)
        return self.o_proj(out.reshape(num_tokens, -1)), kv_pool


class MLP(nnx.Module):
    """down(silu(gate x) * up x) (SwiGLU: Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        h, i, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(h, i, bias=bias, dtype=dtype, shard="out")
        self.up_proj = Linear(h, i, bias=bias, dtype=dtype, shard="out")
        self.down_proj = Linear(i, h, bias=bias, dtype=dtype, shard="in")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, shard_heads: bool) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, dtype=dtype, shard_heads=shard_heads)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype)


class LlamaForCausalLM(nnx.Module):
    """A Llama model without values: a checkpoint or the user's own arrays fill its parameters.

    `shard_heads` splits attention over the model axis; without it every device computes all heads (what a
    head count that the axis does not divide needs), while MLP and vocabulary are split all the same.
    `unroll` writes every layer out in the program; otherwise they are one loop (`loop_layers`).
    """

    def __init__(
        self, config: ModelConfig, *, dtype: jnp.dtype, shard_heads: bool = True, unroll: bool = True
    ) -> None:
        self.unroll = unroll
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, dtype=dtype, shard_heads=shard_heads) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        )
        # Positions are float32 whatever the weights are: bfloat16 angles are off by whole turns.
        self.rope_inv_freq = sharded_param((config.head_dim // 2,), jnp.dtype(jnp.float32), (None,))
        self.rope_scaling = config.rope.attention_scaling

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, attend: AttendFn, kv_pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """token_ids, positions int32 [num_tokens] -> final hidden states [num_tokens, hidden], pool."""
        x = self.embed_tokens(token_ids)
        rope = rope_tables(positions, self.rope_inv_freq[...], self.rope_scaling)

        def apply(
            layer: DecoderLayer, i: int | jax.Array, carry: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            x, kv_pool = carry
            attended, kv_pool = layer.self_attn(i, layer.input_layernorm(x), rope, attend, kv_pool)
            x = x + attended
            return x + layer.mlp(layer.post_attention_layernorm(x)), kv_pool

        carry = (x, kv_pool)
        if self.unroll:
            for i, layer in enumerate(self.layers):
                carry = apply(layer, i, carry)
        else:
            carry = loop_layers(self.layers, apply, carry)
        return self.norm(carry[0]), carry[1]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [num_rows, hidden] -> float32 [num_rows, vocab]."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).logits(hidden)


# Keys of config.json that say nothing about the forward pass.
_INERT = frozenset(
    """_name_or_path architectures auto_map attention_dropout bos_token_id eos_token_id pad_token_id
    unk_token_id dtype torch_dtype initializer_range model_type pretraining_tp transformers_version
    use_cache vocab_size is_llama_config output_attentions output_hidden_states return_dict
    id2label label2id finetuning_task problem_type task_specific_params tokenizer_class prefix
    chunk_size_feed_forward is_encoder_decoder transformers.js_config""".split()
)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read config.json of LlamaForCausalLM; a key that is neither read nor known to be inert is an error."""
    read = ConfigReader(raw, inert=_INERT)
    read.require("hidden_act", "silu", default="silu")
    read.require("rope_interleaved", False, default=False)
    read.require("partial_rotary_factor", 1.0, default=1.0)
    read.require("is_decoder", True, False, default=True)
    read.require("add_cross_attention", False, default=False)
    read.require("tie_encoder_decoder", False, default=False)
    read.require("quantization_config", None)
    hidden = read.integer("hidden_size")
    num_heads = read.integer("num_attention_heads")
    head_dim = read.optional_integer("head_dim")
    if head_dim is None:
        if hidden % num_heads:
            raise ConfigError(
                f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {num_heads}"
            )
        head_dim = hidden // num_heads
    num_kv_heads = read.optional_integer("num_key_value_heads") or num_heads
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
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: {num_heads} heads cannot share {num_kv_heads} key-value heads evenly"
        )
    return config


def name_table(config: ModelConfig) -> dict[tuple[str | int, ...], str]:
    """Path of each parameter in the module -> its tensor's name in a Hugging Face file."""
    table: dict[tuple[str | int, ...], str] = {
        ("embed_tokens", "weight"): "model.embed_tokens.weight",
        ("norm", "weight"): "model.norm.weight",
    }
    if not config.tie_word_embeddings:
        table["lm_head", "weight"] = "lm_head.weight"
    for i in range(config.num_layers):
        hf = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            table["layers", i, norm, "weight"] = f"{hf}.{norm}.weight"
        for block, projections in _PROJECTIONS.items():
            for projection in projections:
                table["layers", i, block, projection, "weight"] = f"{hf}.{block}.{projection}.weight"
                if _has_bias(config, projection):
                    table["layers", i, block, projection, "bias"] = f"{hf}.{block}.{projection}.bias"
    return table


_PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def _has_bias(config: ModelConfig, projection: str) -> bool:
    if projection == "o_proj":
        return config.o_bias
    return config.qkv_bias if projection in _PROJECTIONS["self_attn"] else config.mlp_bias


def ignored_tensor(name: str, config: ModelConfig) -> bool:
    """Tensors that files carry and the forward pass does not read."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


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
