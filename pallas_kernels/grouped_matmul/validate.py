"""Shape checks shared by all implementations, at trace time."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def validate(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> None:
    """Raise ValueError that names what does not fit."""
    if lhs.ndim != 2:
        raise ValueError(f"lhs must be [rows, in], got {lhs.shape}")
    if rhs.ndim != 3 or rhs.shape[1] != lhs.shape[1]:
        raise ValueError(f"rhs must be [groups, {lhs.shape[1]}, out], got {rhs.shape}")
    if rhs.dtype != lhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(f"lhs and rhs must be of one floating dtype, got {lhs.dtype} and {rhs.dtype}")
    if group_sizes.shape != (rhs.shape[0],) or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes must be int32 [{rhs.shape[0]}], got {group_sizes.dtype} {list(group_sizes.shape)}"
        )
