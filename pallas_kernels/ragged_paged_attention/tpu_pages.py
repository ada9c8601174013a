"""What the TPU kernels share: a stream of KV blocks from the pool into VMEM, and the softmax over them.

A block is `pages_per_block` pages, fetched with one copy a page into one of two buffers while the block
before it is computed on; a copy brings K and V of all heads. Computing goes by sub-blocks of `keys` keys, so
that a short sequence costs what its own length costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.types import AttentionSpec

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
LANES = 128
# Bytes of page table that a kernel call keeps in scalar memory (1 MiB in all).
TABLE_BYTES = 512 * 1024
NO_WINDOW = 1 << 30


def sublanes(dtype: Any) -> int:
    """Rows of a native tile: the unit that copies and stores may address."""
    return 32 // jnp.dtype(dtype).itemsize


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


@dataclass(frozen=True)
class KVShape:
    """Static facts of a call's pool and of how its rows are multiplied.

    Where K or V does not start and end on 128 lanes, whole rows are multiplied instead: q is zero where the
    row holds V, and of the output's columns those of V are kept.
    """

    num_heads: int
    page_size: int
    row_dim: int
    k_dim: int
    v_start: int
    v_stop: int

    @classmethod
    def of(cls, kv_pool: jax.Array, k_dim: int, spec: AttentionSpec) -> KVShape:
        _, _, num_heads, page_size, row_dim = kv_pool.shape
        return cls(num_heads, page_size, row_dim, k_dim, *spec.v_slice(k_dim, row_dim))

    @property
    def is_whole_row(self) -> bool:
        return any(n % LANES for n in (self.v_start, self.v_stop)) or (
            self.k_dim % LANES != 0 and self.k_dim != self.row_dim
        )

    @property
    def q_width(self) -> int:
        return self.row_dim if self.is_whole_row else self.k_dim

    @property
    def out_width(self) -> int:
        return self.row_dim if self.is_whole_row else self.v_stop - self.v_start

    def widen(self, q: jax.Array) -> jax.Array:
        """q [..., k_dim] -> [..., q_width]."""
        return jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, self.q_width - self.k_dim)])

    def narrow(self, out: jax.Array) -> jax.Array:
        """out [..., out_width] -> [..., v_dim]."""
        return out[..., self.v_start : self.v_stop] if self.is_whole_row else out

    def split(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """rows [keys, row_dim] -> the two factors, [keys, q_width] and [keys, out_width]."""
        if self.is_whole_row:
            return rows, rows
        return rows[:, : self.k_dim], rows[:, self.v_start : self.v_stop]


@dataclass(frozen=True)
class Blocks:
    """How much is fetched and computed at a time; see `tpu_tuning`."""

    pages_per_block: int
    pages_per_step: int  # of a sub-block

    @property
    def steps(self) -> int:
        return self.pages_per_block // self.pages_per_step


def vmem_limit(kv_pool: jax.Array, blocks: Blocks, state_bytes: int = 0) -> int:
    """Bytes of VMEM a kernel may use: its page buffers, its state, and room for the rest."""
    _, _, heads, page_size, row_dim = kv_pool.shape
    padded = round_up(page_size, sublanes(kv_pool.dtype)) * round_up(row_dim, LANES)
    buffers = 2 * blocks.pages_per_block * heads * padded * kv_pool.dtype.itemsize
    return buffers + state_bytes + 24 * 2**20


def for_each_head(num_heads: int, at_once: int, body: Callable[[jax.Array | int], None]) -> None:
    """body(head) for each head; written out for groups of up to `at_once`, looped over groups."""
    size = max(n for n in range(1, at_once + 1) if num_heads % n == 0)

    def one_group(i: jax.Array | int, _: None) -> None:
        for j in range(size):
            body(i * size + j)

    if size == num_heads:
        one_group(0, None)
    else:
        jax.lax.fori_loop(0, num_heads // size, one_group, None)


class PageStream:
    """Fetches blocks of pages; lives inside a kernel's body.

    Refs: pool (HBM) [num_layers, num_pages, num_heads, page_size, row_dim], table (SMEM, flat)
    int32 [num_seqs * pages_per_seq], buffers (VMEM) [2, pages_per_block, num_heads, page_size, row_dim],
    semaphores [2].
    """

    def __init__(
        self, refs: tuple[Any, Any, Any, Any], layer: jax.Array, pages_per_seq: int, blocks: Blocks
    ) -> None:
        self.pool, self.table, self.buffers, self.semaphores = refs
        self.layer = layer
        self.pages_per_seq = pages_per_seq
        self.blocks = blocks
        self.page_size = self.buffers.shape[3]
        self.keys = blocks.pages_per_step * self.page_size  # of a sub-block

    def _copy(self, row: jax.Array, page: jax.Array, place: jax.Array, slot: jax.Array) -> Any:
        return pltpu.make_async_copy(
            self.pool.at[self.layer, self.table[row * self.pages_per_seq + page]],
            self.buffers.at[slot, place],
            self.semaphores.at[slot],
        )

    def count(self, first_page: jax.Array, num_pages: jax.Array) -> jax.Array:
        """Live pages of the block that starts at `first_page` of a row with `num_pages`."""
        return jnp.minimum(num_pages - first_page, self.blocks.pages_per_block)

    def start(self, row: jax.Array, first_page: jax.Array, count: jax.Array, slot: jax.Array) -> None:
        def one(i: jax.Array, _: None) -> None:
            self._copy(row, first_page + i, i, slot).start()

        jax.lax.fori_loop(0, count, one, None)

    def wait(self, row: jax.Array, first_page: jax.Array, count: jax.Array, slot: jax.Array) -> None:
        def one(i: jax.Array, _: None) -> None:
            self._copy(row, first_page + i, i, slot).wait()

        jax.lax.fori_loop(0, count, one, None)

    def zero_after(self, last: jax.Array, slot: jax.Array, new: jax.Array | None, slab_ref: Any) -> None:
        """Zero the buffer's rows after key `last` (of the block) up to the end of its sub-block.

        Stale memory may hold NaN, and 0 * NaN is NaN. With `new` [num_heads, 1, row_dim] also put it at
        `last`; the rows around it, the smallest piece that a copy can write, go to slab_ref as well.
        """
        tile = min(sublanes(self.buffers.dtype), self.page_size)
        per_page = self.page_size // tile

        def piece(i: jax.Array) -> tuple[Any, ...]:
            start = pl.multiple_of((i % per_page) * tile, tile)
            return (slot, i // per_page, slice(None), pl.ds(start, tile), slice(None))

        here = last // tile
        shape = (self.buffers.shape[2], tile, self.buffers.shape[4])
        index = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + here * tile
        old = self.buffers[piece(here)]
        merged = jnp.where(index > last, jnp.zeros_like(old), old)
        if new is not None:
            merged = jnp.where(index == last, jnp.broadcast_to(new, shape), merged)
            slab_ref[...] = merged
        self.buffers[piece(here)] = merged

        def clear(i: jax.Array, _: None) -> None:
            self.buffers[piece(i)] = jnp.zeros(shape, self.buffers.dtype)

        end = (last // self.keys + 1) * self.keys
        jax.lax.fori_loop(here + 1, end // tile, clear, None)

    def rows(self, slot: jax.Array, step: jax.Array, head: jax.Array | int) -> jax.Array:
        """[keys, row_dim] of one head, sub-block `step`."""
        num_pages = self.blocks.pages_per_step
        pages = self.buffers[slot, pl.ds(step * num_pages, num_pages), head]
        return pages.reshape(self.keys, self.buffers.shape[4])


class OnlineSoftmax:
    """Running maximum, sum and output of one head's queries, in VMEM.

    maximum, norm [num_heads, num_queries, 128] (all lanes alike), acc [num_heads, num_queries, out_width];
    float32. See Milakov & Gimelshein, 2018, arXiv:1805.02867.
    """

    def __init__(self, refs: tuple[Any, Any, Any], spec: AttentionSpec) -> None:
        self.maximum, self.norm, self.acc = refs
        self.spec = spec

    def reset(self, sinks: jax.Array | None) -> None:
        """sinks: float32, broadcast to [num_heads, num_queries, 128]."""
        self.acc[...] = jnp.zeros_like(self.acc)
        if sinks is None:
            self.maximum[...] = jnp.full(self.maximum.shape, MASKED, jnp.float32)
            self.norm[...] = jnp.zeros(self.norm.shape, jnp.float32)
        else:
            self.maximum[...] = jnp.broadcast_to(sinks, self.maximum.shape)
            self.norm[...] = jnp.ones(self.norm.shape, jnp.float32)

    def update(
        self, head: jax.Array | int, q: jax.Array, k: jax.Array, v: jax.Array, is_seen: jax.Array
    ) -> None:
        """q [num_queries, q_width], k [keys, q_width], v [keys, out_width], is_seen [num_queries, keys].

        While a query has seen no key its sums are garbage; the first true score scales them to 0.
        """
        scores = matmul(q, k.astype(q.dtype), transpose=True) * self.spec.sm_scale
        if self.spec.soft_cap is not None:
            scores = self.spec.soft_cap * jnp.tanh(scores / self.spec.soft_cap)
        scores = jnp.where(is_seen, scores, MASKED)
        old = self.maximum[head][:, :1]  # [num_queries, 1]
        new = jnp.maximum(old, scores.max(axis=1, keepdims=True))
        p = jnp.exp(scores - new)
        scale = jnp.exp(old - new)
        lanes = self.norm.shape[1:]
        norm = self.norm[head][:, :1] * scale + p.sum(axis=1, keepdims=True)
        self.maximum[head] = jnp.broadcast_to(new, lanes)
        self.norm[head] = jnp.broadcast_to(norm, lanes)
        v = v.astype(q.dtype)
        self.acc[head] = self.acc[head] * scale + matmul(p.astype(v.dtype), v, transpose=False)

    def result(self, head: jax.Array | int) -> jax.Array:
        """float32 [num_queries, out_width]."""
        norm = self.norm[head][:, :1]
        return self.acc[head] / jnp.where(norm == 0.0, 1.0, norm)


def matmul(a: jax.Array, b: jax.Array, *, transpose: bool) -> jax.Array:
    """a [m, k] times b [k, n] (or [n, k] to be transposed), accumulated in float32."""
    exact = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transpose else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
