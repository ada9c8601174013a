"""Shape checks shared by all implementations, at trace time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.weight import QuantizedWeight, out_is_last


def validate(x: jax.Array, weight: QuantizedWeight, *, platform: str) -> None:
    """Raise ValueError that names what does not fit."""
    values, scales, zeros = weight
    if x.ndim != 2 or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"x must be bfloat16 or float32 [num_tokens, in], got {x.dtype.name} {list(x.shape)}"
        )
    if values.ndim != 3 or values.dtype not in (jnp.int4, jnp.int8):
        raise ValueError(
            f"values must be int4 or int8 of 3 axes, got {values.dtype.name} {list(values.shape)}"
        )
    if scales.ndim != 2 or scales.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"scales must be bfloat16 or float32 [groups, out], got {scales.dtype.name} {list(scales.shape)}"
        )
    groups, out = scales.shape
    if x.shape[1] % groups:
        raise ValueError(f"{groups} groups do not divide x's {x.shape[1]} features")
    size = x.shape[1] // groups
    expected = (groups, size, out) if out_is_last(platform) else (groups, out, size)
    if values.shape != expected:
        raise ValueError(f"values on {platform} must be {list(expected)}, got {list(values.shape)}")
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != scales.dtype):
        raise ValueError(
            f"zeros must be like the scales, {scales.dtype.name} {list(scales.shape)}, "
            f"got {zeros.dtype.name} {list(zeros.shape)}"
        )
