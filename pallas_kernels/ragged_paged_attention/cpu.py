"""Ragged paged attention in native code: one call a layer writes the new rows into the pool and attends.

What a query gets depends on its sequence alone, to the bit: not on the batch, on the number of threads, or on
how its prompt was cut into chunks of two or more queries. A sequence's only query in a call adds the same
products in another order (with up to 8 query heads a key-value head): the same but for float32's rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import target
from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows

_POOLS = ("float32", "bfloat16", "int8")
_NO_WINDOW = 2**31 - 1


def cpu_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_pool: jax.Array,
    layer: int | jax.Array,
    rows: Rows,
    *,
    spec: AttentionSpec,
    isa: str,
    window: int | jax.Array | None = None,
    sinks: jax.Array | None = None,
    rope: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `ragged_paged_attention`; padding rows of the result are zeros.

    A call whose kv_lens, cu_q_lens and page_indices do not fit each other fails when it runs. Page numbers
    are not checked.

    Raises:
        NotImplementedError: a pool of a dtype that the kernel does not serve; implementation="xla" does.
    """
    check_case(kv_pool)
    start, stop = spec.v_slice(q.shape[2], kv_pool.shape[4])
    results = [
        jax.ShapeDtypeStruct((*q.shape[:2], stop - start), jnp.float32),
        jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype),
    ]
    call = jax.ffi.ffi_call(target("jaxserve_attention", isa), results, input_output_aliases={1: 1})
    out, kv_pool = call(
        q.astype(jnp.float32),
        kv_pool,
        jnp.asarray(layer, jnp.int32),
        jnp.asarray(_NO_WINDOW if window is None else window, jnp.int32),
        *rows,
        *(array.astype(jnp.float32) for array in (k, v, sinks, *(rope or ())) if array is not None),
        scale=np.float32(spec.sm_scale),
        soft_cap=np.float32(spec.soft_cap or 0.0),
        v_start=np.int64(start),
        has_k=k is not None,
        has_v=v is not None,
        has_sinks=sinks is not None,
        has_rope=rope is not None,
    )
    return out.astype(q.dtype), kv_pool


def check_case(kv_pool: jax.Array) -> None:
    """Raise NotImplementedError, with the reason, for what the kernel does not serve."""
    if jnp.dtype(kv_pool.dtype).name not in _POOLS:
        raise NotImplementedError(
            f"ragged_paged_attention: implementation 'cpu' does not serve a pool of {kv_pool.dtype} "
            f"(serves {', '.join(_POOLS)})"
        )
