"""`ragged_paged_attention`: the public function; the implementations live beside it."""

from __future__ import annotations

import jax

from pallas_kernels.ragged_paged_attention.reference import reference_attention
from pallas_kernels.ragged_paged_attention.validate import validate
from pallas_kernels.ragged_paged_attention.xla import xla_attention
from pallas_kernels.support import resolve

_IMPLEMENTATIONS = {"reference": reference_attention, "xla": xla_attention}


def ragged_paged_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    layer: int | jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    *,
    sm_scale: float,
    decode_only: bool = False,
    platform: str,
    implementation: str = "auto",
) -> jax.Array:
    """Attention of each sequence's newest tokens over all of its tokens; prefill and decode in one call.

    Sequence s owns the queries q[cu_q_lens[s] : cu_q_lens[s + 1]], which are the last of its kv_lens[s]
    tokens; their K and V are in the pool already. Query i of them sees every token up to its own.

    Args:
        q: [num_tokens, num_q_heads, head_dim]; rows from cu_q_lens[-1] on are padding.
        kv_pool: [num_layers, num_pages, num_kv_heads, 2, page_size, head_dim]; see `pool_layout`.
        layer: which layer's part of the pool.
        kv_lens: int32 [num_seqs], tokens of each sequence, the new ones included; 0 for an empty row.
        page_indices: int32 [num_seqs, pages_per_seq]; entries past a sequence's last page are never read.
        cu_q_lens: int32 [num_seqs + 1], cumulative number of queries.
        sm_scale: what the scores are multiplied with, usually head_dim ** -0.5.
        decode_only: promise that q_lens are 1 for the leading rows and 0 after them, and num_tokens ==
            num_seqs.
        platform: "cpu", "gpu" or "tpu": the target, never asked of the running process.
        implementation: "auto", "xla" or "reference".

    Returns:
        [num_tokens, num_q_heads, head_dim] in q's dtype; padding rows are finite and mean nothing.

    Raises:
        NotImplementedError: the named implementation does not run on the platform.
        ValueError: shapes or dtypes do not fit together.
    """
    validate(q, kv_pool, kv_lens, page_indices, cu_q_lens, decode_only=decode_only)
    attend = _IMPLEMENTATIONS[resolve("ragged_paged_attention", platform, implementation)]
    return attend(
        q, kv_pool, layer, kv_lens, page_indices, cu_q_lens, sm_scale=sm_scale, decode_only=decode_only
    )
