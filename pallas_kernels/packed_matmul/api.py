"""`packed_matmul`: the public function; the implementations live beside it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed_matmul.activations import Activations, written_out
from pallas_kernels.packed_matmul.cpu import cpu_packed_matmul
from pallas_kernels.packed_matmul.reference import reference_packed_matmul
from pallas_kernels.packed_matmul.weight import INPUTS, PackedWeight
from pallas_kernels.support import resolve


def packed_matmul(
    x: Activations,
    weights: Sequence[PackedWeight],
    out_sizes: Sequence[int],
    *,
    layer: int | jax.Array | None = None,
    num_live: int | jax.Array | None = None,
    residual: jax.Array | None = None,
    is_fine: bool | Sequence[bool] = False,
    platform: str = "cpu",
    chip: str | None = None,
    implementation: str = "auto",
) -> list[jax.Array]:
    """Activations, rounded to 8-bit integers over the range of each 32, times each of some packed weights.

    The sums over a group are exact integers; scales and the sums over groups are float32. What a token gets
    does not depend on the others in the batch.

    Args:
        x: float32 or bfloat16 [num_tokens, in], finite; or what makes it (`Normed`, `Gated`).
        weights: as `pack` lays them out, of one layer or of all (stacked).
        out_sizes: of each weight, how many outputs it has.
        layer: int32 [], which layer of stacked weights; None where they are of one.
        num_live: int32 [], the leading rows that count; None: all. The others' results may be anything,
            NaN too: to write even zeros there takes longer than all else that padding costs.
        residual: [num_tokens, out_size], added to the product with the one weight there is then.
        is_fine: activations of 16 bits, in two parts of 8, at nearly twice the arithmetic; for all weights,
            or for each.
        platform: "cpu": the target, never asked of the running process.
        chip: the target's instruction set (`native.ISAS`), None when native code cannot be used.
        implementation: "auto", "cpu" or "reference".

    Returns:
        For each weight [num_tokens, out_size] in x's dtype.

    Raises:
        NotImplementedError: no implementation for the platform, or the named one does not run on the chip.
        ValueError: shapes or dtypes do not fit together.
    """
    first = x if isinstance(x, jax.Array) else x[0]
    validate(first, weights, out_sizes, layer)
    if residual is not None and (len(weights) != 1 or residual.shape != (first.shape[0], out_sizes[0])):
        raise ValueError(f"a residual {list(residual.shape)} goes with one weight of its own size")
    fine = [is_fine] * len(weights) if isinstance(is_fine, bool) else list(is_fine)
    if len(fine) != len(weights):
        raise ValueError(f"{len(weights)} weights and {len(fine)} is_fine")
    name = resolve("packed_matmul", platform, implementation, chip=chip)
    live = jnp.asarray(first.shape[0] if num_live is None else num_live, jnp.int32)
    if name == "cpu":
        assert chip is not None  # `support` names the chips of this one
        found = cpu_packed_matmul(
            x,
            weights,
            out_sizes,
            layer=jnp.asarray(0 if layer is None else layer, jnp.int32),
            num_live=live,
            residual=residual,
            is_fine=fine,
            isa=chip,
        )
        return [y.astype(first.dtype) for y in found]
    is_live = jnp.arange(first.shape[0])[:, None] < live
    whole = jnp.where(is_live, written_out(x), jnp.zeros((), first.dtype))
    found = []
    for weight, size, own_fine in zip(weights, out_sizes, fine, strict=True):
        own = weight if layer is None else weight.of_layer(layer)
        y = reference_packed_matmul(whole, own, size, is_fine=own_fine)
        y = y if residual is None else y + residual
        found.append(y.astype(first.dtype))
    return found


def validate(
    x: jax.Array | jax.ShapeDtypeStruct,
    weights: Sequence[PackedWeight],
    out_sizes: Sequence[int],
    layer: int | jax.Array | None,
) -> None:
    """Raises ValueError unless weights of these outputs can be multiplied with x [num_tokens, in]."""
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
