"""The native kernel: all weights that share their activations, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import target
from pallas_kernels.packed_matmul.activations import Activations, Gated, Normed
from pallas_kernels.packed_matmul.weight import PackedWeight

_NOTHING, _NORM, _GATES = 0, 1, {"silu": 2, "gelu_tanh": 3}  # `Before` in packed_matmul.h


def cpu_packed_matmul(
    x: Activations,
    weights: Sequence[PackedWeight],
    out_sizes: Sequence[int],
    *,
    layer: jax.Array,
    num_live: jax.Array,
    residual: jax.Array | None,
    is_fine: bool,
    isa: str,
) -> list[jax.Array]:
    """See `packed_matmul`; all float32."""
    before, eps, others = _NOTHING, 0.0, []
    if isinstance(x, Normed):
        before, eps, others, x = _NORM, x.eps, [x.weight], x.x
    elif isinstance(x, Gated):
        before, others, x = _GATES[x.activation], [x.up], x.gate
    results = [jax.ShapeDtypeStruct((x.shape[0], size), jnp.float32) for size in out_sizes]
    call = jax.ffi.ffi_call(target("jaxserve_packed_matmul", isa), results)
    arrays = [array for weight in weights for array in weight if array is not None]
    if residual is not None:
        others.append(residual)
    return list(
        call(
            x,
            layer,
            num_live,
            *(array.astype(jnp.float32) for array in others),
            *arrays,
            has_mins=np.array([weight.mins is not None for weight in weights], np.int64),
            before=np.int64(before),
            eps=np.float32(eps),
            has_residual=residual is not None,
            is_fine=is_fine,
        )
    )
