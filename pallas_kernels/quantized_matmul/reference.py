"""The plain twin: the weight whole in float32, and one product of the highest precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.weight import QuantizedWeight, dequantize


def reference_quantized_matmul(x: jax.Array, weight: QuantizedWeight, *, platform: str) -> jax.Array:
    """See `quantized_matmul`."""
    y = jnp.dot(
        x.astype(jnp.float32), dequantize(weight, platform=platform), precision=jax.lax.Precision.HIGHEST
    )
    return y.astype(x.dtype)
