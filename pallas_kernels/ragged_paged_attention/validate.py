"""Shape checks shared by all implementations, at trace time."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def validate(
    q: jax.Array,
    kv_pool: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    *,
    decode_only: bool,
) -> None:
    """Raise ValueError that names what does not fit."""
    if q.ndim != 3:
        raise ValueError(f"q must be [num_tokens, num_q_heads, head_dim], got {q.shape}")
    if kv_pool.ndim != 6 or kv_pool.shape[3] != 2:
        raise ValueError(
            f"kv_pool must be [layers, pages, kv_heads, 2, page_size, head_dim], got {kv_pool.shape}"
        )
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_pool.shape[2]
    if kv_pool.shape[5] != head_dim:
        raise ValueError(f"head_dim of q is {head_dim}, of the pool {kv_pool.shape[5]}")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads cannot share {num_kv_heads} key-value heads evenly")
    num_seqs = kv_lens.shape[0]
    if page_indices.ndim != 2 or page_indices.shape[0] != num_seqs:
        raise ValueError(f"page_indices must be [{num_seqs}, pages_per_seq], got {page_indices.shape}")
    if cu_q_lens.shape != (num_seqs + 1,):
        raise ValueError(f"cu_q_lens must be [{num_seqs + 1}], got {cu_q_lens.shape}")
    for name, array in (("kv_lens", kv_lens), ("page_indices", page_indices), ("cu_q_lens", cu_q_lens)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
    if decode_only and num_tokens != num_seqs:
        raise ValueError(f"decode_only needs one token a sequence, got {num_tokens} for {num_seqs}")
