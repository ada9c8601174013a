"""Work lists of the Hopper kernel: which query rows a tile holds, which keys it sees, and how splits join.

A sequence's queries and the query heads that share a key-value head are one list of rows: row f is query
f // group, head f % group of the group. A tile is a run of `tile_rows` of them, so one matrix product serves
a whole group, whatever its size. A decode is a sequence with one query and is tiled in the same way.
Everything here is plain jax.numpy, outside of the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.types import Rows

# Columns of `Tiles.table`.
ROW, FIRST, BASE, BEGIN, END = range(5)


class Tiles(NamedTuple):
    # int32 [num_tiles, 5]. Of each tile: its sequence; its first row in the sequence's list; the position of
    # the sequence's first query; the keys that some row of it may see, [begin, end).
    table: jax.Array  # A tile that is not there has begin = end = 0.
    start: jax.Array  # int32 [num_seqs]: the first tile of each sequence
    is_served: jax.Array  # bool [num_seqs]: whether the sequence has tiles here


def row_of(ends: jax.Array, index: jax.Array) -> jax.Array:
    """How many of the ascending `ends` [n] are at or before each index [m]: int32 [m].

    One comparison of all with all: a binary search is a loop of launches on a GPU.
    """
    return (ends[None, :] <= index[:, None]).sum(axis=1, dtype=jnp.int32)


def num_tiles_bound(num_tokens: int, num_seqs: int, group: int, tile_rows: int, *, decode: bool) -> int:
    """Most tiles that a batch can have: of its decodes, or of its sequences with more queries."""
    if decode:
        return num_seqs * -(-group // tile_rows)
    return num_tokens * group // tile_rows + min(num_seqs, max(num_tokens // 2, 1))


def make_tiles(
    rows: Rows, window: int | jax.Array | None, *, group: int, tile_rows: int, num_tiles: int, decode: bool
) -> Tiles:
    """Tiles of the sequences with one query (`decode`), or of those with more."""
    num_seqs = rows.kv_lens.shape[0]
    q_lens = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    is_served = (q_lens == 1 if decode else q_lens > 1) & (rows.kv_lens > 0)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    if decode:  # every sequence has as many
        count = -(-group // tile_rows)
        start = jnp.arange(num_seqs, dtype=jnp.int32) * count
        row = tile // count
        is_live = is_served[row]
    else:
        counts = jnp.where(is_served, -(-q_lens * group // tile_rows), 0)
        ends = jnp.cumsum(counts)
        start = ends - counts
        row = jnp.minimum(row_of(ends, tile), num_seqs - 1)
        is_live = tile < ends[-1]
    first = (tile - start[row]) * tile_rows
    base = rows.kv_lens[row] - q_lens[row]
    last_query = jnp.minimum((first + tile_rows - 1) // group, q_lens[row] - 1)
    end = base + last_query + 1
    begin = jnp.zeros_like(end) if window is None else jnp.maximum(base + first // group - window + 1, 0)
    table = jnp.stack([row, first, base, jnp.where(is_live, begin, 0), jnp.where(is_live, end, 0)], axis=1)
    return Tiles(table.astype(jnp.int32), start.astype(jnp.int32), is_served)


def gather_queries(q: jax.Array, rows: Rows, tiles: Tiles, num_kv_heads: int, tile_rows: int) -> jax.Array:
    """q [num_tokens, num_q_heads, k_dim] -> [num_tiles, num_kv_heads, tile_rows, k_dim].

    Rows past a sequence's last query repeat another token's: nobody reads what becomes of them.
    """
    num_tokens, num_q_heads, k_dim = q.shape
    group = num_q_heads // num_kv_heads
    q = q.reshape(num_tokens, num_kv_heads, group, k_dim)
    flat = tiles.table[:, FIRST, None] + jnp.arange(tile_rows)[None, :]  # [num_tiles, tile_rows]
    token = jnp.clip(rows.cu_q_lens[tiles.table[:, ROW]][:, None] + flat // group, 0, num_tokens - 1)
    return jnp.swapaxes(q[token, :, flat % group], 1, 2)


def scatter_outputs(
    out: jax.Array, rows: Rows, tiles: Tiles, num_tokens: int, group: int, *, decode_only: bool
) -> tuple[jax.Array, jax.Array]:
    """out [num_tiles, num_kv_heads, tile_rows, v_dim] -> [num_tokens, num_q_heads, v_dim], and whose it is.

    The second, bool [num_tokens], tells the tokens that are served here; what the first holds of others is
    unspecified.
    """
    num_tiles, num_kv_heads, tile_rows, v_dim = out.shape
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = rows.cu_q_lens[1:]
    row = token if decode_only else row_of(ends, token)
    row = jnp.minimum(row, ends.shape[0] - 1)
    flat = (token - rows.cu_q_lens[row])[:, None] * group + jnp.arange(group)[None, :]  # [num_tokens, group]
    tile = jnp.clip(tiles.start[row][:, None] + flat // tile_rows, 0, num_tiles - 1)
    result = jnp.swapaxes(out[tile, :, flat % tile_rows], 1, 2)  # [num_tokens, num_kv_heads, group, v_dim]
    return result.reshape(num_tokens, num_kv_heads * group, v_dim), tiles.is_served[row] & (token < ends[-1])


def split_range(
    begin: jax.Array, end: jax.Array, split: int | jax.Array, *, splits: int, block: int, min_blocks: int
) -> tuple[jax.Array, jax.Array]:
    """The key blocks [low, high) that a split of a tile takes; empty where there are fewer parts than splits.

    Depends on the tile's own keys only, so a sequence's result does not depend on its batch-mates.
    """
    low = jax.lax.div(begin, jnp.int32(block))
    high = jax.lax.div(end + (block - 1), jnp.int32(block))
    share = jnp.maximum(jax.lax.div(high - low + (splits - 1), jnp.int32(splits)), min_blocks)
    return jnp.minimum(low + split * share, high), jnp.minimum(low + (split + 1) * share, high)


def join_splits(out: jax.Array, lse: jax.Array, is_live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over all keys from that over parts of them (log2-sum-exp2 weighted).

    out [num_tiles, num_kv_heads, splits, tile_rows, v_dim], lse [..., tile_rows] and is_live
    [num_tiles, splits]; dead splits hold anything. Returns both without their split axis, in float32.
    """
    live = is_live[:, None, :, None]
    lse = jnp.where(live, lse, -jnp.inf)
    peak = jnp.where(is_live.any(1)[:, None, None], lse.max(2), 0.0)  # [num_tiles, num_kv_heads, tile_rows]
    weights = jnp.exp2(lse - peak[:, :, None])
    total = weights.sum(2)
    parts = jnp.where(live[..., None], out.astype(jnp.float32), 0.0)
    joined = (parts * weights[..., None]).sum(2) / jnp.where(total == 0.0, 1.0, total)[..., None]
    return joined, peak + jnp.log2(total)
