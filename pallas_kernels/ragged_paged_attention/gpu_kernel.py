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
Boxes = tuple[jax.Array, ...]  # int32 [] each: where in the pool the parts of a block of keys are


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
    dtype: Any  # of the matrix products; a pool of another is converted in shared memory
    is_converted: bool

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
    k_dim = q_smem.shape[1]
    # Unrolled over a long row, the products' operand addresses would fill the registers.
    width = next((w for w in (192, 128) if k_dim % w == 0), k_dim)

    def product(acc: Any) -> jax.Array:
        if k_dim <= width:
            plgpu.wgmma(acc, q_smem, k_smem.transpose((1, 0)))
        else:

            @pl.loop(0, k_dim // width)
            def _(i: jax.Array) -> None:
                at = pl.ds(i * width, width)
                plgpu.wgmma(acc, q_smem.at[:, at], k_smem.at[:, at].transpose((1, 0)))
                plgpu.wgmma_wait(0)

        return acc[...]

    shape = (q_smem.shape[0], k_smem.shape[0])
    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def accumulate(acc: jax.Array, weights: jax.Array, v_smem: Any) -> jax.Array:
    """acc [64, columns] + weights [64, block] @ v, v [block, columns] in shared memory."""

    def product(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, weights, v_smem)

    return pl.run_state(product)(plgpu.ACC.init(acc))


def online_softmax(carry: Carry, scores: jax.Array) -> tuple[jax.Array, Carry]:
    """One step over scores [64, block] (base 2): the weights, and the carry less their product."""
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
        q: [num_tiles, num_kv_heads, tile_rows, k_dim] of `plan.dtype`.
        pool: [num_layers, num_pages, num_kv_heads, page_size, row_dim].
        tiles: int32 [num_tiles, 5], see `gpu_tiles.Tiles`.
        pages: int32 [num_seqs, pages_per_seq].
        scalars: int32 [2]: the layer and the window.
        plan: see there.

    Returns:
        The attention [num_tiles, num_kv_heads, splits, tile_rows, v_dim] and its log2-sum-exp2
        [num_tiles, num_kv_heads, splits, tile_rows] float32. A tile or split without keys writes nothing.
    """
    num_tiles = q.shape[0]
    row_dim = pool.shape[4]
    lead = (num_tiles, plan.num_kv_heads, plan.splits, plan.tile_rows)
    columns = math.gcd(row_dim, plan.k_dim, plan.v_start, plan.columns)
    stages = smem_tile((plan.stages, plan.block, row_dim), pool.dtype, math.gcd(columns, 64))
    out = smem_tile((plan.warpgroups, WARPGROUP_ROWS, plan.columns), plan.out_dtype, plan.columns)
    lse = plgpu.SMEM((plan.warpgroups, WARPGROUP_ROWS), jnp.float32)
    # Keys and values as the matrix products want them, where the pool holds others.
    converted = [smem_tile((plan.block, row_dim), plan.dtype, columns)] if plan.is_converted else []
    scratch = {
        "q_smem": smem_tile((plan.row_groups, WARPGROUP_ROWS, plan.k_dim), q.dtype, plan.k_dim),
        "shared": plgpu.RefUnion(stages, (out, lse)),  # results come when the last keys are done with
        "converted": converted,
        "q_ready": plgpu.Barrier(num_arrivals=plan.row_groups),
        "ready": plgpu.Barrier(num_arrivals=plan.block // plan.box, num_barriers=plan.stages),
        "joint": plgpu.Barrier(num_arrivals=plan.warpgroups),
        "consumed": plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.stages),
    }
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
    )(q, pool.reshape(-1, plan.box, row_dim), tiles, pages, scalars)


def _kernel(
    q_hbm: Any,  # [num_tiles, num_kv_heads, tile_rows, k_dim]
    pool_hbm: Any,  # [layers * pages * heads * page_size // box, box, row_dim]
    tiles_hbm: Any,  # int32 [num_tiles, 5]
    pages_hbm: Any,  # int32 [num_seqs, pages_per_seq]
    scalars_hbm: Any,  # int32 [2]
    out_hbm: Any,  # [num_tiles, num_kv_heads, splits, tile_rows, v_dim]
    lse_hbm: Any,  # [num_tiles, num_kv_heads, splits, tile_rows]
    *,
    q_smem: Any,  # [row_groups, 64, k_dim]
    shared: Any,  # stages [stages, block, row_dim]; or out [warpgroups, 64, columns], lse [warpgroups, 64]
    converted: Any,  # [block, row_dim], if the pool's dtype is not that of the products
    q_ready: Any,
    ready: Any,  # of each stage: its keys have come
    joint: Any,  # of all warpgroups
    consumed: Any,  # of each stage: every warpgroup is done with it
    plan: Plan,
) -> None:
    head, split = lax.axis_index("head"), lax.axis_index("split")
    # Last tiles first: those of a long prompt have the most keys.
    tile = tiles_hbm.shape[0] - 1 - lax.axis_index("tile")
    warpgroup = lax.axis_index("warpgroup")
    stages_smem, (out_smem, lse_smem) = shared
    row_group = warpgroup if plan.row_groups > 1 else 0
    column = warpgroup * plan.columns if plan.column_groups > 1 else 0
    first, base, begin, end = (
        tiles_hbm[tile, i] for i in (gpu_tiles.FIRST, gpu_tiles.BASE, gpu_tiles.BEGIN, gpu_tiles.END)
    )
    row, layer, window = tiles_hbm[tile, gpu_tiles.ROW], scalars_hbm[0], scalars_hbm[1]
    low, high = gpu_tiles.split_range(
        begin, end, split, splits=plan.splits, block=plan.block, min_blocks=plan.min_blocks
    )
    stored_rows = min(plan.tile_rows, WARPGROUP_ROWS)
    row_dim = pool_hbm.shape[2]

    def boxes(j: jax.Array) -> Boxes:
        """Where in the pool the parts of key block j are; pages that no row sees are never named."""
        since, last = (lax.div(key, jnp.int32(plan.page_size)) for key in (begin, end - 1))
        parts = plan.page_size // plan.box
        found = []
        for piece in range(plan.block // plan.box):
            key = j * plan.block + piece * plan.box
            page = pages_hbm[row, jnp.clip(lax.div(key, jnp.int32(plan.page_size)), since, last)]
            at = (layer * plan.num_pages + page) * plan.num_kv_heads + head
            if parts > 1:
                at = at * parts + lax.rem(lax.div(key, jnp.int32(plan.box)), jnp.int32(parts))
            found.append(at)
        return tuple(found)

    def fetch(j: jax.Array, found: Boxes) -> None:
        """Start the copies of key block j into its stage."""
        slot = lax.rem(j - low, jnp.int32(plan.stages))
        for piece, at in enumerate(found):
            target = stages_smem.at[slot, pl.ds(piece * plan.box, plan.box)]
            plgpu.copy_gmem_to_smem(pool_hbm.at[at], target, ready.at[slot])

    def mask(scores: jax.Array, j: jax.Array) -> jax.Array:
        """Row r sees key k iff k <= base + (first + r) // group, less the window; said without division."""
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, scores.shape, layout=plgpu.Layout.WGMMA)
        query = iota(0) + (first + row_group * WARPGROUP_ROWS)
        key = (iota(1) + (j * plan.block - base)) * plan.group
        seen = key <= query
        if plan.is_windowed:
            seen = seen & (key + window * plan.group > query)
        return jnp.where(seen, scores, MASKED)

    def rewrite(source: Any, target: Any, j: jax.Array, start: int, columns: int) -> None:
        """target = source, in target's dtype, for `columns` of key block j; zeros outside [begin, end).

        What is there may be NaN, and a weight of 0 does not undo it. The warpgroups share the work.
        """
        _synchronize(joint, plan.warpgroups)
        width = math.gcd(columns, 64)
        chunks, turns = columns // width, -(-columns // (width * plan.warpgroups))
        # An 8-bit element is loaded in the layout in which it is widened without moving.
        is_narrow = jnp.dtype(source.dtype).itemsize == 1
        layout = plgpu.Layout.WGMMA_UPCAST_2X if is_narrow else plgpu.Layout.WGMMA

        @pl.loop(0, turns)  # not unrolled: registers are short
        def _(turn: jax.Array) -> None:
            chunk = turn * plan.warpgroups + warpgroup

            @pl.when(chunk < chunks)
            def _() -> None:
                at = pl.ds(start + chunk * width, width)
                values = plgpu.layout_cast(source[:, at], layout).astype(target.dtype)
                key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout) + j * plan.block
                is_live = key < end
                if plan.is_windowed:
                    is_live = is_live & (key >= begin)
                target[:, at] = jnp.where(is_live, values, jnp.zeros_like(values))

        plgpu.commit_smem()
        _synchronize(joint, plan.warpgroups)

    def refill(j: jax.Array, found: Boxes) -> None:
        """While block j is worked on, start the copies into the stage of the one before it.

        With two warpgroups that is after their first product, so that they may be half a step apart.
        """
        ahead = j + (plan.stages - 1)

        @pl.when(ahead < high)
        def _() -> None:
            @pl.when(j > low)
            def _() -> None:
                plgpu.barrier_wait(consumed.at[lax.rem(ahead - low, jnp.int32(plan.stages))])

            pl.when(warpgroup == 0)(functools.partial(fetch, ahead, found))

    def step(j: jax.Array, state: tuple[Carry, Boxes], *, is_edge: bool) -> tuple[Carry, Boxes]:
        """Work on key block j. The state names the boxes of the block that is fetched next, so that nothing
        waits for the page table."""
        carry, found = state
        slot = lax.rem(j - low, jnp.int32(plan.stages))
        if plan.warpgroups == 1:
            refill(j, found)
            found = boxes(j + plan.stages)
        plgpu.barrier_wait(ready.at[slot])
        keys_smem = stages_smem.at[slot]
        if plan.is_converted:
            rewrite(keys_smem, converted[0], j, 0, row_dim)
            keys_smem = converted[0]
            plgpu.barrier_arrive(consumed.at[slot])
        scores = scores_of(q_smem.at[row_group], keys_smem.at[:, pl.ds(0, plan.k_dim)])
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
            refill(j, found)
            found = boxes(j + plan.stages)
        if is_edge and not plan.is_converted:
            clean = functools.partial(rewrite, keys_smem, keys_smem, j, plan.v_start, plan.v_dim)
            pl.when(((j + 1) * plan.block > end) | (j * plan.block < begin))(clean)
        v_smem = keys_smem.at[:, pl.ds(plan.v_start + column, plan.columns)]
        acc = accumulate(acc, weights.astype(plan.dtype), v_smem)
        if not plan.is_converted:
            plgpu.barrier_arrive(consumed.at[slot])
        return (maximum, norm, acc), found

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
                pl.when(low + ahead < high)(functools.partial(fetch, low + ahead, boxes(low + ahead)))

        reduced = plgpu.Layout.WGMMA.reduce(1)
        carry: Carry = (
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), MASKED, jnp.float32), reduced),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), reduced),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, plan.columns), jnp.float32), plgpu.Layout.WGMMA),
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
        state = carry, boxes(low + (plan.stages - 1))
        if plan.is_windowed:
            state = lax.fori_loop(low, whole_low, edge_step, state)
        state = lax.fori_loop(whole_low, whole_high, functools.partial(step, is_edge=False), state)
        (maximum, norm, acc), _ = lax.fori_loop(whole_high, high, edge_step, state)
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
