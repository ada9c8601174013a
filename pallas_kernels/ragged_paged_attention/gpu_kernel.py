"""The Hopper kernel of ragged paged attention (sm_90a, Pallas Mosaic GPU): tiles of query rows over pages.

A block of threads serves one tile (see `gpu_tiles`) of one key-value head, or one split of its keys. TMA
brings K and V of a block of keys a page at a time into one of several stages of shared memory, while the
tensor cores (wgmma) work on another. The softmax is online (Milakov & Gimelshein, 2018, arXiv:1805.02867), in
base 2. What leaves is the attention over the keys seen and their log2-sum-exp2, so that splits can be joined.

One to two warpgroups share the fetched keys: each takes 64 of the tile's rows, or all rows and its part of
V's columns where an accumulator of all columns would not fit the registers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention import gpu_tiles

LOG2_E = math.log2(math.e)
WARPGROUP_ROWS = 64  # rows of a warpgroup's matrix product
MASKED = -1e30  # a masked score; a row's first true score makes the weights of masked ones vanish

Carry = tuple[jax.Array, jax.Array, jax.Array]  # maximum [64], sum [64], accumulator [64, columns]


@dataclass(frozen=True)
class Plan:
    """What is static in a kernel."""

    num_pages: int
    num_kv_heads: int
    page_size: int
    group: int  # query heads of a key-value head
    k_dim: int
    v_start: int  # V is the columns [v_start, v_start + v_dim) of a pool row
    v_dim: int
    tile_rows: int  # rows of a tile that are fetched and stored; the matrix product works on multiples of 64
    block: int  # keys of a stage
    stages: int
    splits: int
    min_blocks: int  # least blocks of a split
    row_groups: int  # warpgroups side by side in rows
    column_groups: int  # or in V's columns
    is_windowed: bool
    sm_scale: float
    soft_cap: float | None

    @property
    def warpgroups(self) -> int:
        return self.row_groups * self.column_groups

    @property
    def box(self) -> int:
        """Rows of a copy: a page, or the part of it that a stage takes."""
        return min(self.block, self.page_size)

    @property
    def columns(self) -> int:
        """V's columns of a warpgroup."""
        return self.v_dim // self.column_groups

    @property
    def out_dtype(self) -> Any:
        return jnp.float32 if self.splits > 1 else jnp.bfloat16


def smem_tile(shape: tuple[int, ...], dtype: Any, columns: int) -> Any:
    """Shared memory in the tensor cores' tiling: 8 rows by what a swizzle of `columns` elements takes."""
    swizzle = next(s for s in (128, 64, 32) if columns * jnp.dtype(dtype).itemsize % s == 0)
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def scores_of(q_smem: Any, k_smem: Any) -> jax.Array:
    """q [64, k_dim] and k [block, k_dim] in shared memory -> q k^T, float32 [64, block]."""

    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, q_smem, plgpu.transpose_ref(k_smem, (1, 0)))
        return acc[...]

    shape = (q_smem.shape[0], k_smem.shape[0])
    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def accumulate(acc: jax.Array, weights: jax.Array, v_smem: Any) -> jax.Array:
    """acc [64, columns] + weights [64, block] @ v, v [block, columns] in shared memory."""

    def product(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, weights, v_smem)

    return pl.run_state(product)(plgpu.ACC.init(acc))


def online_softmax(carry: Carry, scores: jax.Array) -> tuple[jax.Array, Carry]:
    """One step over scores [64, block] (base 2): the weights, and the rescaled carry without their product."""
    maximum, norm, acc = carry
    new_maximum = jnp.maximum(maximum, scores.max(axis=1))
    scale = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
    norm = norm * scale + weights.sum(axis=1)
    return weights, (new_maximum, norm, acc * lax.broadcast_in_dim(scale, acc.shape, [0]))


def attend(
    q: jax.Array, pool: jax.Array, tiles: jax.Array, pages: jax.Array, scalars: jax.Array, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    """Attention of tiles of query rows.

    Args:
        q: [num_tiles, num_kv_heads, tile_rows, k_dim] bfloat16.
        pool: [num_layers, num_pages, num_kv_heads, page_size, kv_dim], q's dtype.
        tiles: int32 [num_tiles, 5], see `gpu_tiles.Tiles`.
        pages: int32 [num_seqs, pages_per_seq].
        scalars: int32 [2]: the layer and the window.
        plan: see there.

    Returns:
        The attention [num_tiles, num_kv_heads, splits, tile_rows, v_dim] and its log2-sum-exp2
        [num_tiles, num_kv_heads, splits, tile_rows] float32. A tile or split without keys writes nothing.
    """
    num_tiles = q.shape[0]
    kv_dim = pool.shape[4]
    lead = (num_tiles, plan.num_kv_heads, plan.splits, plan.tile_rows)
    columns = math.gcd(plan.k_dim, plan.v_start, plan.columns)
    stages = smem_tile((plan.stages, plan.block, kv_dim), pool.dtype, columns)
    out = smem_tile((plan.warpgroups, WARPGROUP_ROWS, plan.columns), plan.out_dtype, plan.columns)
    lse = plgpu.SMEM((plan.warpgroups, WARPGROUP_ROWS), jnp.float32)
    scratch = dict(
        q_smem=smem_tile((plan.row_groups, WARPGROUP_ROWS, plan.k_dim), q.dtype, plan.k_dim),
        shared=plgpu.RefUnion(stages, (out, lse)),  # results come when the last keys are done with
        q_ready=plgpu.Barrier(num_arrivals=plan.row_groups),
        ready=plgpu.Barrier(num_arrivals=plan.block // plan.box, num_barriers=plan.stages),
        joint=plgpu.Barrier(num_arrivals=plan.warpgroups),
        consumed=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.stages),
    )
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct((*lead, plan.v_dim), plan.out_dtype),
            jax.ShapeDtypeStruct(lead, jnp.float32),
        ),
        scratch_types=scratch,
        grid=(num_tiles, plan.num_kv_heads, plan.splits),
        grid_names=("tile", "head", "split"),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=0,  # a row's scores lie within a warp
        ),
    )(q, pool.reshape(-1, plan.box, kv_dim), tiles, pages, scalars)


def _kernel(
    q_hbm: Any,  # [num_tiles, num_kv_heads, tile_rows, k_dim]
    pool_hbm: Any,  # [layers * pages * heads * page_size // box, box, kv_dim]
    tiles_hbm: Any,  # int32 [num_tiles, 5]
    pages_hbm: Any,  # int32 [num_seqs, pages_per_seq]
    scalars_hbm: Any,  # int32 [2]
    out_hbm: Any,  # [num_tiles, num_kv_heads, splits, tile_rows, v_dim]
    lse_hbm: Any,  # [num_tiles, num_kv_heads, splits, tile_rows]
    *,
    q_smem: Any,  # [row_groups, 64, k_dim]
    shared: Any,  # stages [stages, block, kv_dim]; or results [warpgroups, 64, columns], lse [warpgroups, 64]
    q_ready: Any,
    ready: Any,  # of each stage: its keys have come
    joint: Any,  # of all warpgroups
    consumed: Any,  # of each stage: every warpgroup is done with it
    plan: Plan,
) -> None:
    tile, head, split = (lax.axis_index(name) for name in ("tile", "head", "split"))
    warpgroup = lax.axis_index("warpgroup")
    stages_smem, (out_smem, lse_smem) = shared
    row_group = warpgroup if plan.row_groups > 1 else 0
    column = warpgroup * plan.columns if plan.column_groups > 1 else 0
    first, base, begin, end = (
        tiles_hbm[tile, i] for i in (gpu_tiles.FIRST, gpu_tiles.BASE, gpu_tiles.BEGIN, gpu_tiles.END)
    )
    window = scalars_hbm[1]
    low, high = gpu_tiles.split_range(
        begin, end, split, splits=plan.splits, block=plan.block, min_blocks=plan.min_blocks
    )
    stored_rows = min(plan.tile_rows, WARPGROUP_ROWS)

    def fetch(j: jax.Array) -> None:
        """Start the copies of key block j into its stage. Pages past the last live one are never named."""
        row, layer = tiles_hbm[tile, gpu_tiles.ROW], scalars_hbm[0]
        slot = lax.rem(j - low, jnp.int32(plan.stages))
        last = lax.div(end - 1, jnp.int32(plan.page_size))
        parts = plan.page_size // plan.box
        for piece in range(plan.block // plan.box):
            key = j * plan.block + piece * plan.box
            page = pages_hbm[row, jnp.minimum(lax.div(key, jnp.int32(plan.page_size)), last)]
            at = (layer * plan.num_pages + page) * plan.num_kv_heads + head
            if parts > 1:
                at = at * parts + lax.rem(lax.div(key, jnp.int32(plan.box)), jnp.int32(parts))
            plgpu.copy_gmem_to_smem(
                pool_hbm.at[at], stages_smem.at[slot, pl.ds(piece * plan.box, plan.box)], ready.at[slot]
            )

    def mask(scores: jax.Array, j: jax.Array) -> jax.Array:
        """Query row r sees key k iff k <= base + (first + r) // group, less the window; said without division."""
        iota = functools.partial(
            plgpu.broadcasted_iota, jnp.int32, scores.shape, layout=plgpu.Layout.WGMMA
        )
        query = iota(0) + (first + row_group * WARPGROUP_ROWS)
        key = (iota(1) + (j * plan.block - base)) * plan.group
        seen = key <= query
        if plan.is_windowed:
            seen = seen & (key + window * plan.group > query)
        return jnp.where(seen, scores, MASKED)

    def clean(v_smem: Any, j: jax.Array) -> None:
        """Zero V from `end` on: stale memory may hold NaN, and a weight of 0 does not undo it."""
        _synchronize(joint, plan.warpgroups)
        share = plan.v_dim // plan.warpgroups
        width = math.gcd(share, 64)  # columns in registers at a time
        for at in range(0, share, width):
            part = v_smem.at[:, pl.ds(warpgroup * share + at, width)] if plan.warpgroups > 1 else v_smem.at[:, pl.ds(at, width)]
            values = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
            key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(key + j * plan.block < end, values, jnp.zeros_like(values))
        plgpu.commit_smem()
        _synchronize(joint, plan.warpgroups)

    def refill(j: jax.Array) -> None:
        """While block j is worked on, start the copies into the stage of the one before it.

        With two warpgroups that is after their first product, so that they may be half a step apart.
        """
        ahead = j + (plan.stages - 1)

        @pl.when(ahead < high)
        def _() -> None:
            @pl.when(j > low)
            def _() -> None:
                plgpu.barrier_wait(consumed.at[lax.rem(ahead - low, jnp.int32(plan.stages))])

            pl.when(warpgroup == 0)(functools.partial(fetch, ahead))

    def step(j: jax.Array, carry: Carry, *, is_edge: bool) -> Carry:
        slot = lax.rem(j - low, jnp.int32(plan.stages))
        if plan.warpgroups == 1:
            refill(j)
        plgpu.barrier_wait(ready.at[slot])
        scores = scores_of(q_smem.at[row_group], stages_smem.at[slot, :, pl.ds(0, plan.k_dim)])
        if plan.soft_cap is None:
            scores = scores * (plan.sm_scale * LOG2_E)
        else:
            # cap * tanh(x / cap), with tanh(y) = 1 - 2 / (1 + e^2y)
            power = jnp.exp2(scores * (2 * plan.sm_scale * LOG2_E / plan.soft_cap))
            scores = (plan.soft_cap * LOG2_E) * (1.0 - 2.0 / (1.0 + power))
        if is_edge:
            scores = mask(scores, j)
        weights, (maximum, norm, acc) = online_softmax(carry, scores)

        if plan.warpgroups > 1:
            refill(j)
        if is_edge:
            v_all = stages_smem.at[slot, :, pl.ds(plan.v_start, plan.v_dim)]
            pl.when((j + 1) * plan.block > end)(functools.partial(clean, v_all, j))
        v_smem = stages_smem.at[slot, :, pl.ds(plan.v_start + column, plan.columns)]
        acc = accumulate(acc, weights.astype(jnp.bfloat16), v_smem)
        plgpu.barrier_arrive(consumed.at[slot])
        return maximum, norm, acc

    @pl.when(low < high)
    def _() -> None:
        @pl.when(warpgroup == 0)
        def _() -> None:
            for group in range(plan.row_groups):
                plgpu.copy_gmem_to_smem(
                    q_hbm.at[tile, head, pl.ds(group * WARPGROUP_ROWS, stored_rows)],
                    q_smem.at[group, pl.ds(0, stored_rows)],
                    q_ready,
                )
            for ahead in range(plan.stages - 1):
                pl.when(low + ahead < high)(functools.partial(fetch, low + ahead))

        reduced = plgpu.Layout.WGMMA.reduce(1)
        carry: Carry = (
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), MASKED, jnp.float32), reduced),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), reduced),
            plgpu.layout_cast(
                jnp.zeros((WARPGROUP_ROWS, plan.columns), jnp.float32), plgpu.Layout.WGMMA
            ),
        )
        plgpu.barrier_wait(q_ready)

        # Blocks that every row sees whole need no mask.
        whole_low = low
        if plan.is_windowed:
            last_query = base + lax.div(first + (plan.tile_rows - 1), jnp.int32(plan.group))
            edge = jnp.maximum(last_query - window + 1, 0) + (plan.block - 1)
            whole_low = jnp.clip(lax.div(edge, jnp.int32(plan.block)), low, high)
        first_query = base + lax.div(first, jnp.int32(plan.group))
        whole_high = jnp.clip(lax.div(first_query + 1, jnp.int32(plan.block)), whole_low, high)
        edge_step = functools.partial(step, is_edge=True)
        if plan.is_windowed:
            carry = lax.fori_loop(low, whole_low, edge_step, carry)
        carry = lax.fori_loop(whole_low, whole_high, functools.partial(step, is_edge=False), carry)
        maximum, norm, acc = lax.fori_loop(whole_high, high, edge_step, carry)
        for slot in range(plan.stages):
            # Every warpgroup is done with every stage: its memory is free for the results.
            pl.when(low + slot < high)(functools.partial(plgpu.barrier_wait, consumed.at[slot]))

        out_smem[warpgroup] = (acc / lax.broadcast_in_dim(norm, acc.shape, [0])).astype(plan.out_dtype)
        lse_smem[warpgroup] = maximum + jnp.log2(norm)
        plgpu.commit_smem()
        stored = pl.ds(row_group * WARPGROUP_ROWS, stored_rows)
        plgpu.copy_smem_to_gmem(
            out_smem.at[warpgroup, pl.ds(0, stored_rows)],
            out_hbm.at[tile, head, split, stored, pl.ds(column, plan.columns)],
        )
        if plan.column_groups == 1:
            plgpu.copy_smem_to_gmem(
                lse_smem.at[warpgroup, pl.ds(0, stored_rows)], lse_hbm.at[tile, head, split, stored]
            )
        else:  # all of them have the same
            @pl.when(warpgroup == 0)
            def _() -> None:
                plgpu.copy_smem_to_gmem(
                    lse_smem.at[0, pl.ds(0, stored_rows)], lse_hbm.at[tile, head, split, stored]
                )
        plgpu.wait_smem_to_gmem(0)


def _synchronize(joint: Any, warpgroups: int) -> None:
    if warpgroups > 1:
        plgpu.barrier_arrive(joint)
        plgpu.barrier_wait(joint)
