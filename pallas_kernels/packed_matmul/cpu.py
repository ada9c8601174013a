"""The native kernels: all weights that share their activations in one call, and a whole MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import target
from pallas_kernels.packed_matmul.activations import Activations, Gated, Normed
from pallas_kernels.packed_matmul.weight import PackedWeight

if TYPE_CHECKING:
    from pallas_kernels.packed_matmul.mlp import MLPWeights

_NOTHING, _NORM, _GATES = 0, 1, {"silu": 2, "gelu_tanh": 3}  # `Before` in packed_activations.h


def cpu_packed_matmul(
    x: Activations,
    weights: Sequence[PackedWeight],
    out_sizes: Sequence[int],
    *,
    layer: jax.Array,
    num_live: jax.Array,
    residual: jax.Array | None,
    is_fine: Sequence[bool],
    isa: str,
) -> list[jax.Array]:
    """See `packed_matmul`; results are float32."""
    before, eps, others, x = _before(x)
    results = [jax.ShapeDtypeStruct((x.shape[0], size), jnp.float32) for size in out_sizes]
    return list(
        jax.ffi.ffi_call(target("jaxserve_packed_matmul", isa), results)(
            x,
            layer,
            num_live,
            *_operands(others, residual, weights),
            has_mins=_has_mins(weights),
            before=before,
            eps=eps,
            has_residual=residual is not None,
            is_fine=np.array(is_fine, np.int64),
        )
    )


def cpu_packed_mlp(
    x: Activations,
    weights: MLPWeights,
    out_size: int,
    activation: Literal["silu", "gelu_tanh"],
    *,
    layer: jax.Array,
    num_live: jax.Array,
    residual: jax.Array | None,
    isa: str,
) -> jax.Array:
    """See `packed_mlp`; the result is float32."""
    before, eps, others, x = _before(x)
    result = jax.ShapeDtypeStruct((x.shape[0], out_size), jnp.float32)
    return jax.ffi.ffi_call(target("jaxserve_packed_mlp", isa), result)(
        x,
        layer,
        num_live,
        *_operands(others, residual, weights),
        has_mins=_has_mins(weights),
        before=before,
        eps=eps,
        has_residual=residual is not None,
        activation=np.int64(_GATES[activation]),
    )


def _before(x: Activations) -> tuple[np.int64, np.float32, list[jax.Array], jax.Array]:
    """What the kernel does first, its epsilon and other operand, and what it is done to, in float32."""
    if isinstance(x, Normed):
        return np.int64(_NORM), np.float32(x.eps), [x.weight], x.x.astype(jnp.float32)
    if isinstance(x, Gated):
        return np.int64(_GATES[x.activation]), np.float32(0.0), [x.up], x.gate.astype(jnp.float32)
    return np.int64(_NOTHING), np.float32(0.0), [], x.astype(jnp.float32)


def _operands(
    others: Sequence[jax.Array], residual: jax.Array | None, weights: Sequence[PackedWeight]
) -> list[jax.Array]:
    floats = [*others, *([] if residual is None else [residual])]
    arrays = [jnp.asarray(array) for weight in weights for array in weight if array is not None]
    return [*(array.astype(jnp.float32) for array in floats), *arrays]


def _has_mins(weights: Sequence[PackedWeight]) -> np.ndarray:
    return np.array([weight.mins is not None for weight in weights], np.int64)
