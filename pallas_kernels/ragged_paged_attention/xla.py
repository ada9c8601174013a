"""Ragged paged attention in plain XLA that touches live pages only, on any platform.

Rows with one query (decodes) become a list of (row, run of pages) items that a loop walks a group at a time,
so that a short sequence costs what its own length costs, whatever its batch-mates'. Rows with more queries
are cut into query tiles, each walking its own keys up to the causal edge. Both keep a running maximum and
sum (online softmax: Milakov & Gimelshein, 2018, arXiv:1805.02867), so no score matrix is ever whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
_DECODE_BLOCK = 64  # keys an item covers
_DECODE_GROUP = (8, 64)  # items a loop step takes, two a row within these bounds
_QUERY_TILE = 128  # queries of a prefill tile
_KEY_BLOCK = 128  # keys a prefill tile takes at a time
_Window = int | jax.Array | None


def xla_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    layer: int | jax.Array,
    rows: Rows,
    *,
    spec: AttentionSpec,
    window: _Window = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `ragged_paged_attention`; the step's K and V are in the pool already."""
    num_tokens = q.shape[0]
    scaled = q.astype(jnp.float32) * spec.sm_scale
    q_lens = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    attention = _Attention(spec, kv_pool, layer, window, sinks)
    decodes = rows._replace(kv_lens=jnp.where(q_lens == 1, rows.kv_lens, 0))
    if spec.decode_only:
        return attention.decode(scaled, decodes).astype(q.dtype)

    out = attention.prefill(scaled, rows)
    first = jnp.minimum(rows.cu_q_lens[:-1], num_tokens - 1)
    decoded = attention.decode(scaled[first], decodes)
    row = jnp.searchsorted(rows.cu_q_lens[1:], jnp.arange(num_tokens, dtype=jnp.int32), side="right")
    row = jnp.minimum(row, rows.kv_lens.shape[0] - 1)
    return jnp.where((q_lens[row] == 1)[:, None, None], decoded[row], out).astype(q.dtype)


class _Attention:
    """A call's constants; q is float32 and scaled already."""

    def __init__(
        self,
        spec: AttentionSpec,
        kv_pool: jax.Array,
        layer: int | jax.Array,
        window: _Window,
        sinks: jax.Array | None,
    ) -> None:
        self.spec = spec
        self.kv_pool = kv_pool  # [num_layers, num_pages, num_kv_heads, page_size, row_dim]
        self.layer = layer
        self.window = window
        _, _, self.num_kv_heads, self.page_size, self.row_dim = kv_pool.shape
        self.sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(self.num_kv_heads, -1)

    def pages_per_block(self, num_keys: int) -> int:
        return max(1, num_keys // self.page_size)

    def v_dim(self, k_dim: int) -> int:
        start, stop = self.spec.v_slice(k_dim, self.row_dim)
        return stop - start

    def fetch(self, pages: jax.Array, k_dim: int) -> tuple[jax.Array, jax.Array]:
        """K and V of `pages` [..., n], float32 [..., num_kv_heads, n * page_size, k_dim or v_dim]."""
        fetched = self.kv_pool.at[self.layer, pages].get(mode="promise_in_bounds")
        fetched = jnp.moveaxis(fetched, -3, -4)  # [..., num_kv_heads, n, page_size, row_dim]
        shape = (*pages.shape[:-1], self.num_kv_heads, pages.shape[-1] * self.page_size, self.row_dim)
        fetched = fetched.reshape(shape).astype(jnp.float32)
        start, stop = self.spec.v_slice(k_dim, self.row_dim)
        return fetched[..., :k_dim], fetched[..., start:stop]

    def cap(self, scores: jax.Array) -> jax.Array:
        soft_cap = self.spec.soft_cap
        return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)

    def first_key(self, position: jax.Array) -> jax.Array:
        """The first key that the query at `position` sees."""
        return jnp.zeros_like(position) if self.window is None else jnp.maximum(position - self.window + 1, 0)

    def start(
        self, shape: tuple[int, ...], v_dim: int, *, rows_axis: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Running maximum, sum and output before any key; a sink is a key without a value.

        shape: num_kv_heads and group, and the queries at `rows_axis`.
        """
        if self.sinks is None:
            maximum, norm = jnp.full(shape, _MASKED), jnp.zeros(shape)
        else:
            maximum = jnp.broadcast_to(jnp.expand_dims(self.sinks, rows_axis), shape)
            norm = jnp.ones(shape)
        return maximum, norm, jnp.zeros((*shape, v_dim))

    def decode(self, q: jax.Array, rows: Rows) -> jax.Array:
        """One query a row: q [num_seqs, num_q_heads, k_dim], kv_lens 0 for rows to leave alone."""
        num_seqs, num_q_heads, k_dim = q.shape
        kv_lens, page_indices = rows.kv_lens, rows.page_indices
        num_pages = self.pages_per_block(_DECODE_BLOCK)
        block = num_pages * self.page_size
        group_size = min(max(2 * num_seqs, _DECODE_GROUP[0]), _DECODE_GROUP[1])
        q = q.reshape(num_seqs, self.num_kv_heads, num_q_heads // self.num_kv_heads, k_dim)

        first_keys = self.first_key(kv_lens - 1)  # [num_seqs]
        first_blocks = first_keys // block
        blocks = -(-kv_lens // block) - jnp.where(kv_lens > 0, first_blocks, 0)  # items of each row
        ends = jnp.cumsum(blocks)
        total = ends[-1]

        def step(
            carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
        ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            i, maximum, norm, out = carry
            item = i + jnp.arange(group_size, dtype=jnp.int32)
            row = jnp.minimum(jnp.searchsorted(ends, item, side="right"), num_seqs - 1)
            first = (item - (ends[row] - blocks[row]) + first_blocks[row]) * block  # first key of each item
            is_live = item < total
            page = first[:, None] // self.page_size + jnp.arange(num_pages)[None, :]  # [items, num_pages]
            lens = jnp.where(is_live, kv_lens[row], 0)
            since = first_keys[row][:, None]
            is_used = (page * self.page_size < lens[:, None]) & ((page + 1) * self.page_size > since)
            pages = jnp.where(
                is_used, page_indices[row[:, None], jnp.minimum(page, page_indices.shape[1] - 1)], 0
            )
            key = first[:, None] + jnp.arange(block)[None, :]
            is_key = (key < lens[:, None]) & (key >= since)  # [items, block]

            k, v = self.fetch(pages, k_dim)  # [items, num_kv_heads, block, k_dim or v_dim]
            scores = self.cap(_dot("ihgd,ihkd->ihgk", q[row], k))
            scores = jnp.where(is_key[:, None, None, :], scores, _MASKED)
            belongs = (jnp.arange(num_seqs)[:, None] == row[None, :]) & is_live[None, :]  # [num_seqs, items]
            peaks = jnp.where(belongs[:, :, None, None], scores.max(-1)[None], _MASKED)
            new_maximum = jnp.maximum(maximum, peaks.max(1))  # [num_seqs, num_kv_heads, group]
            # A masked score's weight is 0: a live item has a key, so its row's maximum is a true score.
            p = jnp.exp(scores - new_maximum[row][..., None])
            v = jnp.where(is_key[:, None, :, None], v, 0.0)  # stale memory may hold NaN, and 0 * NaN is NaN
            partial = _dot("ihgk,ihkd->ihgd", p, v)
            scale = jnp.exp(maximum - new_maximum)
            belongs = belongs.astype(jnp.float32)
            norm = norm * scale + _dot("si,ihg->shg", belongs, p.sum(-1))
            out = out * scale[..., None] + _dot("si,ihgd->shgd", belongs, partial)
            return i + group_size, new_maximum, norm, out

        state = (jnp.int32(0), *self.start(q.shape[:3], self.v_dim(k_dim), rows_axis=0))
        _, _, norm, out = jax.lax.while_loop(lambda carry: carry[0] < total, step, state)
        out = out / jnp.where(norm == 0.0, 1.0, norm)[..., None]
        return out.reshape(num_seqs, num_q_heads, -1)

    def prefill(self, q: jax.Array, rows: Rows) -> jax.Array:
        """Rows of more than one query: q [num_tokens, num_q_heads, k_dim]; other rows stay zero.

        A row's last tile may run into the next row's tokens; tiles go in order, so the next row wins.
        """
        num_tokens, num_q_heads, k_dim = q.shape
        heads, group = self.num_kv_heads, num_q_heads // self.num_kv_heads
        num_seqs, pages_per_seq = rows.page_indices.shape
        tile = min(_QUERY_TILE, num_tokens)
        num_pages = min(self.pages_per_block(_KEY_BLOCK), pages_per_seq)
        block = num_pages * self.page_size

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
            since = self.first_key(position)
            last = jnp.minimum(
                position[-1] + 1, kv_len
            )  # keys from since[0] up to here are seen by some query
            queries = jax.lax.dynamic_slice_in_dim(q, start, tile)
            queries = queries.reshape(tile, heads, group, k_dim).transpose(1, 0, 2, 3)
            queries = queries.reshape(heads, tile * group, k_dim)

            def one_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                maximum, norm, acc = carry
                key = j * block + jnp.arange(block)
                pages = jax.lax.dynamic_slice(page_indices, (row, j * num_pages), (1, num_pages))[0]
                page_start = key[:: self.page_size]
                is_used = (page_start < last) & (page_start + self.page_size > since[0])
                k, v = self.fetch(jnp.where(is_used, pages, 0), k_dim)  # [heads, block, k_dim or v_dim]
                scores = self.cap(_dot("hqd,hkd->hqk", queries, k))
                is_seen = (key[None, :] <= position[:, None]) & (key < last)[None, :]  # [tile, block]
                is_seen &= key[None, :] >= since[:, None]
                is_seen = jnp.repeat(is_seen, group, axis=0)[None]  # [1, tile * group, block]
                scores = jnp.where(is_seen, scores, _MASKED)
                new_maximum = jnp.maximum(maximum, scores.max(-1))
                # While a query has seen no key its sums are garbage; the first true score scales them to 0,
                # and there is one: a query sees itself.
                p = jnp.exp(scores - new_maximum[..., None])
                is_live = (key < last) & (key >= since[0])
                v = jnp.where(is_live[None, :, None], v, 0.0)  # stale memory may hold NaN
                scale = jnp.exp(maximum - new_maximum)
                acc = acc * scale[..., None] + _dot("hqk,hkd->hqd", p, v)
                return new_maximum, norm * scale + p.sum(-1), acc

            v_dim = self.v_dim(k_dim)
            maximum, norm, acc = self.start((heads, tile, group), v_dim, rows_axis=1)
            flat = (heads, tile * group)
            state = (maximum.reshape(flat), norm.reshape(flat), acc.reshape(*flat, v_dim))
            blocks = (since[0] // block, -(-last // block))
            _, norm, acc = jax.lax.fori_loop(*blocks, one_block, state)
            acc = acc / jnp.where(norm == 0.0, 1.0, norm)[..., None]
            result = acc.reshape(heads, tile, group, v_dim).transpose(1, 0, 2, 3)
            result = result.reshape(tile, num_q_heads, v_dim)
            return jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

        out = jnp.zeros((num_tokens + tile, num_q_heads, self.v_dim(k_dim)), jnp.float32)
        return jax.lax.fori_loop(0, ends[-1], one_tile, out)[:num_tokens]


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST)
