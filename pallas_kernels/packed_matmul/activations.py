"""Activations that a product prepares itself, so that they are never written out."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp


class Normed(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, 2019, arXiv:1910.07467), in float32."""

    x: jax.Array  # [num_tokens, in]
    weight: jax.Array  # [in]
    eps: float

    def array(self) -> jax.Array:
        """The same, written out: [num_tokens, in] in x's dtype."""
        x = self.x.astype(jnp.float32)
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return normed.astype(self.x.dtype) * self.weight[None, :]


class Gated(NamedTuple):
    """activation(gate) * up (Shazeer, 2020, arXiv:2002.05202)."""

    gate: jax.Array  # [num_tokens, in]
    up: jax.Array  # [num_tokens, in]
    activation: Literal["silu", "gelu_tanh"]

    def array(self) -> jax.Array:
        """The same, written out."""
        gate = self.gate
        acted = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return acted * self.up


Activations = jax.Array | Normed | Gated


def written_out(x: Activations) -> jax.Array:
    return x if isinstance(x, jax.Array) else x.array()
