"""`write_kv`: scatter new K and V rows into their pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_kv(
    kv_pool: jax.Array,
    layer: int | jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
) -> jax.Array:
    """Write each token's K and V at (pages[t], offsets[t]) of `layer`; returns the pool.

    Args:
        kv_pool: [num_layers, num_pages, num_kv_heads, 2, page_size, head_dim]; donate it, else it is copied.
        layer: which layer's part of the pool.
        k: [num_tokens, num_kv_heads, head_dim].
        v: [num_tokens, num_kv_heads, head_dim].
        pages: int32 [num_tokens]; padding tokens name page 0.
        offsets: int32 [num_tokens], in [0, page_size).
    """
    kv = jnp.stack([k, v], axis=2).astype(kv_pool.dtype)  # [num_tokens, num_kv_heads, 2, head_dim]
    return kv_pool.at[layer, pages, :, :, offsets].set(kv, mode="promise_in_bounds")
