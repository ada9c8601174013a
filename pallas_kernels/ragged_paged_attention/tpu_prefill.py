"""TPU (Mosaic): rows with two or more queries, tile by tile, over K and V that are in the pool already.

A work item is a tile of one row's queries, all heads. Queries lie head by head, so that one copy brings a
work item's and a key-value head's whole group meets each of its K blocks in one product. Item after item is
one stream of KV blocks: while one is computed on, the next is on its way, be it of this item or the next.
A tile is long, so that pages are fetched few times, and its products go by parts, so that those which no
query has a use for are left out.

A copy starts at a whole memory tile, rows start anywhere: a row's first work item may begin with queries of
the row before, whose results it puts back (`edge`), and its last one runs into the next row's, which comes
later and wins.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu_pages import (
    LANES,
    NO_WINDOW,
    Blocks,
    KVShape,
    OnlineSoftmax,
    PageStream,
    for_each_head,
    round_up,
    sublanes,
    vmem_limit,
)
from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows


class QueryTile(NamedTuple):
    """Queries of a work item: `parts` times `part`. Pages are fetched once for all; products go by part."""

    part: int
    parts: int


class _Work(NamedTuple):
    """Work items; int32 [capacity] each. Places are in the array of queries."""

    row: jax.Array
    start: jax.Array  # place of the first query
    position: jax.Array  # in the row's sequence, of what is at `start`
    first: jax.Array  # position of the row's first query, if it is after that
    last: jax.Array  # keys that some query sees end here
    shift: jax.Array  # queries of rows before at the beginning
    stop: jax.Array  # the row's queries end here, counted from `start`; at most the tile


def tpu_prefill(
    q: jax.Array,
    kv_pool: jax.Array,
    layer: int | jax.Array,
    rows: Rows,
    *,
    spec: AttentionSpec,
    blocks: Blocks,
    query_tile: QueryTile,
    window: int | jax.Array | None = None,
    sinks: jax.Array | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of rows with two or more queries; other rows' outputs mean nothing and may be NaN.

    Args:
        q: [num_tokens, num_q_heads, k_dim].
        kv_pool: [num_layers, num_pages, num_kv_heads, page_size, row_dim].

    Returns:
        [num_tokens, num_q_heads, v_dim].
    """
    num_tokens, num_q_heads, k_dim = q.shape
    shape = KVShape.of(kv_pool, k_dim, spec)
    heads, group = shape.num_heads, num_q_heads // shape.num_heads
    unit = sublanes(q.dtype)
    part = min(query_tile.part, round_up(num_tokens, unit))
    parts = min(query_tile.parts, -(-num_tokens // part))
    tile = part * parts
    work, count = _work(rows, num_tokens, unit, tile)
    capacity = round_up(num_tokens, unit) + tile
    by_head = shape.widen(q).swapaxes(0, 1)  # [num_q_heads, num_tokens, q_width]
    by_head = jnp.pad(by_head, ((0, 0), (0, capacity - num_tokens), (0, 0)))
    scalars = jnp.stack(
        [jnp.asarray(x, jnp.int32) for x in (layer, NO_WINDOW if window is None else window, count)]
    )
    inputs, specs = [], []
    if sinks is not None:
        columns = jnp.repeat(sinks.astype(jnp.float32).reshape(heads, 1, group), part, axis=2)
        columns = jnp.broadcast_to(columns, (heads, parts, group * part)).reshape(heads * parts, -1, 1)
        inputs.append(jnp.broadcast_to(columns, (heads * parts, group * part, LANES)))
        specs.append(pl.BlockSpec((heads * parts, group * part, LANES), lambda i, *_: (0, 0, 0)))
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    state = (heads * parts, group * part)
    kernel = functools.partial(
        _kernel,
        shape=shape,
        spec=spec,
        blocks=blocks,
        pages_per_seq=rows.page_indices.shape[1],
        part=part,
        has_sinks=sinks is not None,
    )
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2 + len(work),
            grid=(count,),
            in_specs=[*specs, in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((2, num_q_heads, tile, shape.q_width), q.dtype),
                pltpu.VMEM((num_q_heads, tile, shape.out_width), q.dtype),
                pltpu.VMEM((num_q_heads, unit, shape.out_width), q.dtype),
                pltpu.VMEM((2, blocks.pages_per_block, *kv_pool.shape[2:]), kv_pool.dtype),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, shape.out_width), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((1,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_q_heads, capacity, shape.out_width), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_limit(
                kv_pool, blocks, tile * prefill_query_bytes(shape, num_q_heads, q.dtype)
            ),
        ),
        interpret=interpret,
        name="ragged_paged_attention_prefill",
    )(scalars, *work, rows.page_indices.reshape(-1), *inputs, by_head, kv_pool)
    return shape.narrow(out[:, :num_tokens].swapaxes(0, 1))


def prefill_query_bytes(shape: KVShape, num_q_heads: int, dtype: Any) -> int:
    """Scratch memory that a query of a work item takes: itself twice, its result and its running sums."""
    itemsize = jnp.dtype(dtype).itemsize
    q_width, out_width = (round_up(n, LANES) for n in (shape.q_width, shape.out_width))
    return num_q_heads * ((2 * q_width + out_width) * itemsize + (2 * LANES + out_width) * 4)


def _work(rows: Rows, num_tokens: int, unit: int, tile: int) -> tuple[_Work, jax.Array]:
    """The items, and their number."""
    num_seqs = rows.kv_lens.shape[0]
    begins, ends = rows.cu_q_lens[:-1], rows.cu_q_lens[1:]
    q_lens = ends - begins
    shifts = begins % unit
    tiles = jnp.where(q_lens > 1, -(-(q_lens + shifts) // tile), 0)
    totals = jnp.cumsum(tiles)
    most_rows = min(num_seqs, max(1, num_tokens // 2))  # with two or more queries
    capacity = (num_tokens + (unit - 1) * most_rows) // tile + most_rows
    i = jnp.arange(capacity, dtype=jnp.int32)
    row = jnp.searchsorted(totals, i, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, num_seqs - 1)
    nth = i - (totals[row] - tiles[row])
    start = begins[row] - shifts[row] + nth * tile
    first = rows.kv_lens[row] - q_lens[row]
    position = first + start - begins[row]
    is_live = i < totals[-1]
    work = _Work(
        row,
        jnp.where(is_live, start, 0),
        position,
        first,
        jnp.where(is_live, jnp.minimum(position + tile, rows.kv_lens[row]), 0),
        jnp.where(is_live & (nth == 0), shifts[row], 0),
        jnp.where(is_live, jnp.minimum(ends[row] - start, tile), 0),
    )
    return work, jnp.maximum(totals[-1], 1)  # one item without keys when there is none


def _kernel(
    scalars: Any,  # SMEM int32 [3]: layer, window, number of items
    item_row: Any,  # SMEM int32 [capacity], as the next six: see `_Work`
    item_start: Any,
    item_position: Any,
    item_first: Any,
    item_last: Any,
    item_shift: Any,
    item_stop: Any,
    table: Any,  # SMEM int32 [num_seqs * pages_per_seq]
    *refs: Any,
    shape: KVShape,
    spec: AttentionSpec,
    blocks: Blocks,
    pages_per_seq: int,
    part: int,
    has_sinks: bool,
) -> None:
    rest = list(refs)
    sinks_ref = rest.pop(0) if has_sinks else None  # [num_heads * parts, group * part, 128]
    q_hbm, pool_ref, out_hbm, queries, result, edge, buffers, *rest = rest
    maximum, norm, acc, state, q_arrived, arrived, written = rest
    item = pl.program_id(0)
    layer, window, num_items = scalars[0], scalars[1], scalars[2]
    num_q_heads, tile = queries.shape[1:3]
    group, page_size, parts = num_q_heads // shape.num_heads, shape.page_size, tile // part
    stream = PageStream((pool_ref, table, buffers, arrived), layer, pages_per_seq, blocks)
    softmax = OnlineSoftmax((maximum, norm, acc), spec)

    def first_page(item: jax.Array) -> jax.Array:
        position = jnp.maximum(item_position[item], item_first[item])
        return jnp.maximum(position + 1 - window, 0) // page_size

    def num_pages(item: jax.Array) -> jax.Array:
        return (item_last[item] + page_size - 1) // page_size

    def start_pages(item: jax.Array, page: jax.Array, slot: jax.Array) -> None:
        stream.start(item_row[item], page, stream.count(page, num_pages(item)), slot)

    def q_copy(item: jax.Array) -> Any:
        place = item % 2
        start = pl.multiple_of(item_start[item], sublanes(queries.dtype))
        return pltpu.make_async_copy(q_hbm.at[:, pl.ds(start, tile)], queries.at[place], q_arrived.at[place])

    def out_copy(item: jax.Array) -> Any:
        start = pl.multiple_of(item_start[item], sublanes(queries.dtype))
        return pltpu.make_async_copy(result, out_hbm.at[:, pl.ds(start, tile)], written.at[0])

    @pl.when(item == 0)
    def first_fetch() -> None:
        state[0] = 0
        q_copy(item).start()
        start_pages(item, first_page(item), jnp.int32(0))

    @pl.when(item + 1 < num_items)
    def next_queries() -> None:
        q_copy(item + 1).start()

    row, position, last = item_row[item], item_position[item], item_last[item]
    page0, pages = first_page(item), num_pages(item)
    num_blocks = (pages - page0 + blocks.pages_per_block - 1) // blocks.pages_per_block
    softmax.reset(sinks_ref[...] if sinks_ref is not None else None)
    q_copy(item).wait()

    def one_block(b: jax.Array, _: None) -> None:
        slot = state[0]
        page = page0 + b * blocks.pages_per_block
        base = page * page_size  # the block's first key
        is_last = b == num_blocks - 1
        next_item = jnp.where(is_last, item + 1, item)

        @pl.when(next_item < num_items)
        def prefetch() -> None:
            after = jnp.where(
                is_last, first_page(jnp.minimum(next_item, num_items - 1)), page + blocks.pages_per_block
            )
            start_pages(next_item, after, 1 - slot)

        stream.wait(row, page, stream.count(page, pages), slot)

        @pl.when(is_last)
        def clear_tail() -> None:
            stream.zero_after(last - 1 - base, slot, None, None)

        def one_step(step: jax.Array, _: None) -> None:
            lines = (group * part, stream.keys)
            first_key = base + step * stream.keys
            key = first_key + jax.lax.broadcasted_iota(jnp.int32, lines, 1)
            # Parts whose queries end before the first key, or start past the last key's window, see nothing.
            begin = jnp.maximum(first_key - position, 0) // part
            end = jnp.minimum(item_stop[item] - 1, first_key + stream.keys - 2 + window - position) // part

            def one_part(i: jax.Array, _: None) -> None:
                query = position + i * part + jax.lax.broadcasted_iota(jnp.int32, lines, 0) % part
                is_seen = (key <= query) & (key < last) & (key > query - window)

                def one_head(head: jax.Array | int) -> None:
                    start = pl.multiple_of(i * part, part)
                    q = queries[item % 2, pl.ds(head * group, group), pl.ds(start, part)]
                    k, v = shape.split(stream.rows(slot, step, head))
                    softmax.update(head * parts + i, q.reshape(group * part, shape.q_width), k, v, is_seen)

                for_each_head(shape.num_heads, 1, one_head)

            jax.lax.fori_loop(begin, end + 1, one_part, None)

        live = jnp.minimum(last - base, blocks.pages_per_block * page_size)
        jax.lax.fori_loop(0, (live + stream.keys - 1) // stream.keys, one_step, None)
        state[0] = 1 - slot

    jax.lax.fori_loop(0, num_blocks, one_block, None)

    # Results go out in order: a row's last tile overlaps what comes after it.
    @pl.when(item > 0)
    def previous_result() -> None:
        out_copy(item - 1).wait()

    def finish(head: jax.Array | int) -> None:
        for i in range(parts):
            rows = softmax.result(head * parts + i).astype(result.dtype)
            rows = rows.reshape(group, part, shape.out_width)
            result[pl.ds(head * group, group), i * part : (i + 1) * part] = rows

    for_each_head(shape.num_heads, 1, finish)
    unit, shift, stop = edge.shape[1], item_shift[item], item_stop[item]

    @pl.when(shift > 0)
    def put_back() -> None:
        place = jax.lax.broadcasted_iota(jnp.int32, edge.shape, 1)
        result[:, :unit] = jnp.where(place < shift, edge[...], result[:, :unit])

    @pl.when(stop % unit != 0)
    def keep() -> None:
        edge[...] = result[:, pl.ds(pl.multiple_of(stop // unit * unit, unit), unit)]

    out_copy(item).start()

    @pl.when(item == num_items - 1)
    def drain() -> None:
        out_copy(item).wait()
