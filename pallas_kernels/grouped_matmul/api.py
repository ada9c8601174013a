"""`grouped_matmul`: the public function; the implementations live beside it."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul.reference import reference_grouped_matmul
from pallas_kernels.grouped_matmul.validate import validate
from pallas_kernels.grouped_matmul.xla import xla_grouped_matmul
from pallas_kernels.grouped_matmul.xla_loop import xla_loop_grouped_matmul
from pallas_kernels.support import resolve

_PLAIN = {
    "reference": reference_grouped_matmul,
    "xla": xla_grouped_matmul,
    "xla_loop": xla_loop_grouped_matmul,
}


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    platform: str,
    chip: str | None = None,
    implementation: str = "auto",
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Row i of lhs, which belongs to group e, times rhs[e].

    Group e owns the group_sizes[e] rows that follow those of the groups before it. Rows past the sum of the
    sizes belong to none: what they hold is not used, NaN included, and they give zeros.

    rhs is [groups, in, out], the other way round from what checkpoints hold: the TPU compiler's kernel for
    `ragged_dot` takes [groups, in, out] as it is, and copies [groups, out, in] whole on every call. Transpose
    when loading.

    Args:
        lhs: [rows, in], sorted by group.
        rhs: [groups, in, out], in lhs's dtype.
        group_sizes: int32 [groups], none negative; the sum is at most rows.
        platform: "cpu", "gpu" or "tpu": the target, never asked of the running process.
        chip: the target's name in `chips`, if known.
        implementation: "auto", "mosaic_gpu", "xla" (`jax.lax.ragged_dot`), "xla_loop" (a loop over the tiles
            of rows that exist) or "reference". "auto" takes the first of the platform's list (`support`) that
            serves the chip, dtypes and shapes.
        preferred_element_type: dtype of the result, lhs's if None. Sums are float32 in any case.

    Returns:
        [rows, out].

    Raises:
        NotImplementedError: the named implementation does not run on the platform or chip, or does not serve
            the dtypes or shapes.
        ValueError: shapes or dtypes do not fit together.
    """
    validate(lhs, rhs, group_sizes)
    out_dtype = preferred_element_type or lhs.dtype
    name = resolve("grouped_matmul", platform, implementation, chip=chip)
    if name == "mosaic_gpu":
        reason = mosaic_gpu.reason_against(lhs, rhs, out_dtype)
        if reason is None:
            return mosaic_gpu.mosaic_gpu_grouped_matmul(lhs, rhs, group_sizes, out_dtype=out_dtype)
        if implementation != "auto":
            raise NotImplementedError(f"grouped_matmul: {name} does not serve this call: {reason}")
        name = "xla_loop"
    return _PLAIN[name](lhs, rhs, group_sizes, out_dtype=out_dtype)
