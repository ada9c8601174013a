"""The packed weight at rest, in the order the kernels read it.

    values  uint8              [num_blocks, num_groups, 64 * bits]   16 outputs x 32 inputs of 4 or 8 bits
    scales  float16, float32   [num_blocks, num_scales, 16]
    mins    None, or as scales [num_blocks, num_scales, 16]
    weight[16 b + n, 32 g + k] = scales[b, s, n] * value + mins[b, s, n],   s = g * num_scales / num_groups

Without mins the values are offset by half of their range: weight = scale * (value - 8), or - 128. In a block,
the 64 bytes of step j hold inputs 4 j to 4 j + 3 of each output in turn; the low nibbles of 4-bit weights are
step 2 i, the high ones step 2 i + 1. So one load of a vector register serves 16 outputs. Outputs that are no
multiple of 16 are filled up with zeros. The arrays of all layers may be stacked: [num_layers, ...] each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

OUTPUTS, INPUTS = 16, 32  # of a block; INPUTS also of a group of activations
Array = jax.Array | np.ndarray


class PackedWeight(NamedTuple):
    """A pytree; see the module's text."""

    values: Array
    scales: Array
    mins: Array | None = None

    @property
    def bits(self) -> int:
        return self.values.shape[-1] // 64

    @property
    def in_size(self) -> int:
        return self.values.shape[-2] * INPUTS

    @property
    def num_bytes(self) -> int:
        return sum(a.size * a.dtype.itemsize for a in self if a is not None)

    def of_layer(self, layer: int | jax.Array) -> PackedWeight:
        """One layer's weight of stacked ones."""
        mins = None if self.mins is None else self.mins[layer]
        return PackedWeight(self.values[layer], self.scales[layer], mins)


def pack(values: np.ndarray, scales: np.ndarray, mins: np.ndarray | None = None) -> PackedWeight:
    """Lay a weight of 8 bits out.

    Args:
        values: uint8 [out, in].
        scales: float16 or float32 [out, num_scales].
        mins: None, or like the scales.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    out, size = values.shape
    steps = _filled(values).view(np.uint32).reshape(-1, OUTPUTS, size // INPUTS, INPUTS // 4)
    return _packed(_outputs_last(steps), out, size, scales, mins)


def pack4(values: np.ndarray, scales: np.ndarray, mins: np.ndarray | None = None) -> PackedWeight:
    """`pack` for 4 bits: values below 16."""
    out, size = values.shape
    steps = _filled(values).view(np.uint32).reshape(-1, OUTPUTS, size // INPUTS, INPUTS // 8, 2)
    # No bit crosses into another byte.
    pairs = steps[..., 0] | (steps[..., 1] << 4)  # [blocks, outputs, groups, pairs of steps]
    return _packed(_outputs_last(pairs), out, size, scales, mins)


def _outputs_last(words: np.ndarray) -> np.ndarray:
    """uint32 [blocks, outputs, groups, n] -> the bytes of [blocks, groups, n, outputs]."""
    return np.ascontiguousarray(words.transpose(0, 2, 3, 1)).view(np.uint8)


def _filled(values: np.ndarray) -> np.ndarray:
    """Up to whole blocks of outputs."""
    if values.dtype != np.uint8 or values.ndim != 2 or values.shape[1] % INPUTS:
        raise ValueError(
            f"values must be uint8 [out, in] with in a multiple of {INPUTS}, "
            f"got {values.dtype} {list(values.shape)}"
        )
    missing = -values.shape[0] % OUTPUTS
    return np.pad(values, ((0, missing), (0, 0))) if missing else np.ascontiguousarray(values)


def _packed(
    values: np.ndarray, out: int, size: int, scales: np.ndarray, mins: np.ndarray | None
) -> PackedWeight:
    groups = size // INPUTS
    for name, array in (("scales", scales), ("mins", mins)):
        if array is None:
            continue
        fits = array.ndim == 2 and array.shape[0] == out and groups % array.shape[1] == 0
        if not fits or array.dtype not in (np.float16, np.float32) or array.shape != scales.shape:
            raise ValueError(
                f"{name} must be float16 or float32 [{out}, a divisor of {groups}], "
                f"got {array.dtype} {list(array.shape)}"
            )

    def by_block(array: np.ndarray) -> np.ndarray:
        filled = np.pad(array, ((0, -out % OUTPUTS), (0, 0)))
        return np.ascontiguousarray(filled.reshape(-1, OUTPUTS, array.shape[1]).swapaxes(1, 2))

    flat = values.reshape(values.shape[0], groups, -1)
    return PackedWeight(flat, by_block(scales), None if mins is None else by_block(mins))


def dequantize_rows(weight: PackedWeight, rows: jax.Array) -> jax.Array:
    """Rows (outputs) of one layer's weight as float32: rows int32 [n] -> [n, in]."""
    blocks, lanes = rows // OUTPUTS, rows % OUTPUTS
    num_blocks, num_groups, _ = weight.values.shape
    values = jnp.asarray(weight.values).reshape(num_blocks, num_groups, -1, OUTPUTS, 4)
    picked = values[blocks, :, :, lanes, :]  # [n, groups, loads, 4]
    if weight.bits == 4:
        picked = jnp.stack([picked & 15, picked >> 4], axis=3)  # [n, groups, loads, 2, 4]
    return _scaled(weight, picked.reshape(rows.shape[0], num_groups, INPUTS), blocks, lanes)


def _scaled(weight: PackedWeight, values: jax.Array, blocks: jax.Array, lanes: jax.Array) -> jax.Array:
    def of_rows(array: Array) -> jax.Array:
        picked = jnp.asarray(array)[blocks, :, lanes].astype(jnp.float32)  # [n, num_scales]
        return picked.repeat(values.shape[1] // picked.shape[1], axis=1)[..., None]

    whole = values.astype(jnp.float32)
    if weight.mins is None:
        whole = (whole - (8 if weight.bits == 4 else 128)) * of_rows(weight.scales)
    else:
        whole = whole * of_rows(weight.scales) + of_rows(weight.mins)
    return whole.reshape(values.shape[0], -1)


def dequantize(weight: PackedWeight, out_size: int) -> jax.Array:
    """One layer's weight as float32 [out_size, in]."""
    return dequantize_rows(weight, jnp.arange(out_size, dtype=jnp.int32))


def quantize_int8(weight: np.ndarray) -> PackedWeight:
    """A float weight [out, in] as 8 bits in groups of 32 inputs, symmetric: value = round(weight / scale)."""
    out, size = weight.shape
    if size % INPUTS:
        raise ValueError(f"in must be a multiple of {INPUTS}, got {size}")
    grouped = np.asarray(weight, np.float32).reshape(out, size // INPUTS, INPUTS)
    scales = (np.abs(grouped).max(axis=2) / 127.0).astype(np.float16)  # [out, groups]
    # Of the scale as it is stored: half precision may have rounded it down.
    exact = scales.astype(np.float32)[..., None]
    values = np.rint(grouped / np.where(exact == 0.0, 1.0, exact)).clip(-127, 127)
    return pack((values + 128).astype(np.uint8).reshape(out, size), scales)
