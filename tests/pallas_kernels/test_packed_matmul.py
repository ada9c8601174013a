"""Packed weights: their layout, and each instruction set's kernel against numpy in double precision."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packed_matmul import (
    Gated,
    MLPWeights,
    Normed,
    PackedWeight,
    dequantize,
    dequantize_rows,
    pack,
    pack4,
    packed_matmul,
    packed_mlp,
    quantize_int8,
)

pytestmark = pytest.mark.quick
FORMATS = [(4, True), (4, False), (8, True), (8, False)]
# out, in, scales a row: no multiple of 16, one scale a row, a scale for two groups, many blocks.
SHAPES = [(48, 64, 2), (17, 96, 1), (50, 128, 2), (200, 320, 10)]


def _weight(
    rng: np.random.Generator, shape: tuple[int, int, int], bits: int, has_mins: bool, dtype: Any = np.float16
) -> tuple[PackedWeight, np.ndarray]:
    """A weight and what it stands for, float64 [out, in]."""
    out, size, num_scales = shape
    values = rng.integers(0, 1 << bits, (out, size)).astype(np.uint8)
    values[0] = 0
    values[1] = (1 << bits) - 1  # the ends of the range
    scales = rng.normal(size=(out, num_scales)).astype(dtype)
    mins = rng.normal(size=(out, num_scales)).astype(dtype) if has_mins else None
    each = size // num_scales
    whole = values.astype(np.float64) - (0 if has_mins else 1 << (bits - 1))
    whole = whole * scales.astype(np.float64).repeat(each, axis=1)
    if mins is not None:
        whole += mins.astype(np.float64).repeat(each, axis=1)
    return (pack4 if bits == 4 else pack)(values, scales, mins), whole


def _rounded(x: np.ndarray, *, is_fine: bool = False) -> np.ndarray:
    """The activations that the operation promises: 8 (16) bits over the range of each group of 32."""
    groups = x.astype(np.float32).reshape(len(x), -1, 32)
    high, low = groups.max(axis=2, keepdims=True), groups.min(axis=2, keepdims=True)
    half, middle = (high - low) / 2, (high + low) / 2
    steps = (groups - middle) * np.divide(np.float32(127.0), half, out=np.zeros_like(half), where=half > 0)
    whole = np.rint(steps).astype(np.float64)
    if is_fine:
        whole += np.rint((steps - whole) * 254) / 254
    return (whole * (half / np.float32(127.0)) + middle).reshape(x.shape)


def _assert_close(found: Any, x: np.ndarray, whole: np.ndarray, *, is_fine: bool = False) -> None:
    expected = _rounded(x, is_fine=is_fine) @ whole.T
    # What float32 sums may be off by, whatever cancels.
    size = np.abs(_rounded(x)) @ np.abs(whole).T
    assert np.all(np.abs(np.asarray(found, np.float64) - expected) <= 4e-6 * size + 1e-30)


@pytest.mark.parametrize(("bits", "has_mins"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_weight_is_read_back_as_it_was(
    shape: tuple[int, int, int], bits: int, has_mins: bool
) -> None:
    weight, whole = _weight(np.random.default_rng(0), shape, bits, has_mins)
    assert weight.bits == bits
    assert weight.in_size == shape[1]
    np.testing.assert_allclose(dequantize(weight, shape[0]), whole, rtol=1e-6, atol=1e-6)
    rows = np.array([1, 0, shape[0] - 1, 1], np.int32)
    np.testing.assert_allclose(dequantize_rows(weight, jnp.asarray(rows)), whole[rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_weight_takes_its_bits_and_its_scales(bits: int) -> None:
    weight, _ = _weight(np.random.default_rng(0), (64, 64, 2), bits, True)
    assert weight.num_bytes == 64 * 64 * bits // 8 + 2 * 64 * 2 * 2


@pytest.mark.parametrize("num_tokens", [1, 13, 31])
@pytest.mark.parametrize(("bits", "has_mins"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_native_product_is_the_exact_one_of_rounded_activations(
    isa: str, shape: tuple[int, int, int], bits: int, has_mins: bool, num_tokens: int
) -> None:
    rng = np.random.default_rng(1)
    weight, whole = _weight(rng, shape, bits, has_mins)
    x = rng.normal(size=(num_tokens, shape[1])).astype(np.float32)
    x[0] = 0.0
    x[-1, ::3] *= 1e4  # the others of a group are lost in the rounding
    x[-1, :32] = 7.5  # a group without a range
    [found] = packed_matmul(jnp.asarray(x), [weight], [shape[0]], chip=isa)
    _assert_close(found, x, whole)


@pytest.mark.parametrize(("bits", "has_mins"), FORMATS)
def test_the_plain_twin_computes_the_same(bits: int, has_mins: bool) -> None:
    rng = np.random.default_rng(2)
    weight, whole = _weight(rng, (50, 64, 2), bits, has_mins)
    x = rng.normal(size=(5, 64)).astype(np.float32)
    [found] = packed_matmul(jnp.asarray(x), [weight], [50], implementation="reference")
    _assert_close(found, x, whole)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize(("bits", "has_mins"), FORMATS)
def test_fine_activations_have_16_bits(isa: str, bits: int, has_mins: bool, implementation: str) -> None:
    rng = np.random.default_rng(9)
    weight, whole = _weight(rng, (50, 128, 2), bits, has_mins)
    x = rng.normal(size=(19, 128)).astype(np.float32)
    [found] = packed_matmul(
        jnp.asarray(x), [weight], [50], is_fine=True, chip=isa, implementation=implementation
    )
    _assert_close(found, x, whole, is_fine=True)
    exact = np.abs(_rounded(x, is_fine=True) - x).max()
    assert exact < np.abs(_rounded(x) - x).max() / 100


def _normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight


def _gated(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    z = gate.astype(np.float64)
    if activation == "gelu_tanh":
        return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) * up
    return z / (1 + np.exp(-z)) * up


@pytest.mark.parametrize("before", ["norm", "silu", "gelu_tanh"])
def test_norm_gate_and_residual_are_parts_of_the_product(isa: str, before: str) -> None:
    rng = np.random.default_rng(10)
    weight, whole = _weight(rng, (50, 96, 3), 8, False)
    x, up = (3 * rng.normal(size=(2, 21, 96))).astype(np.float32)
    x[3] = 0.0
    x[4, :8] = 90.0 * np.sign(x[4, :8])  # where the exponential ends
    residual = rng.normal(size=(21, 50)).astype(np.float32)
    if before == "norm":
        made, activations = _normed(x, up[0]), Normed(jnp.asarray(x), jnp.asarray(up[0]), 1e-5)
    else:
        made = _gated(x, up, before)
        activations = Gated(jnp.asarray(x), jnp.asarray(up), before)
    np.testing.assert_allclose(activations.array(), made, rtol=3e-6, atol=3e-6)
    for implementation in ("cpu", "reference"):
        [found] = packed_matmul(
            activations,
            [weight],
            [50],
            num_live=17,
            residual=jnp.asarray(residual),
            is_fine=True,
            chip=isa,
            implementation=implementation,
        )
        # A value next to a half may be rounded to either side: one fine step of its group.
        slack = np.abs(made).reshape(21, -1, 32).max(axis=2) @ np.abs(whole).reshape(50, -1, 32).max(axis=2).T
        error = np.abs(np.asarray(found[:17], np.float64) - residual[:17] - (made @ whole.T)[:17])
        assert np.all(error <= 2e-3 * slack[:17] + 1e-5)


def test_integers_at_the_ends_of_their_range_do_not_saturate(isa: str) -> None:
    for bits, packer in ((4, pack4), (8, pack)):
        values = np.full((16, 64), (1 << bits) - 1, np.uint8)
        ones = np.ones((16, 2), np.float32)
        weight = packer(values, ones, np.zeros_like(ones))
        for sign in (1.0, -1.0):
            [found] = packed_matmul(jnp.full((3, 64), sign), [weight], [16], chip=isa)
            np.testing.assert_allclose(found, sign * 64 * ((1 << bits) - 1), rtol=1e-6)


@pytest.mark.parametrize("is_fine", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_token_gets_the_same_bits_alone_and_in_any_batch(isa: str, bits: int, is_fine: bool) -> None:
    rng = np.random.default_rng(3)
    weight, _ = _weight(rng, (48, 320, 10), bits, True)
    x = jnp.asarray(rng.normal(size=(40, 320)).astype(np.float32))
    [together] = packed_matmul(x, [weight], [48], is_fine=is_fine, chip=isa)
    for start, size in ((0, 1), (3, 1), (39, 1), (6, 2), (30, 3), (9, 4), (5, 15), (20, 9), (12, 8)):
        [alone] = packed_matmul(x[start : start + size], [weight], [48], is_fine=is_fine, chip=isa)
        np.testing.assert_array_equal(alone, together[start : start + size])


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_weights_of_one_layer_of_many_share_a_call(isa: str, implementation: str) -> None:
    rng = np.random.default_rng(4)
    fine = [False, True, False]
    num_layers, shapes = 3, [(48, 64, 2), (17, 64, 1), (32, 64, 2)]
    formats = [(4, True), (8, False), (8, True)]
    made = [[_weight(rng, s, *f) for _ in range(num_layers)] for s, f in zip(shapes, formats, strict=True)]
    stacks = [
        PackedWeight(
            *(None if a[0] is None else jnp.stack(a) for a in zip(*(w for w, _ in of_layers), strict=True))
        )
        for of_layers in made
    ]
    x = rng.normal(size=(6, 64)).astype(np.float32)

    @jax.jit
    def run(layer: jax.Array) -> list[jax.Array]:
        sizes = [shape[0] for shape in shapes]
        return packed_matmul(
            jnp.asarray(x),
            stacks,
            sizes,
            layer=layer,
            is_fine=fine,
            chip=isa,
            implementation=implementation,
        )

    for layer in range(num_layers):
        for found, of_layers, is_fine in zip(run(jnp.int32(layer)), made, fine, strict=True):
            _assert_close(found, x, of_layers[layer][1], is_fine=is_fine)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_rows_past_the_live_ones_may_hold_anything(isa: str, implementation: str) -> None:
    rng = np.random.default_rng(5)
    weight, whole = _weight(rng, (20, 64, 2), 4, True)
    x = rng.normal(size=(24, 64)).astype(np.float32)
    padded = x.copy()
    padded[9:] = np.nan
    [found] = packed_matmul(
        jnp.asarray(padded), [weight], [20], num_live=9, chip=isa, implementation=implementation
    )
    _assert_close(found[:9], x[:9], whole)
    [none] = packed_matmul(jnp.asarray(padded), [weight], [20], num_live=0, chip=isa)
    assert none.shape == (24, 20)


def _mlp(
    rng: np.random.Generator, bits: tuple[int, int, int], has_mins: bool
) -> tuple[MLPWeights, list[np.ndarray]]:
    """96 hidden and 50 outputs of 64 features."""
    shapes = [(96, 64, 2), (96, 64, 1), (50, 96, 3)]
    made = [_weight(rng, shape, b, has_mins) for shape, b in zip(shapes, bits, strict=True)]
    return MLPWeights(*(weight for weight, _ in made)), [whole for _, whole in made]


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 45])
@pytest.mark.parametrize(
    ("bits", "has_mins"), [((4, 4, 4), True), ((4, 4, 8), False), ((8, 4, 4), True), ((8, 8, 8), True)]
)
def test_an_mlp_is_its_two_products(
    isa: str, bits: tuple[int, int, int], has_mins: bool, num_tokens: int
) -> None:
    rng = np.random.default_rng(11)
    weights, (gate, up, down) = _mlp(rng, bits, has_mins)
    x = rng.normal(size=(num_tokens + 3, 64)).astype(np.float32)
    x[num_tokens:] = np.nan  # rows that do not count
    norm = (0.02 * rng.normal(size=64)).astype(np.float32)
    residual = rng.normal(size=(num_tokens + 3, 50)).astype(np.float32)
    normed = Normed(jnp.asarray(x), jnp.asarray(norm), 1e-5)
    [found, plain] = [
        np.asarray(
            packed_mlp(
                normed,
                weights,
                50,
                "silu",
                num_live=num_tokens,
                residual=jnp.asarray(residual),
                chip=isa,
                implementation=implementation,
            )
        )[:num_tokens]
        for implementation in ("cpu", "reference")
    ]
    rounded = _rounded(np.asarray(normed.array())[:num_tokens])
    hidden = _gated(rounded @ gate.T, rounded @ up.T, "silu")
    expected = _rounded(hidden.astype(np.float32)) @ down.T + residual[:num_tokens]
    # A value next to a half may be rounded to either side: one step of its group.
    largest = np.abs(hidden).reshape(num_tokens, -1, 32).max(axis=2)
    slack = largest @ np.abs(down).reshape(50, -1, 32).max(axis=2).T / 127
    for y in (found, plain):
        assert np.all(np.abs(y - expected) <= 3 * slack + 1e-4)
        assert np.mean(np.abs(y - expected) <= 2e-4 * np.abs(expected).max()) > 0.5

    multiply = functools.partial(packed_matmul, num_live=num_tokens, chip=isa)
    parts = multiply(normed, weights[:2], [96, 96])
    [apart] = multiply(Gated(*parts, "silu"), [weights.down], [50], residual=jnp.asarray(residual))
    np.testing.assert_array_equal(found, apart[:num_tokens])


def test_a_token_gets_the_same_mlp_alone_and_in_any_batch(isa: str) -> None:
    rng = np.random.default_rng(12)
    weights, _ = _mlp(rng, (4, 4, 4), True)
    x = jnp.asarray(rng.normal(size=(29, 64)).astype(np.float32))
    together = packed_mlp(x, weights, 50, "gelu_tanh", chip=isa)
    for start, size in ((0, 1), (28, 1), (5, 15), (20, 8), (3, 2)):
        alone = packed_mlp(x[start : start + size], weights, 50, "gelu_tanh", chip=isa)
        np.testing.assert_array_equal(alone, together[start : start + size])


def test_an_mlp_of_other_sizes_is_refused() -> None:
    weights, _ = _mlp(np.random.default_rng(13), (4, 4, 4), True)
    x = jnp.zeros((3, 64))
    with pytest.raises(ValueError, match="features"):
        packed_mlp(x[:, :32], weights, 50, "silu")
    with pytest.raises(ValueError, match="outputs"):
        packed_mlp(x, MLPWeights(weights.down, weights.up, weights.down), 50, "silu")
    with pytest.raises(ValueError, match="residual"):
        packed_mlp(x, weights, 50, "silu", residual=jnp.zeros((3, 49)))


def test_bfloat16_activations_give_bfloat16(isa: str) -> None:
    rng = np.random.default_rng(6)
    weight, whole = _weight(rng, (16, 64, 2), 8, False)
    x = jnp.asarray(rng.normal(size=(3, 64))).astype(jnp.bfloat16)
    [found] = packed_matmul(x, [weight], [16], chip=isa)
    assert found.dtype == jnp.bfloat16
    expected = _rounded(np.asarray(x, np.float32)) @ whole.T
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=1e-2, atol=1e-2)


def test_quantizing_to_8_bits_is_off_by_half_a_step_at_most() -> None:
    w = np.random.default_rng(7).normal(size=(33, 96)).astype(np.float32)
    w[4] = 0.0
    weight = quantize_int8(w)
    step = np.abs(w.reshape(33, 3, 32)).max(axis=2).repeat(32, axis=1) / 127
    assert np.all(np.abs(np.asarray(dequantize(weight, 33)) - w) <= step * 0.56)


def test_what_does_not_fit_is_refused() -> None:
    weight, _ = _weight(np.random.default_rng(8), (48, 64, 2), 4, True)
    x = jnp.zeros((2, 64))
    with pytest.raises(ValueError, match="features"):
        packed_matmul(jnp.zeros((2, 32)), [weight], [48], implementation="reference")
    with pytest.raises(ValueError, match="outputs"):
        packed_matmul(x, [weight], [64], implementation="reference")
    with pytest.raises(ValueError, match="outputs"):
        packed_matmul(x, [weight], [48], layer=0, implementation="reference")
    with pytest.raises(ValueError, match="mins"):
        packed_matmul(x, [weight._replace(mins=weight.scales[:1])], [48], implementation="reference")
    with pytest.raises(ValueError, match="residual"):
        packed_matmul(x, [weight], [48], residual=jnp.zeros((2, 47)), implementation="reference")
    with pytest.raises(NotImplementedError, match="platform 'tpu'"):
        packed_matmul(x, [weight], [48], platform="tpu")
    with pytest.raises(NotImplementedError, match="avx2"):
        packed_matmul(x, [weight], [48], implementation="cpu")
    with pytest.raises(ValueError, match="multiple of 32"):
        pack(np.zeros((16, 33), np.uint8), np.zeros((16, 1), np.float16))
    with pytest.raises(ValueError, match="scales"):
        pack(np.zeros((16, 64), np.uint8), np.zeros((16, 3), np.float16))
