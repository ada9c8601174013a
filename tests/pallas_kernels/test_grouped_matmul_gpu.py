"""The Hopper kernel of the grouped matmul in jax's interpreter, wgmma included, against numpy.

(The interpreter's race detection reports jax's own warp-specialised pipeline whatever its body: it is off.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.tiles import ALIGNMENT, bound, make_tiles


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="jax 0.10 has no Mosaic GPU interpreter")
@pytest.mark.parametrize(
    ("sizes", "padding_rows", "out_dtype"),
    [
        ((0, 3, 70, 0, 1), 6, jnp.bfloat16),  # tiles begin and end in a group's midst
        ((0, 200, 1), 3, jnp.float32),  # tiles of 128 rows
        ((0, 0), 5, jnp.bfloat16),  # no tile at all
    ],
)
def test_the_interpreted_kernel_gives_the_product(
    sizes: tuple[int, ...], padding_rows: int, out_dtype: Any
) -> None:
    rng = np.random.default_rng(0)
    owned = sum(sizes)
    lhs = np.zeros((owned + padding_rows, 192), np.float32)
    lhs[:owned] = rng.standard_normal((owned, 192))
    lhs16 = jnp.asarray(lhs, jnp.bfloat16)
    rhs = jnp.asarray(rng.standard_normal((len(sizes), 192, 264)), jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        out = grouped_matmul(
            lhs16,
            rhs,
            jnp.asarray(sizes, jnp.int32),
            platform="gpu",
            chip="h200",
            implementation="mosaic_gpu",
            preferred_element_type=out_dtype,
        )
    assert out.dtype == out_dtype
    expected = np.zeros(out.shape)
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        expected[rows] = np.asarray(lhs16[rows], np.float64) @ np.asarray(rhs[group], np.float64)
        start += size
    tolerance = 1e-5 if out_dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(
        np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance * np.abs(expected).max()
    )


@pytest.mark.parametrize(("num_rows", "num_groups", "tile_rows"), [(61, 9, 16), (5, 12, 16), (190, 3, 64)])
def test_every_row_is_in_a_tile_of_its_group(num_rows: int, num_groups: int, tile_rows: int) -> None:
    rng = np.random.default_rng(0)
    cut = jax.jit(partial(make_tiles, num_rows=num_rows, tile_rows=tile_rows))
    for trial in range(40):
        # Some groups get no row, and some rows no group.
        shares = rng.uniform(size=num_groups) * rng.integers(0, 2, num_groups)
        owned = num_rows if trial % 2 else rng.integers(0, num_rows + 1)
        sizes = rng.multinomial(owned, shares / shares.sum()) if shares.any() else np.zeros(num_groups, int)
        tiles = jax.device_get(cut(jnp.asarray(sizes, jnp.int32)))
        count = int(tiles.num_tiles)
        assert count <= len(tiles.group) == bound(num_rows, num_groups, tile_rows)
        assert not (tiles.first_row[:count] % ALIGNMENT).any()
        assert (tiles.first_row[:count] < num_rows).all()
        assert (tiles.group < num_groups).all()
        assert (tiles.tile_of_row < len(tiles.group)).all()
        assert (tiles.row_in_tile < tile_rows).all()
        owner = np.repeat(np.arange(num_groups), sizes)
        row = np.arange(len(owner))
        tile = tiles.tile_of_row[row]
        assert (tile < count).all()
        np.testing.assert_array_equal(tiles.group[tile], owner)
        np.testing.assert_array_equal(tiles.first_row[tile] + tiles.row_in_tile[row], row)


@pytest.mark.parametrize(
    ("shape", "dtype", "out_dtype", "reason"),
    [
        ((4, 64, 8), jnp.float32, None, "operands are float32"),
        ((4, 96, 8), jnp.bfloat16, None, r"matrices of \[96, 8\]"),
        ((4, 64, 12), jnp.bfloat16, None, r"matrices of \[64, 12\]"),
        ((4, 64, 8), jnp.bfloat16, jnp.float16, "the result is float16"),
        ((0, 64, 8), jnp.bfloat16, None, "no rows"),
    ],
)
def test_a_call_it_does_not_serve_is_refused_by_name_and_left_to_the_loop_by_auto(
    shape: tuple[int, int, int], dtype: Any, out_dtype: Any, reason: str
) -> None:
    rows, width_in, width_out = shape
    operands = (jnp.ones((rows, width_in), dtype), jnp.ones((2, width_in, width_out), dtype))
    sizes = jnp.array([rows, 0], jnp.int32)
    options: dict[str, Any] = {"platform": "gpu", "chip": "h200", "preferred_element_type": out_dtype}
    with pytest.raises(NotImplementedError, match=reason):
        grouped_matmul(*operands, sizes, implementation="mosaic_gpu", **options)
    out = grouped_matmul(*operands, sizes, **options)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.full((rows, width_out), width_in))
