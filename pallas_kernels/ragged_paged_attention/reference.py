"""The plain twin: gathers every sequence's whole page list and attends to it, nothing clever.

Other implementations are checked against this one, and this one against a dense loop in numpy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def reference_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    layer: int | jax.Array,
    rows: Rows,
    *,
    spec: AttentionSpec,
    window: int | jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `ragged_paged_attention`; the step's K and V are in the pool already."""
    num_tokens, num_q_heads, k_dim = q.shape
    _, _, num_kv_heads, page_size, row_dim = kv_pool.shape
    num_seqs, pages_per_seq = rows.page_indices.shape
    context = pages_per_seq * page_size
    group = num_q_heads // num_kv_heads

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(rows.cu_q_lens[1:], token, side="right").astype(jnp.int32)
    is_padding = row >= num_seqs
    row = jnp.minimum(row, num_seqs - 1)
    position = rows.kv_lens[row] - rows.cu_q_lens[row + 1] + token  # of each query in its sequence

    used = jnp.arange(pages_per_seq)[None, :] * page_size < rows.kv_lens[:, None]
    pages = jnp.where(used, rows.page_indices, 0)
    kv = kv_pool[layer, pages]  # [num_seqs, pages_per_seq, num_kv_heads, page_size, row_dim]
    kv = jnp.moveaxis(kv, 1, 2).reshape(num_seqs, num_kv_heads, context, row_dim).astype(jnp.float32)
    live = jnp.arange(context)[None, :] < rows.kv_lens[:, None]  # [num_seqs, context]
    kv = jnp.where(live[:, None, :, None], kv, 0.0)  # stale memory may hold NaN, and 0 * NaN is NaN
    k, v = kv[..., :k_dim], kv[..., slice(*spec.v_slice(k_dim, row_dim))]

    q4 = q.reshape(num_tokens, num_kv_heads, group, k_dim).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("thgd,thcd->thgc", q4, k[row], precision=highest) * spec.sm_scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    key = jnp.arange(context)[None, :]
    visible = (key <= position[:, None]) & ~is_padding[:, None]
    if window is not None:
        visible &= key > position[:, None] - window
    scores = jnp.where(visible[:, None, None, :], scores, _MASKED)
    if sinks is not None:
        extra = jnp.broadcast_to(sinks.reshape(num_kv_heads, group), (num_tokens, num_kv_heads, group))
        scores = jnp.concatenate([scores, extra.astype(jnp.float32)[..., None]], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :context]
    out = jnp.einsum("thgc,thcd->thgd", weights, v[row], precision=highest)
    return out.reshape(num_tokens, num_q_heads, -1).astype(q.dtype)
