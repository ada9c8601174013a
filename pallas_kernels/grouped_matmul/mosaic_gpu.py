"""The Hopper kernel (sm_90a, Pallas Mosaic GPU): a thread block for each tile of rows, and of columns.

A tile has rows of one group (see `tiles`) and some of its neighbours', which are left out when the tiles'
results are put together. A warpgroup of its own feeds the stages by TMA, two others take half of the columns
each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.tiles import ALIGNMENT, Tiles, make_tiles

_WARPGROUPS = 2
_TILE_COLUMNS = 256
_STEP = 64  # of the contraction: a row of 128 bytes, the widest swizzle


def _transforms(dtype: DTypeLike) -> tuple[Any, ...]:
    """The tensor cores' tiling: 8 rows of 128 bytes."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def reason_against(lhs: jax.Array, rhs: jax.Array, out_dtype: DTypeLike) -> str | None:
    """Why the kernel does not serve a call; None if it does."""
    if lhs.dtype != jnp.bfloat16:
        return f"operands are {lhs.dtype.name}: wgmma is used in bfloat16"
    if rhs.shape[1] % _STEP or rhs.shape[2] % 8:
        return f"matrices of {list(rhs.shape[1:])}: {_STEP} must divide their rows and 8 their columns"
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        return f"the result is {jnp.dtype(out_dtype).name}: bfloat16 and float32 are stored"
    if lhs.shape[0] == 0:
        return "there are no rows"
    return None


def mosaic_gpu_grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, out_dtype: DTypeLike
) -> jax.Array:
    """See `grouped_matmul`; the caller has asked `reason_against`."""
    num_rows = lhs.shape[0]
    # Two tiles of 64 rows cost a second reading of the matrix, which is what takes time with few rows.
    tile_rows = 64 if num_rows <= 64 * rhs.shape[0] else 128
    tiles = make_tiles(group_sizes, num_rows, tile_rows)
    padded = jnp.pad(lhs, ((0, tile_rows), (0, 0)))  # so that a tile may start at any row
    out = multiply(padded, rhs, tiles, tile_rows=tile_rows, out_dtype=out_dtype)
    rows = out[tiles.tile_of_row, tiles.row_in_tile]  # [rows, out]
    owned = jnp.arange(num_rows) < group_sizes.sum()
    return jnp.where(owned[:, None], rows, 0)


def multiply(
    lhs: jax.Array, rhs: jax.Array, tiles: Tiles, *, tile_rows: int, out_dtype: DTypeLike
) -> jax.Array:
    """Every tile's rows times its group's matrix; tiles that do not exist are not written.

    Args:
        lhs: bfloat16 [rows, in]; tile_rows rows from each tile's first are there.
        rhs: bfloat16 [groups, in, out].

    Returns:
        [tiles, tile_rows, out].
    """
    columns = rhs.shape[2]
    return plgpu.kernel(
        _kernel,
        out_type=jax.ShapeDtypeStruct((len(tiles.group), tile_rows, columns), out_dtype),
        scratch_types={
            "out_smem": plgpu.SMEM(
                (_WARPGROUPS, tile_rows, _TILE_COLUMNS // _WARPGROUPS),
                out_dtype,
                transforms=_transforms(out_dtype),
            )
        },
        grid=(pl.cdiv(columns, _TILE_COLUMNS), len(tiles.group)),
        grid_names=("column", "tile"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(lhs, rhs, tiles.num_tiles[None], tiles.group, tiles.first_row)


def _kernel(
    lhs_hbm: Any,  # bfloat16 [rows, in]
    rhs_hbm: Any,  # bfloat16 [groups, in, out]
    num_tiles_hbm: Any,  # int32 [1]
    group_hbm: Any,  # int32 [tiles]
    first_row_hbm: Any,  # int32 [tiles]
    out_hbm: Any,  # [tiles, tile_rows, out]
    *,
    out_smem: Any,  # [warpgroups, tile_rows, columns of a warpgroup]
) -> None:
    column, tile = lax.axis_index("column"), lax.axis_index("tile")
    warpgroup = lax.axis_index("warpgroup")
    tile_rows, width = out_smem.shape[1:]

    def step(indices: Any, lhs_smem: Any, rhs_smem: Any, acc: Any) -> Any:
        del indices
        plgpu.wgmma(acc, lhs_smem, rhs_smem.at[:, pl.ds(warpgroup * width, width)])
        plgpu.wgmma_wait(0)
        return acc

    def compute(pipeline: Callable[[Any], Any]) -> None:
        def accumulate(acc: Any) -> jax.Array:
            pipeline(acc)
            return acc[...]

        total = pl.run_scoped(accumulate, plgpu.ACC((tile_rows, width), jnp.float32))
        out_smem[warpgroup] = total.astype(out_smem.dtype)
        plgpu.commit_smem()
        columns = pl.ds(column * _TILE_COLUMNS + warpgroup * width, width)
        plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_hbm.at[tile, :, columns])
        plgpu.wait_smem_to_gmem(0)

    stages = 4 if tile_rows == 64 else 3 if out_smem.dtype == jnp.bfloat16 else 2  # as shared memory allows
    transforms = _transforms(jnp.bfloat16)
    body: Any = step  # jax's annotation leaves the carry out

    @pl.when(tile < num_tiles_hbm[0])
    def _() -> None:
        first_row = pl.multiple_of(first_row_hbm[tile], ALIGNMENT)
        plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(lhs_hbm.shape[1] // _STEP,),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec((tile_rows, _STEP), lambda k: (0, k), transforms=transforms),
                plgpu.BlockSpec((_STEP, _TILE_COLUMNS), lambda k: (k, column), transforms=transforms),
            ],
            max_concurrent_steps=stages,
            wg_axis="warpgroup",
            num_compute_wgs=_WARPGROUPS,
            compute_context=compute,
        )(lhs_hbm.at[pl.ds(first_row, tile_rows)], rhs_hbm.at[group_hbm[tile]])
