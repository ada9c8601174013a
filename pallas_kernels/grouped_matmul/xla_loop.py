"""A loop over the tiles of rows that exist: work grows with the rows, not with rows times groups.

The n rows of a group make ceil(n / tile) tiles; a group without rows costs nothing. One iteration slices its
group's matrix and a tile of rows, and writes the rows that are the group's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_MAX_TILE_ROWS = 256


def xla_loop_grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, out_dtype: DTypeLike
) -> jax.Array:
    """See `grouped_matmul`."""
    num_rows = lhs.shape[0]
    num_groups, _, width = rhs.shape
    if num_rows == 0:
        return jnp.zeros((0, width), out_dtype)
    tile = min(num_rows, _tile_rows(num_rows, num_groups))
    ends = jnp.cumsum(group_sizes)  # [groups], of the rows
    tiles = (group_sizes + (tile - 1)) // tile  # [groups]
    tile_ends = jnp.cumsum(tiles)  # [groups]

    def multiply(i: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(tile_ends, i, side="right")
        first = ends[group] - group_sizes[group] + (i - (tile_ends[group] - tiles[group])) * tile
        start = jnp.minimum(first, num_rows - tile)  # the last tile may lie across its neighbour
        row = start + jnp.arange(tile)
        x = jax.lax.dynamic_slice_in_dim(lhs, start, tile)  # [tile, in]
        y = jnp.dot(x, rhs[group], preferred_element_type=jnp.float32).astype(out_dtype)  # [tile, out]
        before = jax.lax.dynamic_slice_in_dim(out, start, tile)
        mine = (row >= first) & (row < ends[group])
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine[:, None], y, before), start, 0)

    return jax.lax.fori_loop(0, tile_ends[-1], multiply, jnp.zeros((num_rows, width), out_dtype))


def _tile_rows(num_rows: int, num_groups: int) -> int:
    """A power of two near the rows that a group has on average: larger tiles are mostly masked rows."""
    mean = max(num_rows // num_groups, 8)
    return min(1 << (mean - 1).bit_length(), _MAX_TILE_ROWS)
