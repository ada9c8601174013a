"""`write_kv`: new K and V rows into their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from pallas_kernels.ragged_paged_attention.types import Rows


def kv_rows(k: jax.Array, v: jax.Array | None, dtype: jnp.dtype, row_dim: int | None = None) -> jax.Array:
    """The pool's rows, [num_tokens, num_kv_heads, row_dim], of k and v (None in latent form).

    row_dim None: as long as K and V; more is filled with zeros.
    Values past what `dtype` can hold are clamped: a cast to float8_e4m3fn would make them NaN.
    """
    kv = k if v is None else jnp.concatenate([k, v], axis=-1)
    if row_dim is not None:
        kv = jnp.pad(kv, [(0, 0)] * (kv.ndim - 1) + [(0, row_dim - kv.shape[-1])])
    dtype = jnp.dtype(dtype)
    if dtype.itemsize > 1:
        return kv.astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(kv), jnp.iinfo(dtype).min, jnp.iinfo(dtype).max).astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(kv, -most, most).astype(dtype)


def locate_tokens(
    rows: Rows, num_tokens: int, page_size: int, *, decode_only: bool
) -> tuple[jax.Array, jax.Array]:
    """Page and offset in it, int32 [num_tokens] each, of every token of the step; padding is on page 0."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = rows.cu_q_lens[1:]
    row = (
        token
        if decode_only
        else jnp.searchsorted(ends, token, side="right", method="compare_all").astype(jnp.int32)
    )
    row = jnp.minimum(row, ends.shape[0] - 1)
    is_live = token < ends[-1]
    position = jnp.where(is_live, rows.kv_lens[row] - ends[row] + token, 0)
    page = rows.page_indices[row, position // page_size]
    return jnp.where(is_live, page, 0), position % page_size


def write_kv(
    kv_pool: jax.Array, layer: int | jax.Array, kv: jax.Array, pages: jax.Array, offsets: jax.Array
) -> jax.Array:
    """Write each token's row at (pages[t], offsets[t]) of `layer`; returns the pool.

    Args:
        kv_pool: [num_layers, num_pages, num_kv_heads, page_size, row_dim]; donate it, else it is copied.
        layer: which layer's part of the pool.
        kv: [num_tokens, num_kv_heads, row_dim] in the pool's dtype (see `kv_rows`).
        pages: int32 [num_tokens]; padding tokens name page 0.
        offsets: int32 [num_tokens], in [0, page_size).
    """
    return kv_pool.at[layer, pages, :, offsets].set(kv, mode="promise_in_bounds")
