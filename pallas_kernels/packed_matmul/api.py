"""`packed_matmul`: the public function; the implementations live beside it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed_matmul.cpu import cpu_packed_matmul
from pallas_kernels.packed_matmul.reference import reference_packed_matmul
from pallas_kernels.packed_matmul.weight import INPUTS, PackedWeight
from pallas_kernels.support import resolve


def packed_matmul(
    x: jax.Array,
    weights: Sequence[PackedWeight],
    out_sizes: Sequence[int],
    *,
    layer: int | jax.Array | None = None,
    num_live: int | jax.Array | None = None,
    platform: str = "cpu",
    chip: str | None = None,
    implementation: str = "auto",
) -> list[jax.Array]:
    """Activations, rounded to 8-bit integers over the range of each 32, times each of some packed weights.

    The sums over a group are exact integers; scales and the sums over groups are float32. What a token gets
    does not depend on the others in the batch.

    Args:
        x: float32 or bfloat16 [num_tokens, in], finite.
        weights: as `pack` lays them out, of one layer or of all (stacked).
        out_sizes: of each weight, how many outputs it has.
        layer: int32 [], which layer of stacked weights; None where they are of one.
        num_live: int32 [], the leading rows that count; the others become zeros. None: all.
        platform: "cpu": the target, never asked of the running process.
        chip: the target's instruction set (`native.ISAS`), None when native code cannot be used.
        implementation: "auto", "cpu" or "reference".

    Returns:
        For each weight [num_tokens, out_size] in x's dtype.

    Raises:
        NotImplementedError: no implementation for the platform, or the named one does not run on the chip.
        ValueError: shapes or dtypes do not fit together.
    """
    _validate(x, weights, out_sizes, layer)
    name = resolve("packed_matmul", platform, implementation, chip=chip)
    live = jnp.asarray(x.shape[0] if num_live is None else num_live, jnp.int32)
    if name == "cpu":
        assert chip is not None  # `support` names the chips of this one
        index = jnp.asarray(0 if layer is None else layer, jnp.int32)
        found = cpu_packed_matmul(
            x.astype(jnp.float32), weights, out_sizes, layer=index, num_live=live, isa=chip
        )
        return [y.astype(x.dtype) for y in found]
    is_live = jnp.arange(x.shape[0])[:, None] < live
    found = []
    for weight, size in zip(weights, out_sizes, strict=True):
        own = weight if layer is None else weight.of_layer(layer)
        y = reference_packed_matmul(jnp.where(is_live, x, jnp.zeros((), x.dtype)), own, size)
        found.append(jnp.where(is_live, y, 0.0).astype(x.dtype))
    return found


def _validate(
    x: jax.Array, weights: Sequence[PackedWeight], out_sizes: Sequence[int], layer: int | jax.Array | None
) -> None:
    if x.ndim != 2 or x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x must be float32 or bfloat16 [num_tokens, in], got {x.dtype} {list(x.shape)}")
    if not weights or len(weights) != len(out_sizes):
        raise ValueError(f"{len(weights)} weights and {len(out_sizes)} out_sizes")
    rank = 3 if layer is None else 4
    for weight, size in zip(weights, out_sizes, strict=True):
        shape = weight.values.shape
        blocks = -(-size // 16)
        if len(shape) != rank or shape[-3] != blocks or shape[-1] not in (256, 512):
            raise ValueError(f"values of {size} outputs have shape {list(shape)}")
        if shape[-2] * INPUTS != x.shape[1]:
            raise ValueError(f"x has {x.shape[1]} features, the weight {shape[-2] * INPUTS}")
        expected = (*shape[:-2], weight.scales.shape[-2], 16)
        if weight.scales.shape != expected or shape[-2] % weight.scales.shape[-2]:
            raise ValueError(f"scales have shape {list(weight.scales.shape)} for values {list(shape)}")
        if weight.scales.dtype not in (np.float16, np.float32):
            raise ValueError(f"scales must be float16 or float32, got {weight.scales.dtype}")
        mins = weight.mins
        if mins is not None and (mins.shape != expected or mins.dtype != weight.scales.dtype):
            raise ValueError(f"mins must be like the scales, got {mins.dtype} {list(mins.shape)}")
