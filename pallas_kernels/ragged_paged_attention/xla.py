"""Ragged paged attention in plain XLA that touches live pages only: the CPU path, and any platform's.

Rows with one query (decodes) become a list of (row, run of pages) items that a loop walks a group at a time,
so that a short sequence costs what its own length costs, whatever its batch-mates'. Rows with more queries
are cut into query tiles, each walking its own keys up to the causal edge. Both keep a running maximum and
sum (online softmax: Milakov & Gimelshein, 2018, arXiv:1805.02867), so no score matrix is ever whole.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
_DECODE_BLOCK = 64  # keys an item covers
_DECODE_GROUP = (8, 64)  # items a loop step takes, two a row within these bounds
_QUERY_TILE = 128  # queries of a prefill tile
_KEY_BLOCK = 128  # keys a prefill tile takes at a time


class _Rows(NamedTuple):
    kv_lens: jax.Array  # int32 [num_seqs]
    page_indices: jax.Array  # int32 [num_seqs, pages_per_seq]
    cu_q_lens: jax.Array  # int32 [num_seqs + 1]


def xla_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    layer: int | jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    *,
    sm_scale: float,
    decode_only: bool = False,
) -> jax.Array:
    """See `ragged_paged_attention`."""
    num_tokens = q.shape[0]
    rows = _Rows(kv_lens, page_indices, cu_q_lens)
    scaled = q.astype(jnp.float32) * sm_scale
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    if decode_only:
        decode_lens = jnp.where(q_lens == 1, kv_lens, 0)
        return _decode(scaled, kv_pool, layer, decode_lens, page_indices).astype(q.dtype)

    out = _prefill(scaled, kv_pool, layer, rows)
    first = jnp.minimum(cu_q_lens[:-1], num_tokens - 1)
    decoded = _decode(scaled[first], kv_pool, layer, jnp.where(q_lens == 1, kv_lens, 0), page_indices)
    row = jnp.searchsorted(cu_q_lens[1:], jnp.arange(num_tokens, dtype=jnp.int32), side="right")
    row = jnp.minimum(row, kv_lens.shape[0] - 1)
    return jnp.where((q_lens[row] == 1)[:, None, None], decoded[row], out).astype(q.dtype)


def _pages_per_block(kv_pool: jax.Array, num_keys: int) -> int:
    return max(1, num_keys // kv_pool.shape[4])


def _fetch(kv_pool: jax.Array, layer: int | jax.Array, kind: int, pages: jax.Array) -> jax.Array:
    """K (kind 0) or V (1) of `pages` [..., n] as float32 [..., num_kv_heads, n * page_size, head_dim]."""
    _, _, num_kv_heads, _, page_size, head_dim = kv_pool.shape
    fetched = kv_pool.at[layer, pages, :, kind].get(mode="promise_in_bounds")
    fetched = jnp.moveaxis(fetched, -4, -3)  # [..., num_kv_heads, n, page_size, head_dim]
    shape = (*pages.shape[:-1], num_kv_heads, pages.shape[-1] * page_size, head_dim)
    return fetched.reshape(shape).astype(jnp.float32)


def _decode(
    q: jax.Array, kv_pool: jax.Array, layer: int | jax.Array, kv_lens: jax.Array, page_indices: jax.Array
) -> jax.Array:
    """One query a row: q [num_seqs, num_q_heads, head_dim] (scaled), kv_lens 0 for rows to leave alone."""
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = kv_pool.shape[2], kv_pool.shape[4]
    num_pages = _pages_per_block(kv_pool, _DECODE_BLOCK)
    block = num_pages * page_size
    group_size = min(max(2 * num_seqs, _DECODE_GROUP[0]), _DECODE_GROUP[1])
    q = q.reshape(num_seqs, num_kv_heads, num_q_heads // num_kv_heads, head_dim)

    blocks = -(-kv_lens // block)  # items of each row
    ends = jnp.cumsum(blocks)
    total = ends[-1]

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        i, maximum, norm, out = carry
        item = i + jnp.arange(group_size, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, item, side="right"), num_seqs - 1)
        first = (item - (ends[row] - blocks[row])) * block  # first key of each item
        is_live = item < total
        page = first[:, None] // page_size + jnp.arange(num_pages)[None, :]  # [items, num_pages]
        lens = jnp.where(is_live, kv_lens[row], 0)
        is_used = page * page_size < lens[:, None]
        pages = jnp.where(
            is_used, page_indices[row[:, None], jnp.minimum(page, page_indices.shape[1] - 1)], 0
        )
        is_key = first[:, None] + jnp.arange(block)[None, :] < lens[:, None]  # [items, block]

        k = _fetch(kv_pool, layer, 0, pages)  # [items, num_kv_heads, block, head_dim]
        scores = _dot("ihgd,ihkd->ihgk", q[row], k)
        scores = jnp.where(is_key[:, None, None, :], scores, _MASKED)
        belongs = (jnp.arange(num_seqs)[:, None] == row[None, :]) & is_live[None, :]  # [num_seqs, items]
        peaks = jnp.where(belongs[:, :, None, None], scores.max(-1)[None], _MASKED)
        new_maximum = jnp.maximum(maximum, peaks.max(1))  # [num_seqs, num_kv_heads, group]
        # A masked score's weight is 0: a live item has a key, so its row's maximum is a true score.
        p = jnp.exp(scores - new_maximum[row][..., None])
        v = _fetch(kv_pool, layer, 1, pages)
        v = jnp.where(is_key[:, None, :, None], v, 0.0)  # stale memory may hold NaN, and 0 * NaN is NaN
        partial = _dot("ihgk,ihkd->ihgd", p, v)
        scale = jnp.exp(maximum - new_maximum)
        belongs = belongs.astype(jnp.float32)
        norm = norm * scale + _dot("si,ihg->shg", belongs, p.sum(-1))
        out = out * scale[..., None] + _dot("si,ihgd->shgd", belongs, partial)
        return i + group_size, new_maximum, norm, out

    shape = q.shape[:3]
    start = (jnp.int32(0), jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros(q.shape))
    _, _, norm, out = jax.lax.while_loop(lambda carry: carry[0] < total, step, start)
    out = out / jnp.where(norm == 0.0, 1.0, norm)[..., None]
    return out.reshape(num_seqs, num_q_heads, head_dim)


def _prefill(q: jax.Array, kv_pool: jax.Array, layer: int | jax.Array, rows: _Rows) -> jax.Array:
    """Rows of more than one query: q [num_tokens, num_q_heads, head_dim] (scaled); other rows stay zero.

    A row's last tile may run into the next row's tokens; tiles go in order, so the next row overwrites it.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = kv_pool.shape[2], kv_pool.shape[4]
    group = num_q_heads // num_kv_heads
    num_seqs, pages_per_seq = rows.page_indices.shape
    tile = min(_QUERY_TILE, num_tokens)
    num_pages = min(_pages_per_block(kv_pool, _KEY_BLOCK), pages_per_seq)
    block = num_pages * page_size

    q_lens = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    tiles = jnp.where(q_lens > 1, -(-q_lens // tile), 0)
    ends = jnp.cumsum(tiles)
    q = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    short = -pages_per_seq % num_pages
    page_indices = jnp.pad(rows.page_indices, ((0, 0), (0, short)))

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.minimum(jnp.searchsorted(ends, i, side="right"), num_seqs - 1)
        within = (i - (ends[row] - tiles[row])) * tile
        start = rows.cu_q_lens[row] + within
        kv_len = rows.kv_lens[row]
        position = kv_len - q_lens[row] + within + jnp.arange(tile)  # of each query
        last = jnp.minimum(position[-1] + 1, kv_len)  # keys up to here are seen by some query
        queries = jax.lax.dynamic_slice_in_dim(q, start, tile)
        queries = queries.reshape(tile, num_kv_heads, group, head_dim).transpose(1, 0, 2, 3)
        queries = queries.reshape(num_kv_heads, tile * group, head_dim)

        def one_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            maximum, norm, acc = carry
            key = j * block + jnp.arange(block)
            pages = jax.lax.dynamic_slice(page_indices, (row, j * num_pages), (1, num_pages))[0]
            pages = jnp.where(key[::page_size] < last, pages, 0)
            k = _fetch(kv_pool, layer, 0, pages)  # [num_kv_heads, block, head_dim]
            scores = _dot("hqd,hkd->hqk", queries, k)
            is_seen = (key[None, :] <= position[:, None]) & (key < last)[None, :]  # [tile, block]
            is_seen = jnp.repeat(is_seen, group, axis=0)[None]  # [1, tile * group, block]
            scores = jnp.where(is_seen, scores, _MASKED)
            new_maximum = jnp.maximum(maximum, scores.max(-1))
            # A masked score's weight is 0: every query sees key 0, so block 0 makes its maximum a true score.
            p = jnp.exp(scores - new_maximum[..., None])
            v = _fetch(kv_pool, layer, 1, pages)
            v = jnp.where((key < last)[None, :, None], v, 0.0)  # stale memory may hold NaN
            scale = jnp.exp(maximum - new_maximum)
            acc = acc * scale[..., None] + _dot("hqk,hkd->hqd", p, v)
            return new_maximum, norm * scale + p.sum(-1), acc

        shape = queries.shape[:2]
        state = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros(queries.shape))
        _, norm, acc = jax.lax.fori_loop(0, -(-last // block), one_block, state)
        acc = acc / jnp.where(norm == 0.0, 1.0, norm)[..., None]
        result = acc.reshape(num_kv_heads, tile, group, head_dim).transpose(1, 0, 2, 3)
        return jax.lax.dynamic_update_slice_in_dim(out, result.reshape(tile, num_q_heads, head_dim), start, 0)

    out = jnp.zeros((num_tokens + tile, num_q_heads, head_dim), jnp.float32)
    return jax.lax.fori_loop(0, ends[-1], one_tile, out)[:num_tokens]


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST)
