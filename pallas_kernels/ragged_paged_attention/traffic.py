"""Bytes that the TPU kernels move to and from memory, and products they form, counted from what they do.

`roofline.attention_cost` is what a call must do at least: move every live row of the pool once, every new row
once, queries and outputs once, and multiply each query with the keys it sees. What the kernels do beyond that
is stated here by its cause, so that it can be looked at before there is a chip to time anything on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.pool_layout import row_dim
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.ragged_paged_attention.tpu_pages import KVShape, round_up, sublanes
from pallas_kernels.ragged_paged_attention.tpu_prefill import prefill_query_bytes
from pallas_kernels.ragged_paged_attention.tpu_tuning import choose_query_tile, tuning_of
from pallas_kernels.roofline import AttentionShape, attention_cost


@dataclass(frozen=True)
class Traffic:
    """Bytes and operations of one call on one device."""

    least: float  # bytes, the minimum
    least_flops: float
    flops: int  # of whole blocks of queries and keys, masked ones too
    pages: int  # fetched: whole pages, and once for each tile of a row's queries
    rows_written: int  # new rows, with the rest of the smallest piece a copy can write, read and written
    queries: int  # queries and outputs, with rows that fill a group up
    layout: int  # laying queries, outputs and new rows out for the prefill kernel and back

    @property
    def total(self) -> int:
        return self.pages + self.rows_written + self.queries + self.layout

    @property
    def excess(self) -> float:
        """Share moved beyond the minimum: 0.1 is a tenth more."""
        return self.total / self.least - 1.0


def tpu_traffic(case: Case, chip: str | None, dtype: Any = jnp.bfloat16) -> Traffic:
    """Of a call with activations in `dtype`."""
    counter = _Counter(case, chip, jnp.dtype(dtype))
    decodes = [kv for q, kv in case.rows if q == 1]
    prompts = [(q, kv) for q, kv in case.rows if q > 1]
    for kv_len in decodes:
        counter.decode(kv_len)
    for q_len, kv_len in prompts:
        counter.prefill(q_len, kv_len)
    shape = AttentionShape(
        case.num_q_heads,
        case.num_kv_heads,
        case.head_dim,
        case.value_dim,
        case.kv_dim,
        counter.q_bytes,
        counter.kv_bytes,
        case.window,
    )
    q_lens, kv_lens = [q for q, _ in case.rows], [kv for _, kv in case.rows]
    least = attention_cost(q_lens, kv_lens, shape)
    return Traffic(
        least.num_bytes,
        least.flops,
        counter.flops,
        counter.pages,
        counter.rows_written,
        counter.queries,
        counter.layout,
    )


class _Counter:
    def __init__(self, case: Case, chip: str | None, dtype: Any) -> None:
        self.case = case
        kv_dtype = jnp.dtype(case.kv_dtype)
        self.q_bytes, self.kv_bytes = dtype.itemsize, kv_dtype.itemsize
        self.group = case.num_q_heads // case.num_kv_heads
        self.unit = sublanes(dtype)
        tuning = tuning_of(chip)
        shape = KVShape(
            case.num_kv_heads,
            case.page_size,
            row_dim(case.kv_dim, "tpu"),
            case.head_dim,
            *case.spec().v_slice(case.head_dim, row_dim(case.kv_dim, "tpu")),
        )
        query_bytes = prefill_query_bytes(shape, case.num_q_heads, dtype)
        self.query_tile = choose_query_tile(self.group, query_bytes, self.unit, tuning)
        self.decode_keys = round_up(tuning.decode_keys, case.page_size)
        self.prefill_keys = round_up(tuning.prefill_keys, case.page_size)
        self.tile = min(sublanes(kv_dtype), case.page_size)
        self.row_bytes = case.num_kv_heads * row_dim(case.kv_dim, "tpu") * self.kv_bytes
        # K and V of one head, in and out, for each query row.
        self.query_bytes = row_dim(case.head_dim, "tpu") + row_dim(case.value_dim, "tpu")
        self.query_bytes *= self.q_bytes
        self.pages = self.rows_written = self.queries = self.layout = self.flops = 0

    def _attend(self, position: int, last: int, num_queries: int, keys: int) -> None:
        """Queries from `position` on, of each head, over the pages up to key `last` in blocks of `keys`."""
        size, window = self.case.page_size, self.case.window
        first = 0 if window is None else max(0, position + 1 - window) // size
        self.pages += (-(-last // size) - first) * size * self.row_bytes
        for key in range(first * size, last, keys):
            # Queries in whole parts, without parts that see none of the keys.
            part = 1 if num_queries == 1 else self.query_tile.part
            begin = max(key - position, 0) // part
            end = num_queries if window is None else min(num_queries, key + keys - 1 + window - position)
            products = max(0, -(-end // part) - begin) * part * keys * self.case.num_q_heads
            self.flops += 2 * products * (self.case.head_dim + self.case.value_dim)

    def decode(self, kv_len: int) -> None:
        self._attend(kv_len - 1, kv_len, 1, self.decode_keys)
        self.rows_written += (1 + self.tile) * self.row_bytes
        self.queries += self.case.num_kv_heads * round_up(self.group, self.unit) * self.query_bytes

    def prefill(self, q_len: int, kv_len: int) -> None:
        start = kv_len - q_len
        tile = self.query_tile.part * self.query_tile.parts
        for within in range(0, q_len, tile):
            count = min(tile, q_len - within)
            self._attend(start + within, start + within + count, count, self.prefill_keys)
        pieces = (kv_len - 1) // self.tile - start // self.tile + 1
        # Gathered: new rows read, pieces written; then pieces read with the pool's, and the pool's written.
        self.layout += (q_len + pieces * self.tile) * self.row_bytes
        self.rows_written += 3 * pieces * self.tile * self.row_bytes
        self.queries += self.case.num_q_heads * -(-q_len // tile) * tile * self.query_bytes
        self.layout += 2 * self.case.num_q_heads * q_len * self.query_bytes
