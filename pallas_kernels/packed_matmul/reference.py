"""The plain twin: activations rounded as the kernel rounds them, the weight whole in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.packed_matmul.weight import INPUTS, PackedWeight, dequantize


def quantized_activations(x: jax.Array, *, is_fine: bool = False) -> jax.Array:
    """x [num_tokens, in] rounded to 8 (16) bits over the range of each group of 32, as float32."""
    groups = x.astype(jnp.float32).reshape(x.shape[0], -1, INPUTS)
    high, low = groups.max(axis=2, keepdims=True), groups.min(axis=2, keepdims=True)
    half, middle = 0.5 * high - 0.5 * low, 0.5 * high + 0.5 * low
    steps = (groups - middle) * jnp.where(half > 0, 127.0 / jnp.where(half > 0, half, 1.0), 0.0)
    whole = jnp.round(steps)
    if is_fine:
        whole = whole + jnp.round((steps - whole) * 254.0) / 254.0
    return (whole * (half / 127.0) + middle).reshape(x.shape)


def reference_packed_matmul(
    x: jax.Array, weight: PackedWeight, out_size: int, *, is_fine: bool = False
) -> jax.Array:
    """x [num_tokens, in] times one layer's weight -> float32 [num_tokens, out_size]."""
    w = dequantize(weight, out_size)
    return jnp.dot(quantized_activations(x, is_fine=is_fine), w.T, precision=jax.lax.Precision.HIGHEST)
