"""Cutting sorted rows into tiles of one group each, which start at rows that a copy may start at."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

ALIGNMENT = 8  # rows of a tile of shared memory: TMA starts at multiples of them


class Tiles(NamedTuple):
    """Which rows each tile computes, and where each row is found. Tiles from `num_tiles` on do not exist.

    A group's first tile starts at the last aligned row that is not after its own first, so a tile may compute
    rows of its neighbours too; nobody looks at those.
    """

    num_tiles: jax.Array  # int32 []
    group: jax.Array  # int32 [bound]: below the number of groups, always
    first_row: jax.Array  # int32 [bound]: a multiple of ALIGNMENT
    tile_of_row: jax.Array  # int32 [rows]; of no meaning for rows of no group, but in bounds
    row_in_tile: jax.Array  # int32 [rows]


def bound(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """The most tiles that there can be: each group that has rows may begin and end in a tile's midst."""
    live = min(num_rows, num_groups)
    return (num_rows + live * (ALIGNMENT - 1)) // tile_rows + live


def make_tiles(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> Tiles:
    """group_sizes: int32 [groups]."""
    num_groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)  # [groups], of the rows
    starts = (ends - group_sizes) // ALIGNMENT * ALIGNMENT  # [groups], of the tiles
    tiles = jnp.where(group_sizes > 0, (ends - starts + (tile_rows - 1)) // tile_rows, 0)  # [groups]
    tile_ends = jnp.cumsum(tiles)  # [groups]
    most = bound(num_rows, num_groups, tile_rows)

    tile = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right"), num_groups - 1).astype(jnp.int32)
    first_row = starts[group] + (tile - (tile_ends[group] - tiles[group])) * tile_rows

    row = jnp.arange(num_rows, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(ends, row, side="right"), num_groups - 1)
    distance = row - starts[owner]
    tile_of_row = tile_ends[owner] - tiles[owner] + distance // tile_rows
    return Tiles(
        tile_ends[-1], group, first_row, jnp.clip(tile_of_row, 0, most - 1), jnp.mod(distance, tile_rows)
    )
