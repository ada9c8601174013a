"""`quantized_matmul`: the public function; the implementations live beside it."""

from __future__ import annotations

import jax

from pallas_kernels.quantized_matmul import mosaic_gpu, mosaic_tpu
from pallas_kernels.quantized_matmul.reference import reference_quantized_matmul
from pallas_kernels.quantized_matmul.validate import validate
from pallas_kernels.quantized_matmul.weight import QuantizedWeight
from pallas_kernels.quantized_matmul.xla import xla_quantized_matmul
from pallas_kernels.support import resolve

_PLAIN = {"reference": reference_quantized_matmul, "xla": xla_quantized_matmul}
# A kernel does not serve every call: (why not, or None; the kernel).
_KERNELS = {
    "mosaic_gpu": (mosaic_gpu.reason_against, mosaic_gpu.mosaic_gpu_quantized_matmul),
    "mosaic_tpu": (mosaic_tpu.reason_against, mosaic_tpu.mosaic_tpu_quantized_matmul),
}


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    platform: str,
    chip: str | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """x times a weight of integers: y = sum over g of scales[g] * (x_g . values[g] - zeros[g] * sum(x_g)).

    Args:
        x: bfloat16 or float32 [num_tokens, in].
        weight: as `pack` lays it out for the platform.
        platform: "cpu", "gpu" or "tpu": the target, never asked of the running process.
        chip: the target's name in `chips`, if known.
        implementation: "auto", "mosaic_tpu", "mosaic_gpu", "xla" or "reference". "auto" takes the first of
            the platform's list (`support`) that serves the chip, dtypes and shapes.

    Returns:
        [num_tokens, out] in x's dtype. Sums are float32; dequantised values are rounded to x's dtype.

    Raises:
        NotImplementedError: the named implementation does not run on the platform or chip, or does not serve
            the dtypes or shapes.
        ValueError: shapes or dtypes do not fit together.
    """
    validate(x, weight, platform=platform)
    name = resolve("quantized_matmul", platform, implementation, chip=chip)
    if name in _KERNELS:
        reason_against, multiply = _KERNELS[name]
        reason = "the chip is not given" if chip is None else reason_against(x, weight)
        if chip is not None and reason is None:
            return multiply(x, weight, chip=chip)
        if implementation != "auto":
            raise NotImplementedError(f"quantized_matmul: {name} does not serve this call: {reason}")
        name = "xla"
    return _PLAIN[name](x, weight, platform=platform)
