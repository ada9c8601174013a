"""The Hopper kernel of the quantised matmul in jax's interpreter, which has no wgmma with a register operand.

That one product is replaced by a plain one; tiles, copies, stages, layouts at rest, scales, splits and what
is done outside of the kernel are its own. (The interpreter's race detection reports jax's own
warp-specialised pipeline whatever its body, so it is off.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import QuantizedWeight, dequantize, mosaic_gpu, pack, quantized_matmul
from pallas_kernels.quantized_matmul.cases import Case


def plain_product(total: jax.Array | None, w: jax.Array, x_smem: Any) -> jax.Array:
    x = x_smem[...].astype(jnp.float32)
    y = jnp.dot(w.astype(jnp.float32), x.T, precision=jax.lax.Precision.HIGHEST)
    return y if total is None else total + y


def make(case: Case) -> tuple[jax.Array, QuantizedWeight]:
    rng = np.random.default_rng(0)
    limit = 1 << (case.bits - 1)
    shape = (case.in_features // (case.group_size or case.in_features), case.out_features)
    values = rng.integers(-limit, limit, (case.in_features, case.out_features))
    weight = pack(
        jnp.asarray(values, jnp.int4 if case.bits == 4 else jnp.int8),
        jnp.asarray(rng.uniform(0.5, 1.5, shape) / limit, jnp.float32),
        jnp.asarray(rng.integers(-limit, limit, shape)) if case.zeros else None,
        platform="gpu",
    )
    return jnp.asarray(rng.standard_normal((case.num_tokens, case.in_features)), jnp.bfloat16), weight


KERNEL_CASES = (
    Case("ragged tokens and channels, groups of 128", 9, 384, 200, 128, zeros=True),
    Case("groups of 64", 3, 256, 72, 64),
    Case("groups of 32", 3, 256, 72, 32, zeros=True),
    Case("int8 in groups of 256, stages used again", 130, 768, 136, 256, bits=8),
    Case("int4 per channel with zero points", 17, 256, 264, None, zeros=True),
    Case("int8 per channel, split", 2, 1024, 64, None, bits=8),
    Case("groups of 128, split", 2, 1024, 64, 128),
)


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="jax 0.10 has no Mosaic GPU interpreter")
@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
def test_the_interpreted_kernel_gives_the_product(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_gpu, "product", plain_product)
    x, weight = make(case)
    assert ("split" in case.name.split()[-1]) == (mosaic_gpu.make_plan(x, weight, 132).splits > 1)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        out = quantized_matmul(x, weight, platform="gpu", chip="h200", implementation="mosaic_gpu")
    expected = np.asarray(x, np.float64) @ np.asarray(dequantize(weight, platform="gpu"), np.float64)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=np.abs(expected).max() / 200)


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        (Case("", 4, 256, 64, 128), jnp.float32, "x is float32"),
        (Case("", 4, 256, 64, 16), jnp.bfloat16, "groups of 16"),
        (Case("", 4, 96, 64, 32), jnp.bfloat16, "96 features"),
        (Case("", 4, 256, 60, 128), jnp.bfloat16, "60 channels"),
    ],
)
def test_a_call_it_does_not_serve_is_refused_by_name_and_left_to_xla_by_auto(
    case: Case, dtype: Any, reason: str
) -> None:
    x, weight = make(case)
    x = x.astype(dtype)
    with pytest.raises(NotImplementedError, match=reason):
        quantized_matmul(x, weight, platform="gpu", chip="h200", implementation="mosaic_gpu")
    out = quantized_matmul(x, weight, platform="gpu", chip="h200")
    expected = quantized_matmul(x, weight, platform="gpu", implementation="xla")
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))


def test_other_gpus_are_refused() -> None:
    x, weight = make(Case("", 4, 256, 64, 128))
    with pytest.raises(NotImplementedError, match="unknown chip"):
        quantized_matmul(x, weight, platform="gpu", implementation="mosaic_gpu")
