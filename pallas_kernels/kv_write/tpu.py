"""TPU (Mosaic): the rows of sequences that bring several tokens, written tile by tile.

A copy cannot write less than a tile of rows, and new rows start anywhere. So XLA gathers the new rows into
tiles as they will lie in their pages, and the kernel goes over those: read the tile, put the new rows in,
write it back, the next tile being read meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.types import Rows


class _Tiles(NamedTuple):
    """The tiles to write, in order of rows; `total` of them. int32, [capacity] each but the last."""

    page: jax.Array
    offset: jax.Array  # tile's index in its page
    first: jax.Array  # new rows of the tile: [first, stop)
    stop: jax.Array
    token: jax.Array  # [capacity, tile]: which token each row is
    total: jax.Array  # []


def tile_rows(kv_pool: jax.Array) -> int:
    """Rows of the smallest piece that a copy to the pool can address."""
    return min(32 // kv_pool.dtype.itemsize, kv_pool.shape[3])


def write_kv_tpu(
    kv_pool: jax.Array,
    layer: int | jax.Array,
    kv: jax.Array,
    rows: Rows,
    *,
    interpret: Any = False,
) -> jax.Array:
    """Write the rows of every sequence with two or more queries; returns the pool.

    Args:
        kv_pool: [num_layers, num_pages, num_kv_heads, page_size, row_dim]; donated.
        kv: [num_tokens, num_kv_heads, row_dim] in the pool's dtype.
    """
    _, _, heads, page_size, row_dim = kv_pool.shape
    tile = tile_rows(kv_pool)
    tiles = _tiles(rows, kv.shape[0], page_size, tile)
    gathered = kv[tiles.token].swapaxes(1, 2)  # [capacity, num_kv_heads, tile, row_dim]

    def kernel(
        layer: Any, page: Any, offset: Any, first: Any, stop: Any, new: Any, old: Any, out: Any
    ) -> None:
        i = pl.program_id(0)
        row = jax.lax.broadcasted_iota(jnp.int32, new.shape, 1)
        out[...] = jnp.where((row >= first[i]) & (row < stop[i]), new[...], old[...])

    def place(i: Any, layer: Any, page: Any, offset: Any, *_: Any) -> tuple[Any, ...]:
        return layer[0], page[i], 0, offset[i], 0

    pool_tile = pl.BlockSpec((None, None, heads, tile, row_dim), place)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(tiles.total,),
            in_specs=[pl.BlockSpec((None, heads, tile, row_dim), lambda i, *_: (i, 0, 0, 0)), pool_tile],
            out_specs=pool_tile,
        ),
        out_shape=jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="kv_write",
    )(jnp.asarray(layer, jnp.int32).reshape(1), *tiles[:4], gathered, kv_pool)


def _tiles(rows: Rows, num_tokens: int, page_size: int, tile: int) -> _Tiles:
    num_seqs = rows.kv_lens.shape[0]
    q_lens = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    start = rows.kv_lens - q_lens  # position of each sequence's first new token
    counts = jnp.where(q_lens > 1, (rows.kv_lens - 1) // tile - start // tile + 1, 0)
    ends = jnp.cumsum(counts)
    # A sequence of n tokens touches at most n, and at most n / tile + 2 tiles.
    capacity = min(num_tokens, num_tokens // tile + 2 * min(num_seqs, max(1, num_tokens // 2)))
    i = jnp.arange(capacity, dtype=jnp.int32)
    row = jnp.minimum(
        jnp.searchsorted(ends, i, side="right", method="compare_all").astype(jnp.int32), num_seqs - 1
    )
    position = (start[row] // tile + i - (ends[row] - counts[row])) * tile  # of the tile's first row
    page = rows.page_indices[row, jnp.clip(position // page_size, 0, rows.page_indices.shape[1] - 1)]
    token = rows.cu_q_lens[row] + position - start[row]
    token = token[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
    is_live = i < ends[-1]
    return _Tiles(
        page=jnp.where(is_live, page, 0),
        offset=jnp.where(is_live, position % page_size // tile, 0),
        first=jnp.clip(start[row] - position, 0, tile),
        stop=jnp.where(is_live, jnp.clip(rows.kv_lens[row] - position, 0, tile), 0),
        token=jnp.clip(token, 0, num_tokens - 1),
        total=jnp.maximum(ends[-1], 1),  # one that writes nothing, on page 0, when there is none
    )
