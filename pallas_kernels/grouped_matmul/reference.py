"""The plain twin: every row times every group's matrix, and the row's own is kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def reference_grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, out_dtype: DTypeLike
) -> jax.Array:
    """See `grouped_matmul`."""
    num_rows = lhs.shape[0]
    ends = jnp.cumsum(group_sizes)  # [groups]
    row = jnp.arange(num_rows)
    # [groups, rows]: whether the group owns the row.
    owns = (row[None, :] >= (ends - group_sizes)[:, None]) & (row[None, :] < ends[:, None])
    every = jnp.einsum(  # [groups, rows, out]
        "rk,gkn->grn",
        lhs.astype(jnp.float32),
        rhs.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return jnp.where(owns[:, :, None], every, 0.0).sum(axis=0).astype(out_dtype)
