"""Shape checks shared by all implementations, at trace time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows


def validate(
    q: jax.Array,
    kv: tuple[jax.Array | None, jax.Array | None],
    kv_pool: jax.Array,
    rows: Rows,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    rope: tuple[jax.Array, jax.Array] | None,
) -> None:
    """Raise ValueError that names what does not fit."""
    if q.ndim != 3:
        raise ValueError(f"q must be [num_tokens, num_q_heads, k_dim], got {q.shape}")
    if kv_pool.ndim != 5:
        raise ValueError(
            f"kv_pool must be [layers, pages, kv_heads, page_size, row_dim], got {kv_pool.shape}"
        )
    num_tokens, num_q_heads, k_dim = q.shape
    _, _, num_kv_heads, _, row_dim = kv_pool.shape
    latent = spec.latent_v_dim
    start, stop = spec.v_slice(k_dim, row_dim)
    if not start < stop <= row_dim or k_dim > row_dim:
        raise ValueError(f"a pool row of {row_dim} has no room for K of {k_dim} and V at {start}:{stop}")
    if latent is not None and latent > k_dim:
        raise ValueError(f"in latent form V is a part of K: {latent} of {k_dim}")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads cannot share {num_kv_heads} key-value heads evenly")
    _validate_new(kv, (num_tokens, num_kv_heads), k_dim, 0 if latent is not None else stop - start)
    num_seqs = rows.kv_lens.shape[0]
    if rows.page_indices.ndim != 2 or rows.page_indices.shape[0] != num_seqs:
        raise ValueError(f"page_indices must be [{num_seqs}, pages_per_seq], got {rows.page_indices.shape}")
    if rows.cu_q_lens.shape != (num_seqs + 1,):
        raise ValueError(f"cu_q_lens must be [{num_seqs + 1}], got {rows.cu_q_lens.shape}")
    for name, array in zip(rows._fields, rows, strict=True):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
    if spec.decode_only and num_tokens != num_seqs:
        raise ValueError(f"decode_only needs one token a sequence, got {num_tokens} for {num_seqs}")
    if sinks is not None and sinks.shape != (num_q_heads,):
        raise ValueError(f"sinks must be [{num_q_heads}], got {sinks.shape}")
    if rope is not None:
        _validate_rope(*rope, num_tokens, k_dim)


def _validate_new(
    kv: tuple[jax.Array | None, jax.Array | None], leading: tuple[int, int], k_dim: int, v_dim: int
) -> None:
    """k and v are both there or neither; in latent form (v_dim 0) there is no v."""
    k, v = kv
    if k is None:
        if v is not None:
            raise ValueError("v is given without k")
        return
    if k.shape != (*leading, k_dim):
        raise ValueError(f"k must be {[*leading, k_dim]}, got {k.shape}")
    if v_dim and (v is None or v.shape != (*leading, v_dim)):
        raise ValueError(f"v must be {[*leading, v_dim]}, got {None if v is None else v.shape}")
    if not v_dim and v is not None:
        raise ValueError("in latent form V is a part of K: v must be None")


def _validate_rope(cos: jax.Array, sin: jax.Array, num_tokens: int, k_dim: int) -> None:
    if cos.ndim != 2 or cos.shape[0] != num_tokens or 2 * cos.shape[1] > k_dim or sin.shape != cos.shape:
        raise ValueError(
            f"rope must be cos and sin, [{num_tokens}, at most {k_dim // 2}], got {cos.shape}, {sin.shape}"
        )
    if cos.dtype != jnp.float32 or sin.dtype != jnp.float32:
        raise ValueError(f"rope must be float32, got {cos.dtype} and {sin.dtype}")
