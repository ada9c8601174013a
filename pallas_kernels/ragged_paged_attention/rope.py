"""Rotary positions (Su et al., 2021, arXiv:2104.09864) in plain jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [num_tokens, num_heads, head_dim] by halves, in float32; the result has x's dtype.

    cos, sin: float32 [num_tokens, half]. Element i, i < half, turns with element half + i; those behind both
    pass.
    """
    half = cos.shape[1]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)
