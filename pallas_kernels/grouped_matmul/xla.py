"""`jax.lax.ragged_dot`: on TPU the compiler has a kernel of its own for it.

On CPU and GPU (jax 0.10 and 0.12) it is a dense product of every row with every group's matrix, with a
[rows, groups, in] temporary: right, and good for nothing but comparison; `xla_loop` and `mosaic_gpu` are for
those.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# Where the number of rows is no multiple of a float32 tile's, the TPU compiler leaves its kernel for the
# dense form (compiled with libtpu 0.0.42 and 0.0.50: 100 rows do, 104 do not).
_ROW_MULTIPLE = 8


def xla_grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, out_dtype: DTypeLike
) -> jax.Array:
    """See `grouped_matmul`."""
    num_rows = lhs.shape[0]
    padding = -num_rows % _ROW_MULTIPLE
    if padding:
        lhs = jnp.pad(lhs, ((0, padding), (0, 0)))
    # The kernel does not write rows of no group, and the dense form multiplies them with 0.
    owned = jnp.arange(num_rows + padding) < group_sizes.sum()  # [rows]
    lhs = jnp.where(owned[:, None], lhs, 0)
    out = jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=out_dtype)
    return jnp.where(owned[:, None], out, 0)[:num_rows]
