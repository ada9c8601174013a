"""The TPU kernel of the quantised matmul in interpret mode, against numpy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul import QuantizedWeight, dequantize, mosaic_tpu, pack, quantized_matmul
from pallas_kernels.quantized_matmul.cases import Case


def make(case: Case, scale_dtype: Any = jnp.float32) -> tuple[jax.Array, QuantizedWeight]:
    rng = np.random.default_rng(0)
    limit = 1 << (case.bits - 1)
    shape = (case.in_features // (case.group_size or case.in_features), case.out_features)
    values = rng.integers(-limit, limit, (case.in_features, case.out_features), np.int8)
    weight = pack(
        jnp.asarray(values, jnp.int4 if case.bits == 4 else jnp.int8),
        jnp.asarray(rng.uniform(0.5, 1.5, shape) / limit, scale_dtype),
        jnp.asarray(rng.integers(-limit, limit, shape)) if case.zeros else None,
        platform="tpu",
    )
    return jnp.asarray(rng.standard_normal((case.num_tokens, case.in_features)), jnp.bfloat16), weight


def check(case: Case, interpret: Any, scale_dtype: Any = jnp.float32) -> None:
    x, weight = make(case, scale_dtype)
    assert mosaic_tpu.reason_against(x, weight) is None
    out = mosaic_tpu.mosaic_tpu_quantized_matmul(x, weight, chip="v6e", interpret=interpret)
    expected = np.asarray(x, np.float64) @ np.asarray(dequantize(weight, platform="tpu"), np.float64)
    assert out.shape == expected.shape
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=np.abs(expected).max() / 200)


@pytest.mark.parametrize(
    "case",
    [
        Case("one token", 1, 256, 128, 128),
        Case("ragged tokens and channels", 13, 384, 640, 128),
        Case("zero points", 8, 256, 512, 128, zeros=True),
        Case("int8 in groups of 256 with zero points", 33, 512, 200, 256, bits=8, zeros=True),
        Case("most tokens", 128, 256, 128, 128),
    ],
    ids=lambda case: case.name,
)
def test_the_kernel_gives_the_product(case: Case) -> None:
    check(case, interpret=True)


def test_groups_are_taken_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu, "_MAX_GROUPS", 32)
    assert mosaic_tpu.groups_a_step(48) == 16
    check(Case("", 3, 48 * 128, 136, 128, zeros=True), interpret=True)


def test_scales_may_be_bfloat16() -> None:
    check(Case("", 4, 256, 128, 128, zeros=True), interpret=True, scale_dtype=jnp.bfloat16)


def test_no_race_and_no_read_out_of_bounds() -> None:
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    check(Case("", 3, 256, 640, 128, zeros=True), interpret=params)
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        (Case("", 4, 256, 128, 128), jnp.float32, "x is float32"),
        (Case("", 129, 256, 128, 128), jnp.bfloat16, "129 tokens"),
        (Case("", 4, 256, 128, None), jnp.bfloat16, "one group"),
        (Case("", 4, 256, 128, 64), jnp.bfloat16, "groups of 64"),
        (Case("", 4, 131 * 128, 8, 128), jnp.bfloat16, "131 groups"),
    ],
)
def test_a_call_it_does_not_serve_is_refused_by_name_and_left_to_xla_by_auto(
    case: Case, dtype: Any, reason: str
) -> None:
    x, weight = make(case)
    x = x.astype(dtype)
    with pytest.raises(NotImplementedError, match=reason):
        quantized_matmul(x, weight, platform="tpu", chip="v6e", implementation="mosaic_tpu")
    out = quantized_matmul(x, weight, platform="tpu", chip="v6e")
    expected = quantized_matmul(x, weight, platform="tpu", implementation="xla")
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))


def test_an_unknown_chip_is_xla_s() -> None:
    x, weight = make(Case("", 4, 256, 128, 128))
    with pytest.raises(NotImplementedError, match="chip is not given"):
        quantized_matmul(x, weight, platform="tpu", implementation="mosaic_tpu")
    assert quantized_matmul(x, weight, platform="tpu").shape == (4, 128)
