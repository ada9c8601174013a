"""Every implementation of the quantised matmul that runs here, against numpy in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import QuantizedWeight, dequantize, pack, quantized_matmul
from pallas_kernels.quantized_matmul.cases import CASES, Case
from pallas_kernels.support import PLATFORMS


def make(case: Case, platform: str, seed: int = 0) -> tuple[np.ndarray, QuantizedWeight, np.ndarray]:
    """x, the weight as the platform takes it, and x times it in float64."""
    rng = np.random.default_rng(seed)
    size = case.group_size or case.in_features
    shape = (case.in_features // size, case.out_features)
    limit = 1 << (case.bits - 1)
    values = rng.integers(-limit, limit, (case.in_features, case.out_features))
    scales = rng.uniform(0.5, 1.5, shape).astype(np.float32) / limit
    zeros = rng.integers(-limit, limit, shape).astype(np.float32) if case.zeros else None
    x = rng.standard_normal((case.num_tokens, case.in_features)).astype(np.float32)
    dense = (values - (0 if zeros is None else np.repeat(zeros, size, 0))) * np.repeat(scales, size, 0)
    weight = pack(
        jnp.asarray(values, jnp.int4 if case.bits == 4 else jnp.int8),
        jnp.asarray(scales),
        None if zeros is None else jnp.asarray(zeros),
        platform=platform,
    )
    return x, weight, x.astype(np.float64) @ dense


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_product_is_that_of_the_dequantised_weight(
    case: Case, platform: str, implementation: str
) -> None:
    x, weight, expected = make(case, platform)
    multiply = jax.jit(partial(quantized_matmul, platform=platform, implementation=implementation))
    out = multiply(jnp.asarray(x), weight)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES[3:6], ids=lambda case: case.name)
def test_bfloat16_activations_give_bfloat16_to_its_rounding(case: Case) -> None:
    x, weight, _ = make(case, "tpu")
    x16 = jnp.asarray(x, jnp.bfloat16)
    out = quantized_matmul(x16, weight, platform="tpu", implementation="xla")
    assert out.dtype == jnp.bfloat16
    expected = np.asarray(x16, np.float64) @ np.asarray(dequantize(weight, platform="tpu"), np.float64)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=np.abs(expected).max() / 100)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("kind", "high"), [("uint4", 16), ("uint8", 256)])
def test_unsigned_values_keep_their_meaning(kind: str, high: int, platform: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(0, high, (8, 6))
    values[0] = high - 1
    scales = rng.uniform(0.5, 1.5, (2, 6)).astype(np.float32)
    zeros = rng.integers(0, high, (2, 6))
    for zero in (None, zeros):
        weight = pack(
            jnp.asarray(values, kind),
            jnp.asarray(scales),
            None if zero is None else jnp.asarray(zero),
            platform=platform,
        )
        dense = (values - (0 if zero is None else np.repeat(zero, 4, 0))) * np.repeat(scales, 4, 0)
        np.testing.assert_allclose(np.asarray(dequantize(weight, platform=platform)), dense, rtol=1e-6)


def test_what_does_not_fit_is_named() -> None:
    values, scales = jnp.zeros((64, 32), jnp.int4), jnp.ones((2, 32))
    weight = pack(values, scales, platform="tpu")
    x = jnp.zeros((3, 64))
    with pytest.raises(ValueError, match="groups that divide 64"):
        pack(values, jnp.ones((3, 32)), platform="tpu")
    with pytest.raises(ValueError, match=r"\(u\)int4 or \(u\)int8"):
        pack(values.astype(jnp.int32), scales, platform="tpu")
    with pytest.raises(ValueError, match="zeros must be"):
        pack(values, scales, jnp.zeros((2, 31)), platform="tpu")
    with pytest.raises(ValueError, match=r"values on gpu must be \[2, 32, 48\], got \[2, 48, 32\]"):
        quantized_matmul(
            jnp.zeros((3, 96)), pack(jnp.zeros((96, 32), jnp.int4), scales, platform="tpu"), platform="gpu"
        )
    with pytest.raises(ValueError, match="x must be bfloat16 or float32"):
        quantized_matmul(x.astype(jnp.float16), weight, platform="tpu")
    with pytest.raises(ValueError, match="2 groups do not divide"):
        quantized_matmul(jnp.zeros((3, 63)), weight, platform="tpu")
    with pytest.raises(ValueError, match="zeros must be like the scales"):
        quantized_matmul(x, weight._replace(zeros=jnp.zeros((2, 32), jnp.bfloat16)), platform="tpu")
    with pytest.raises(NotImplementedError, match="does not run on tpu"):
        quantized_matmul(x, weight, platform="tpu", implementation="mosaic_gpu")
