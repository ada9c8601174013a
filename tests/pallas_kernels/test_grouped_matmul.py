"""Every implementation of the grouped matmul against a loop over groups in numpy.

Rows of no group hold NaN: nothing of them may reach the rows that count.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES, Case
from pallas_kernels.support import SUPPORT

IMPLEMENTATIONS = SUPPORT["grouped_matmul"]["cpu"]


def run(implementation: str, lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray, **options) -> jax.Array:
    multiply = partial(grouped_matmul, platform="cpu", implementation=implementation, **options)
    return jax.jit(multiply)(jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_row_is_multiplied_with_the_matrix_of_its_group(case: Case, implementation: str) -> None:
    rng = np.random.default_rng(0)
    owned = sum(case.sizes)
    lhs = np.full((owned + case.padding_rows, case.in_features), np.nan, np.float32)
    lhs[:owned] = rng.standard_normal((owned, case.in_features))
    rhs = rng.standard_normal((len(case.sizes), case.in_features, case.out_features)).astype(np.float32)
    expected = np.zeros((len(lhs), case.out_features))
    start = 0
    for group, size in enumerate(case.sizes):
        expected[start : start + size] = lhs[start : start + size].astype(np.float64) @ rhs[group]
        start += size
    out = run(implementation, lhs, rhs, np.array(case.sizes, np.int32))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_are_float32_and_the_result_has_the_dtype_asked_for(implementation: str) -> None:
    lhs = np.ones((3, 512), jnp.bfloat16)
    rhs = np.ones((2, 512, 8), jnp.bfloat16)
    rhs[:, ::2] = 1 / 256
    sizes = np.array([1, 2], np.int32)
    assert run(implementation, lhs, rhs, sizes).dtype == jnp.bfloat16
    out = run(implementation, lhs, rhs, sizes, preferred_element_type=jnp.float32)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(out), 257.0)  # 256 halves of ulps are lost in a bfloat16 sum


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 2, 8), (3, 8, 5), (3,)), r"lhs must be \[rows, in\]"),
        (((4, 8), (3, 5, 8), (3,)), r"rhs must be \[groups, 8, out\]"),
        (((4, 8), (3, 8, 5), (2,)), r"group_sizes must be int32 \[3\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    lhs, rhs, sizes = shapes
    with pytest.raises(ValueError, match=message):
        grouped_matmul(jnp.zeros(lhs), jnp.zeros(rhs), jnp.zeros(sizes, jnp.int32), platform="cpu")


def test_dtypes_that_do_not_fit_are_named() -> None:
    sizes = jnp.array([4], jnp.int32)
    with pytest.raises(ValueError, match="one floating dtype, got float32 and bfloat16"):
        grouped_matmul(jnp.zeros((4, 8)), jnp.zeros((1, 8, 5), jnp.bfloat16), sizes, platform="cpu")
    with pytest.raises(ValueError, match="group_sizes must be int32"):
        grouped_matmul(jnp.zeros((4, 8)), jnp.zeros((1, 8, 5)), jnp.array([4.0]), platform="cpu")
