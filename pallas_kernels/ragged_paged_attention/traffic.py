"""Bytes that the TPU kernels move to and from memory, counted from how they go about it.

`roofline.attention_cost` is what a call must move at least: every live row of the pool once, every new row
written once, queries and outputs once. What the kernels move beyond that is stated here by its cause, so that
it can be looked at before there is a chip to time anything on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.pool_layout import row_dim
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.ragged_paged_attention.tpu_pages import round_up, sublanes
from pallas_kernels.ragged_paged_attention.tpu_tuning import choose_query_tile, tuning_of
from pallas_kernels.roofline import AttentionShape, attention_cost


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call on one device."""

    least: float  # the minimum
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
    least = attention_cost(*zip(*case.rows, strict=True), shape).num_bytes
    return Traffic(least, counter.pages, counter.rows_written, counter.queries, counter.layout)


class _Counter:
    def __init__(self, case: Case, chip: str | None, dtype: Any) -> None:
        self.case = case
        kv_dtype = jnp.dtype(case.kv_dtype)
        self.q_bytes, self.kv_bytes = dtype.itemsize, kv_dtype.itemsize
        self.group = case.num_q_heads // case.num_kv_heads
        self.unit = sublanes(dtype)
        self.query_tile = choose_query_tile(self.group, self.unit, tuning_of(chip))
        self.tile = min(sublanes(kv_dtype), case.page_size)
        self.row_bytes = case.num_kv_heads * row_dim(case.kv_dim, "tpu") * self.kv_bytes
        # K and V of one head, in and out, for each query row.
        self.query_bytes = row_dim(case.head_dim, "tpu") + row_dim(case.value_dim, "tpu")
        self.query_bytes *= self.q_bytes
        self.pages = self.rows_written = self.queries = self.layout = 0

    def _fetch(self, position: int, last: int) -> None:
        """Pages of a query at `position` and those after it, up to key `last`."""
        size, window = self.case.page_size, self.case.window
        first = 0 if window is None else max(0, position + 1 - window) // size
        self.pages += (-(-last // size) - first) * size * self.row_bytes

    def decode(self, kv_len: int) -> None:
        self._fetch(kv_len - 1, kv_len)
        self.rows_written += (1 + self.tile) * self.row_bytes
        self.queries += self.case.num_kv_heads * round_up(self.group, self.unit) * self.query_bytes

    def prefill(self, q_len: int, kv_len: int) -> None:
        start = kv_len - q_len
        for within in range(0, q_len, self.query_tile):
            self._fetch(start + within, min(start + within + self.query_tile, kv_len))
        pieces = (kv_len - 1) // self.tile - start // self.tile + 1
        # Gathered: new rows read, pieces written; then pieces read with the pool's, and the pool's written.
        self.layout += (q_len + pieces * self.tile) * self.row_bytes
        self.rows_written += 3 * pieces * self.tile * self.row_bytes
        tiles = -(-q_len // self.query_tile)
        self.queries += self.case.num_q_heads * tiles * self.query_tile * self.query_bytes
        self.layout += 2 * self.case.num_q_heads * q_len * self.query_bytes
