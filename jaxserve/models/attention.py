"""Grouped-query attention of a layer: projections, norms of heads, rotary positions, `attend`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import Linear, RMSNorm, linears
from jaxserve.sharding import HeadSharding
from pallas_kernels.packed_matmul import Activations

Layout = Literal["looped", "stacked", "unrolled"]
NO_WINDOW = 2**30  # a window longer than any context


class AttendFn(Protocol):
    """Rotate queries and keys, write a layer's new keys and values into the pool, then attend over it."""

    def __call__(
        self,
        layer: int | jax.Array,
        q: jax.Array,  # [num_tokens, num_heads, head_dim]
        k: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
        v: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
        kv_pool: jax.Array,
        rope: tuple[jax.Array, jax.Array],  # cos and sin, float32 [num_tokens, head_dim / 2]
        window: int | jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]: ...  # [num_tokens, num_heads, head_dim], pool


@dataclass(frozen=True)
class Placement:
    """Where a model's arrays lie, and what its program is compiled for.

    `heads` is about attention alone: MLP and vocabulary are split whatever it is.
    `layout`: "unrolled" writes every layer out in the program. "looped" and "stacked" are one loop over the
    layers: over parameters of each layer, or over parameters that hold those of all layers.
    """

    mesh: Mesh | None = None  # None: one device
    platform: str = "cpu"
    heads: HeadSharding = HeadSharding.SPLIT
    layout: Layout = "unrolled"


@dataclass(frozen=True)
class LayerPlace:
    """What a layer is told of its place in the model."""

    index: int | jax.Array
    rope: tuple[jax.Array, jax.Array]  # cos and sin, float32 [num_tokens, head_dim / 2]
    window: int | jax.Array | None
    num_live: jax.Array | None = None  # int32 []: the leading rows that are no padding; None: all


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, placement: Placement) -> None:
        h, d = config.hidden_size, config.head_dim
        out, inp = ("out", "in") if placement.heads.axis else (None, None)
        kv_out = "out" if placement.heads.kv_axis else None
        kw: Mapping[str, Any] = {"dtype": dtype}
        self.q_proj = Linear(h, config.num_heads * d, bias=config.qkv_bias, shard=out, **kw)
        self.k_proj = Linear(h, config.num_kv_heads * d, bias=config.qkv_bias, shard=kv_out, **kw)
        self.v_proj = Linear(h, config.num_kv_heads * d, bias=config.qkv_bias, shard=kv_out, **kw)
        self.o_proj = Linear(config.num_heads * d, h, bias=config.o_bias, shard=inp, **kw)
        norm: Mapping[str, Any] = {"dtype": dtype, "unit_offset": config.unit_offset_norms}
        self.q_norm = RMSNorm(d, config.rms_norm_eps, **norm) if config.qk_norm else None
        self.k_norm = RMSNorm(d, config.rms_norm_eps, **norm) if config.qk_norm else None
        self.head_dim = d

    def __call__(
        self,
        x: Activations,
        place: LayerPlace,
        attend: AttendFn,
        kv_pool: jax.Array,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """x [num_tokens, hidden] -> the same with the residual added, and the pool."""
        # Of the three, v is where rounding changes logits most.
        fine = (False, False, True)
        projected = linears(x, [self.q_proj, self.k_proj, self.v_proj], place.num_live, is_fine=fine)
        num_tokens = projected[0].shape[0]
        # [num_tokens, num_heads, head_dim], and num_kv_heads of k and v
        q, k, v = (y.reshape(num_tokens, -1, self.head_dim) for y in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        window = {} if place.window is None else {"window": place.window}
        out, kv_pool = attend(place.index, q, k, v, kv_pool, place.rope, **window)
        return self.o_proj(out.reshape(num_tokens, -1), place.num_live, residual), kv_pool
