"""The plain twin: gathers every sequence's whole page list and attends to it, nothing clever.

Other implementations are checked against this one, and this one against a dense loop in numpy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def reference_attention(
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
    del decode_only
    num_tokens, num_q_heads, head_dim = q.shape
    _, _, num_kv_heads, _, page_size, _ = kv_pool.shape
    num_seqs, pages_per_seq = page_indices.shape
    context = pages_per_seq * page_size
    group = num_q_heads // num_kv_heads

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
    is_padding = row >= num_seqs
    row = jnp.minimum(row, num_seqs - 1)
    position = kv_lens[row] - cu_q_lens[row + 1] + token  # of each query in its sequence

    used = jnp.arange(pages_per_seq)[None, :] * page_size < kv_lens[:, None]
    pages = jnp.where(used, page_indices, 0)
    kv = kv_pool[layer, pages]  # [num_seqs, pages_per_seq, num_kv_heads, 2, page_size, head_dim]
    kv = jnp.moveaxis(kv, 1, 3).reshape(num_seqs, num_kv_heads, 2, context, head_dim).astype(jnp.float32)
    live = jnp.arange(context)[None, :] < kv_lens[:, None]  # [num_seqs, context]
    kv = jnp.where(live[:, None, None, :, None], kv, 0.0)  # stale memory may hold NaN, and 0 * NaN is NaN

    q4 = q.reshape(num_tokens, num_kv_heads, group, head_dim).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("thgd,thcd->thgc", q4, kv[row, :, 0], precision=highest) * sm_scale
    visible = (jnp.arange(context)[None, :] <= position[:, None]) & ~is_padding[:, None]
    scores = jnp.where(visible[:, None, None, :], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("thgc,thcd->thgd", weights, kv[row, :, 1], precision=highest)
    return out.reshape(num_tokens, num_q_heads, head_dim).astype(q.dtype)
