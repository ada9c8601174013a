"""The native kernel: all weights that share their activations, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import target
from pallas_kernels.packed_matmul.weight import PackedWeight


def cpu_packed_matmul(
    x: jax.Array,
    weights: Sequence[PackedWeight],
    out_sizes: Sequence[int],
    *,
    layer: jax.Array,
    num_live: jax.Array,
    isa: str,
) -> list[jax.Array]:
    """See `packed_matmul`; x float32."""
    results = [jax.ShapeDtypeStruct((x.shape[0], size), jnp.float32) for size in out_sizes]
    call = jax.ffi.ffi_call(target("jaxserve_packed_matmul", isa), results)
    arrays = [array for weight in weights for array in weight if array is not None]
    has_mins = np.array([weight.mins is not None for weight in weights], np.int64)
    return list(call(x, layer, num_live, *arrays, has_mins=has_mins))
