"""TPU (Mosaic): the kernels put together to one call.

Rows with one query go to the decode kernel, which writes their K and V itself; for rows with more, K and V
are written first and the prefill kernel attends. Rows beyond what the page table's scalar memory holds take
another call of each.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.tpu import write_kv_tpu
from pallas_kernels.ragged_paged_attention.tpu_decode import tpu_decode
from pallas_kernels.ragged_paged_attention.tpu_pages import NO_WINDOW, TABLE_BYTES, KVShape, sublanes
from pallas_kernels.ragged_paged_attention.tpu_prefill import prefill_query_bytes, tpu_prefill
from pallas_kernels.ragged_paged_attention.tpu_tuning import choose_blocks, choose_query_tile, tuning_of
from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows


def mosaic_tpu_attention(
    q: jax.Array,
    kv: jax.Array | None,
    kv_pool: jax.Array,
    layer: int | jax.Array,
    rows: Rows,
    *,
    spec: AttentionSpec,
    chip: str | None,
    window: int | jax.Array | None = None,
    sinks: jax.Array | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `ragged_paged_attention`; kv [num_tokens, num_kv_heads, row_dim] are the pool's new rows."""
    num_tokens, num_q_heads, _ = q.shape
    _, _, heads, page_size, row_dim = kv_pool.shape
    num_seqs, pages_per_seq = rows.page_indices.shape
    check_case(kv_pool)
    tuning = tuning_of(chip)
    if window is not None:  # small enough that positions can be added to it
        window = jnp.minimum(window, NO_WINDOW)
    page_bytes = heads * page_size * row_dim * kv_pool.dtype.itemsize
    rows_per_call = _rows_per_call(num_seqs, pages_per_seq)
    options: dict[str, Any] = {"spec": spec, "window": window, "sinks": sinks, "interpret": interpret}

    q_lens = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    if not spec.decode_only and kv is not None:
        kv_pool = write_kv_tpu(kv_pool, layer, kv, rows, interpret=interpret)
    first = jnp.minimum(rows.cu_q_lens[:-1], num_tokens - 1)
    q_first = q if spec.decode_only else q[first]
    kv_first = kv if spec.decode_only or kv is None else kv[first]
    lens = jnp.where(q_lens == 1, rows.kv_lens, 0)
    blocks = choose_blocks(page_bytes, page_size, pages_per_seq, tuning.decode_keys, tuning)
    decoded = []
    for start in range(0, num_seqs, rows_per_call):
        part = slice(start, start + rows_per_call)
        some = Rows(lens[part], rows.page_indices[part], rows.cu_q_lens[part])
        new = None if kv_first is None else kv_first[part]
        out, kv_pool = tpu_decode(q_first[part], new, kv_pool, layer, some, blocks=blocks, **options)
        decoded.append(out)
    decoded_rows = decoded[0] if len(decoded) == 1 else jnp.concatenate(decoded)
    if spec.decode_only:
        return decoded_rows, kv_pool

    row = jnp.searchsorted(
        rows.cu_q_lens[1:], jnp.arange(num_tokens, dtype=jnp.int32), side="right", method="compare_all"
    )
    is_live = row < num_seqs
    row = jnp.minimum(row, num_seqs - 1)
    out = jnp.where(is_live[:, None, None], decoded_rows[row], 0)
    blocks = choose_blocks(page_bytes, page_size, pages_per_seq, tuning.prefill_keys, tuning)
    query_bytes = prefill_query_bytes(KVShape.of(kv_pool, q.shape[2], spec), num_q_heads, q.dtype)
    query_tile = choose_query_tile(num_q_heads // heads, query_bytes, sublanes(q.dtype), tuning)
    for start in range(0, num_seqs, rows_per_call):
        stop = min(start + rows_per_call, num_seqs)
        some = Rows(rows.kv_lens[start:stop], rows.page_indices[start:stop], rows.cu_q_lens[start : stop + 1])
        attended = tpu_prefill(q, kv_pool, layer, some, blocks=blocks, query_tile=query_tile, **options)
        is_here = is_live & (q_lens[row] > 1) & (row >= start) & (row < stop)
        out = jnp.where(is_here[:, None, None], attended, out)
    return out, kv_pool


def check_case(kv_pool: jax.Array) -> None:
    """Raise NotImplementedError, with the reason, for a pool that the kernels do not serve."""
    page_size, tile = kv_pool.shape[3], sublanes(kv_pool.dtype)
    if page_size % tile and not (page_size >= 8 and tile % page_size == 0):
        raise NotImplementedError(
            f"mosaic_tpu attention does not serve pages of {page_size} in {kv_pool.dtype}: memory is written "
            f"in pieces of {tile} rows, or of a page of 8 or more that divides them"
        )


def _rows_per_call(num_seqs: int, pages_per_seq: int) -> int:
    """Rows whose page table fits scalar memory: all, or a multiple of 8 where that many do."""
    fitting = TABLE_BYTES // (4 * pages_per_seq)
    if fitting >= num_seqs:
        return num_seqs
    if fitting < 1:
        raise NotImplementedError(
            f"mosaic_tpu attention: {pages_per_seq} pages a sequence do not fit scalar memory; "
            "raise the page size"
        )
    return fitting // 8 * 8 or fitting
