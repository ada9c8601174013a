"""The weight at rest: a platform's kernels take it as it lies, so that no call repacks it.

    values  int4 or int8   TPU, CPU: [groups, group_size, out]      GPU: [groups, out, group_size]
    scales  float32, bfloat16   [groups, out]
    zeros   None, or as scales  [groups, out]
    weight[g * group_size + k, n] = scales[g, n] * (values[g, k, n] - zeros[g, n])

One group is a scale per output channel. The groups are an axis of their own because a reshape between the
integers and the product is what makes XLA write the weight out in floating point. TPU: `out` is last, so that
an output channel is a lane and groups of 32 need no padding to 128 lanes. GPU: `group_size` is last, since
Hopper's matrix unit takes a dequantised operand from registers only with the contraction along a row.
Values are signed everywhere: an unsigned checkpoint is moved by 8 or 128, and its zero points with it.
A mesh splits `out` or `groups` (one group: `group_size`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class QuantizedWeight(NamedTuple):
    """A pytree; see the module's text."""

    values: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None


def out_is_last(platform: str) -> bool:
    """Whether values lie as [groups, group_size, out]; else as [groups, out, group_size]."""
    return platform != "gpu"


def pack(
    values: jax.Array, scales: jax.Array, zeros: jax.Array | None = None, *, platform: str
) -> QuantizedWeight:
    """Lay a weight out for a platform.

    Args:
        values: int4, int8, uint4 or uint8 [in, out].
        scales: floating [groups, out]; float16 becomes float32.
        zeros: None, or [groups, out], integers or floats, to subtract from the values.
        platform: "cpu", "gpu" or "tpu".

    Raises:
        ValueError: a dtype or shape that does not fit.
    """
    offsets = {"int4": 0, "uint4": 8, "int8": 0, "uint8": 128}
    kind = values.dtype.name
    if kind not in offsets or values.ndim != 2:
        raise ValueError(f"values must be (u)int4 or (u)int8 [in, out], got {kind} {list(values.shape)}")
    if scales.ndim != 2 or scales.shape[1] != values.shape[1] or values.shape[0] % scales.shape[0]:
        raise ValueError(
            f"scales must be [groups, {values.shape[1]}] with groups that divide {values.shape[0]}, "
            f"got {list(scales.shape)}"
        )
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zeros must be {list(scales.shape)} like the scales, got {list(zeros.shape)}")
    scale_dtype = jnp.bfloat16 if scales.dtype == jnp.bfloat16 else jnp.float32
    offset = offsets[kind]
    if offset:
        # The moved values need their zero points even where the checkpoint has none.
        zeros = (jnp.zeros(scales.shape) if zeros is None else zeros.astype(jnp.float32)) - offset
        values = (values.astype(jnp.int32) - offset).astype(kind.removeprefix("u"))
    grouped = values.reshape(scales.shape[0], -1, values.shape[1])  # [groups, group_size, out]
    return QuantizedWeight(
        grouped if out_is_last(platform) else grouped.swapaxes(1, 2),
        scales.astype(scale_dtype),
        None if zeros is None else zeros.astype(scale_dtype),
    )


def dequantize(weight: QuantizedWeight, *, platform: str) -> jax.Array:
    """The weight as float32 [in, out]."""
    values = weight.values if out_is_last(platform) else weight.values.swapaxes(1, 2)
    grouped = values.astype(jnp.float32)  # [groups, group_size, out]
    if weight.zeros is not None:
        grouped = grouped - weight.zeros.astype(jnp.float32)[:, None, :]
    grouped = grouped * weight.scales.astype(jnp.float32)[:, None, :]
    return grouped.reshape(-1, grouped.shape[2])
