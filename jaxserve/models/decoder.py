"""The decoder that families share: embedding, layers, final norm, output matrix."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.attention import NO_WINDOW, AttendFn, Attention, LayerPlace, Placement
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import (
    MLP,
    Embedding,
    RMSNorm,
    loop_layers,
    scan_layers,
    sharded_param,
    stack_layers,
)
from jaxserve.models.moe import SparseMLP
from jaxserve.models.rope import rope_tables


class CausalLM(Protocol):
    """What the step asks of a family's module. Tokens or rows from `num_live` on may be left undone."""

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: AttendFn,
        kv_pool: jax.Array,
        num_live: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]: ...

    def logits(self, hidden: jax.Array, num_live: jax.Array | None = None) -> jax.Array: ...


class DecoderLayer(nnx.Module):
    """x += attention(norm x); x += mlp(norm x)."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, placement: Placement) -> None:
        self.input_layernorm = layer_norm(config, dtype)
        self.self_attn = Attention(config, dtype=dtype, placement=placement)
        self.post_attention_layernorm = layer_norm(config, dtype)
        self.mlp = (
            SparseMLP(config, dtype=dtype, placement=placement)
            if config.num_experts
            else MLP(config, dtype=dtype)
        )

    def __call__(
        self, x: jax.Array, place: LayerPlace, attend: AttendFn, kv_pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [num_tokens, hidden] -> the same, and the pool."""
        x, kv_pool = self.self_attn(self.input_layernorm.before(x), place, attend, kv_pool, residual=x)
        return self.mlp(self.post_attention_layernorm.before(x), place.num_live, residual=x), kv_pool


def layer_norm(config: ModelConfig, dtype: jnp.dtype) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, unit_offset=config.unit_offset_norms)


class Decoder(nnx.Module):
    """A model without values: a checkpoint or the user's own arrays fill its parameters."""

    layer_class: ClassVar[type[Any]] = DecoderLayer
    layers: Any  # nnx.List of layers, or one whose parameters hold all of them

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, placement: Placement | None = None) -> None:
        placement = placement or Placement()
        self.layout = placement.layout
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        make = self.layer_class
        if placement.layout == "stacked":
            self.layers = make(config, dtype=dtype, placement=placement)
            stack_layers(self.layers, config.num_layers)
        else:
            self.layers = nnx.List(
                [make(config, dtype=dtype, placement=placement) for _ in range(config.num_layers)]
            )
        self.norm = layer_norm(config, dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        )
        # Positions are float32 whatever the weights are: bfloat16 angles are off by whole turns.
        shape = (len(config.ropes), config.head_dim // 2)
        self.rope_inv_freq = sharded_param(shape, jnp.dtype(jnp.float32), (None, None))
        self.rope_scalings = tuple(rope.attention_scaling for rope in config.ropes)
        self.windows = config.layer_windows
        self.embedding_scale = config.embedding_scale
        self.logit_soft_cap = config.logit_soft_cap

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: AttendFn,
        kv_pool: jax.Array,
        num_live: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """token_ids, positions int32 [num_tokens] -> final hidden states [num_tokens, hidden], pool."""
        x = self.embed_tokens(token_ids)
        if self.embedding_scale is not None:
            x = x * jnp.asarray(self.embedding_scale, x.dtype)
        inv_freq = self.rope_inv_freq[...]  # [num_ropes, head_dim / 2]
        tables = [rope_tables(positions, inv_freq[r], s) for r, s in enumerate(self.rope_scalings)]

        def apply(
            layer: Any, i: int | jax.Array, carry: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            x, kv_pool = carry
            place = dataclasses.replace(self._place(i, tables), num_live=num_live)
            return layer(x, place, attend, kv_pool)

        carry = (x, kv_pool)
        if self.layout == "stacked":
            carry = scan_layers(self.layers, apply, carry)
        elif self.layout == "looped":
            carry = loop_layers(self.layers, apply, carry)
        else:
            for i, layer in enumerate(self.layers):
                carry = apply(layer, i, carry)
        return self.norm(carry[0]), carry[1]

    def _place(self, i: int | jax.Array, tables: list[tuple[jax.Array, jax.Array]]) -> LayerPlace:
        """The window and rope of layer i: static where they can be, looked up where i is traced."""
        windows = self.windows
        if not windows:
            return LayerPlace(i, tables[0], None)
        if isinstance(i, int) or len(set(windows)) == 1:
            window = windows[i if isinstance(i, int) else 0]
            return LayerPlace(i, tables[0] if window is None else tables[-1], window)
        traced = jnp.array([NO_WINDOW if w is None else w for w in windows], jnp.int32)[i]
        (cos, sin), (local_cos, local_sin) = tables[0], tables[-1]
        is_local = traced < NO_WINDOW
        rope = jnp.where(is_local, local_cos, cos), jnp.where(is_local, local_sin, sin)
        return LayerPlace(i, rope, traced)

    def logits(self, hidden: jax.Array, num_live: jax.Array | None = None) -> jax.Array:
        """hidden [num_rows, hidden] -> float32 [num_rows, vocab]; `num_live`: of the rows."""
        logits = (self.embed_tokens if self.lm_head is None else self.lm_head).logits(hidden, num_live)
        cap = self.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
