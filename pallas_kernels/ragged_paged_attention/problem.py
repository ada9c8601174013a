"""Random inputs of a case and what its attention must be, from a dense loop in numpy: for tests and checks.

All memory that must not be read holds NaN (where the pool's dtype has one, else its largest value): pages of
nobody, the rest of a sequence's last page, the places of the tokens that the call itself writes, the entries
of the page table past a sequence's last page, and padding queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pool_layout import pool_shape, row_dim
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.ragged_paged_attention.types import Rows

_SPARE_PAGES = 3  # pages of nobody


class Problem:
    """A case's arrays. `expected` [num_live_tokens, num_q_heads, v_dim] is float64."""

    def __init__(self, case: Case, seed: int = 0, dtype: str = "float32", platform: str = "cpu") -> None:
        self.case = case
        self.platform = platform
        self.rng = np.random.default_rng(seed)
        self.kv_dtype = jnp.dtype(case.kv_dtype)
        self.dtype = jnp.dtype(dtype)
        used = [-(-kv // case.page_size) for _, kv in case.rows]
        num_pages = 1 + sum(used) + _SPARE_PAGES
        num_rows = len(case.rows) + case.empty_rows
        num_tokens = sum(q for q, _ in case.rows) + case.padding_tokens
        width = row_dim(case.kv_dim, platform)
        shape = pool_shape(case.num_layers, num_pages, case.num_kv_heads, case.page_size, width)
        self.pool = np.full(shape, self.poison, self.kv_dtype)
        self.pool[:, 0] = 0  # padding may read page 0
        self.page_indices = np.full((num_rows, max(used, default=0) + 2), num_pages - 1, np.int32)
        self.kv_lens = np.zeros(num_rows, np.int32)
        self.q = np.full((num_tokens, case.num_q_heads, case.head_dim), np.nan, self.dtype)
        self.k = np.full((num_tokens, case.num_kv_heads, case.head_dim), np.nan, self.dtype)
        self.v = np.full((num_tokens, case.num_kv_heads, case.value_dim), np.nan, self.dtype)
        self.scales = self._scales()
        self.sinks = self.rng.standard_normal(case.num_q_heads).astype(np.float32) if case.sinks else None
        # Angles of each token, [num_tokens, rotary / 2]; of padding NaN.
        self.angles = np.full((num_tokens, (case.rotary or 0) // 2), np.nan)
        self.written = self.pool.copy()  # what the pool must hold afterwards
        self.written_at: list[tuple[int, int]] = []  # (page, offset) of live tokens
        self.expected = np.zeros((0, case.num_q_heads, case.value_dim))
        self._fill(used)

    @property
    def poison(self) -> Any:
        if jnp.issubdtype(self.kv_dtype, jnp.integer):
            return jnp.iinfo(self.kv_dtype).max
        return np.nan

    def _scales(self) -> np.ndarray:
        """K and V scales, float32 [2, num_kv_heads]."""
        heads = self.case.num_kv_heads
        if not self.case.scales:
            return np.ones((2, heads), np.float32)
        unit = 4.0 / (127.0 if jnp.issubdtype(self.kv_dtype, jnp.integer) else 448.0)
        return (unit * self.rng.uniform(1.0, 2.0, (2, heads))).astype(np.float32)

    def _fill(self, used: list[int]) -> None:
        case, rng = self.case, self.rng
        free = rng.permutation(np.arange(1, 1 + sum(used)))
        q_lens = np.zeros(len(self.kv_lens), np.int32)
        start, expected = 0, [self.expected]
        for row, (q_len, kv_len) in enumerate(case.rows):
            pages, free = free[: used[row]], free[used[row] :]
            self.page_indices[row, : used[row]] = pages
            self.kv_lens[row], q_lens[row] = kv_len, q_len
            k = rng.standard_normal((kv_len, case.num_kv_heads, case.head_dim)).astype(self.dtype)
            v = rng.standard_normal((kv_len, case.num_kv_heads, case.value_dim)).astype(self.dtype)
            q = rng.standard_normal((q_len, case.num_q_heads, case.head_dim)).astype(self.dtype)
            new = slice(start, start + q_len)
            self.q[new], self.k[new], self.v[new] = q, k[kv_len - q_len :], v[kv_len - q_len :]
            if case.rotary is not None:
                self.angles[new] = rng.uniform(-4.0, 4.0, self.angles[new].shape)
                q = _rotated(q, self.angles[new])
                k[kv_len - q_len :] = _rotated(self.k[new], self.angles[new])
            start += q_len
            stored = self._stored(k, v)  # [kv_len, num_kv_heads, row_dim]
            for position in range(kv_len):
                page, offset = int(pages[position // case.page_size]), position % case.page_size
                self.written[case.layer, page, :, offset] = stored[position]
                self.written_at.append((page, offset))
                if position < kv_len - q_len:
                    self.pool[case.layer, page, :, offset] = stored[position]
            k64 = stored[..., : case.head_dim].astype(np.float64) * self.scales[0][:, None]
            v64 = stored[..., case.head_dim : case.kv_dim].astype(np.float64) * self.scales[1][:, None]
            if case.latent:
                v64 = k64[..., : case.value_dim]
            expected.append(dense_attention(case, q.astype(np.float64), k64, v64, self.sinks))
        self.num_live = start
        self.cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        self.expected = np.concatenate(expected)

    def _stored(self, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Rows as the pool holds them."""
        k = k.astype(np.float32) / self.scales[0][:, None]
        v = v.astype(np.float32) / self.scales[1][:, None]
        rows = k if self.case.latent else np.concatenate([k, v], axis=-1)
        if jnp.issubdtype(self.kv_dtype, jnp.integer):
            rows = np.clip(np.round(rows), -128, 127)
        rows = np.pad(rows, ((0, 0), (0, 0), (0, self.pool.shape[4] - rows.shape[2])))
        return rows.astype(self.kv_dtype)

    @property
    def rows(self) -> Rows:
        return Rows(jnp.asarray(self.kv_lens), jnp.asarray(self.page_indices), jnp.asarray(self.cu_q_lens))

    def run(
        self,
        implementation: str,
        *,
        chip: str | None = None,
        decode_only: bool = False,
        interpret: Any = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The call's result: out [num_tokens, num_q_heads, v_dim] and the pool."""
        call = make_call(
            self.case,
            platform=self.platform,
            chip=chip,
            implementation=implementation,
            decode_only=decode_only,
            interpret=interpret,
        )
        arrays = [jnp.asarray(x) for x in (self.q, self.k, self.v, self.pool)]
        if self.case.rotary is not None:
            rope = tuple(jnp.asarray(f(self.angles), jnp.float32) for f in (np.cos, np.sin))
            call = functools.partial(call, rope=rope)
        sinks = jnp.zeros(self.case.num_q_heads) if self.sinks is None else jnp.asarray(self.sinks)
        out, pool = jax.jit(call)(*arrays, self.rows, jnp.int32(self.case.layer), sinks, self.scales)
        return np.asarray(out), np.asarray(pool)

    def check(self, out: np.ndarray, pool: np.ndarray, *, tolerance: float) -> None:
        """Raise AssertionError unless outputs and pool are right: live rows written, other pages kept."""
        np.testing.assert_allclose(
            out[: self.num_live].astype(np.float64), self.expected, atol=tolerance, rtol=tolerance
        )
        layer = self.case.layer
        live = np.zeros(pool.shape[1:4:2], bool)  # [num_pages, page_size]
        for page, offset in self.written_at:
            live[page, offset] = True
        got, wanted = (np.moveaxis(p[layer], 1, 2)[live].astype(np.float32) for p in (pool, self.written))
        # What was rotated may be rounded to the next number.
        unit = 0.0 if self.case.rotary is None else float(jnp.finfo(self.kv_dtype).eps)
        np.testing.assert_allclose(got, wanted, rtol=unit, atol=unit)
        # Page 0 takes padding; the rest of a page that the call writes to may change, other pages may not.
        others = np.delete(np.arange(pool.shape[0]), layer)
        np.testing.assert_array_equal(pool[others, 1:].view(np.uint8), self.pool[others, 1:].view(np.uint8))
        touched = np.unique([page for page, _ in self.written_at])
        spare = np.setdiff1d(np.arange(1, pool.shape[1]), touched)
        np.testing.assert_array_equal(pool[:, spare].view(np.uint8), self.pool[:, spare].view(np.uint8))


def make_call(case: Case, *, decode_only: bool, **options: Any) -> Callable[..., Any]:
    """call(q, k, v, kv_pool, rows, layer, sinks, scales, rope) -> (out, kv_pool) of a case, to be jitted."""

    def call(
        q: Any, k: Any, v: Any, pool: Any, rows: Rows, layer: Any, sinks: Any, scales: Any, rope: Any = None
    ) -> Any:
        return ragged_paged_attention(
            q,
            k,
            None if case.latent else v,
            pool,
            layer,
            rows,
            spec=case.spec(decode_only=decode_only),
            window=case.window,
            sinks=sinks if case.sinks else None,
            kv_scales=(scales[0], scales[1]) if case.scales else None,
            rope=rope,
            **options,
        )

    return call


def abstract_inputs(case: Case, platform: str, sharding: Any, *, pool_bytes: int = 1 << 30) -> list[Any]:
    """What `make_call`'s function takes, as shapes with activations in bfloat16, or float32 for such a pool.

    The pool is as big as a real one: a small one fits on the chip, and XLA would move it there.
    """

    def aval(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    kv_dtype = jnp.dtype(case.kv_dtype)
    dtype = jnp.float32 if kv_dtype == jnp.float32 else jnp.bfloat16
    num_tokens, num_rows = (
        sum(q for q, _ in case.rows) + case.padding_tokens,
        len(case.rows) + case.empty_rows,
    )
    shape = (case.num_layers, 1, case.num_kv_heads, case.page_size, row_dim(case.kv_dim, platform))
    num_pages = max(2, pool_bytes // (math.prod(shape) * kv_dtype.itemsize))
    pages_per_seq = -(-max(4096, *(kv for _, kv in case.rows)) // case.page_size)
    rows = Rows(
        aval(jnp.int32, num_rows), aval(jnp.int32, num_rows, pages_per_seq), aval(jnp.int32, num_rows + 1)
    )
    return [
        aval(dtype, num_tokens, case.num_q_heads, case.head_dim),
        aval(dtype, num_tokens, case.num_kv_heads, case.head_dim),
        aval(dtype, num_tokens, case.num_kv_heads, case.value_dim),
        aval(kv_dtype, shape[0], num_pages, *shape[2:]),
        rows,
        aval(jnp.int32),
        aval(jnp.float32, case.num_q_heads),
        aval(jnp.float32, 2, case.num_kv_heads),
    ]


def _rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """x [num_tokens, num_heads, head_dim], its leading elements turned as complex numbers."""
    half = angles.shape[1]
    numbers = x[..., :half].astype(np.float64) + 1j * x[..., half : 2 * half].astype(np.float64)
    numbers = numbers * np.exp(1j * angles)[:, None, :]
    return np.concatenate([numbers.real, numbers.imag, x[..., 2 * half :]], axis=-1).astype(x.dtype)


def dense_attention(
    case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None
) -> np.ndarray:
    """Causal attention of the last tokens, one query and head at a time, in float64."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for i in range(len(q)):
        stop = len(k) - len(q) + i + 1
        seen = slice(0 if case.window is None else max(0, stop - case.window), stop)
        for head in range(q.shape[1]):
            scores = k[seen, head // group] @ q[i, head] * case.head_dim**-0.5
            if case.soft_cap is not None:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            logits = scores if sinks is None else np.append(scores, sinks[head])
            weights = np.exp(logits - logits.max())
            weights = (weights / weights.sum())[: len(scores)]
            out[i, head] = weights @ v[seen, head // group]
    return out
