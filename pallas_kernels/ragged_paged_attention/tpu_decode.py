"""TPU (Mosaic): rows with one query each. Writes the row's new K and V on the way.

Grid step g takes `rows_per_step` rows in order. A row walks its blocks; while one is computed on, the next
(of this row, or the first of the next live row) is on its way. The last block gets the new token's K and V in
VMEM, and the few rows around it go back to the pool while the row is computed.
"""

from __future__ import annotations

import functools
from typing import Any

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

_ROWS_PER_STEP = 8
_HEADS_AT_ONCE = 8  # heads whose chains of small operations are interleaved


def tpu_decode(
    q: jax.Array,
    kv: jax.Array | None,
    kv_pool: jax.Array,
    layer: int | jax.Array,
    rows: Rows,
    *,
    spec: AttentionSpec,
    blocks: Blocks,
    window: int | jax.Array | None = None,
    sinks: jax.Array | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query a row.

    Args:
        q: [num_seqs, num_q_heads, k_dim].
        kv: [num_seqs, num_kv_heads, row_dim] in the pool's dtype, a new token a row; None: written already.
        kv_pool: [num_layers, num_pages, num_kv_heads, page_size, row_dim].
        rows: kv_lens is 0 for rows to leave alone, whose output is 0.

    Returns:
        [num_seqs, num_q_heads, v_dim] and the pool.
    """
    num_seqs, num_q_heads, k_dim = q.shape
    shape = KVShape.of(kv_pool, k_dim, spec)
    heads, group = shape.num_heads, num_q_heads // shape.num_heads
    padded = round_up(group, sublanes(q.dtype))  # queries of a head, up to whole tiles
    q4 = shape.widen(q).reshape(num_seqs, heads, group, shape.q_width)
    q4 = jnp.pad(q4, ((0, -num_seqs % _ROWS_PER_STEP), (0, 0), (0, padded - group), (0, 0)))
    num_padded = q4.shape[0]
    extra = num_padded - num_seqs
    kv_lens = jnp.pad(rows.kv_lens, (0, extra))
    table = rows.page_indices  # padding rows have no pages
    # The next row with something to do, for every row; num_padded: none.
    index = jnp.where(kv_lens > 0, jnp.arange(num_padded, dtype=jnp.int32), num_padded)
    following = jax.lax.cummin(index, reverse=True)
    following = jnp.append(following, jnp.full(1, num_padded, jnp.int32))
    scalars = jnp.stack([jnp.asarray(x, jnp.int32) for x in (layer, NO_WINDOW if window is None else window)])

    def row_block(*dims: int) -> pl.BlockSpec:
        return pl.BlockSpec((_ROWS_PER_STEP, *dims), lambda g, *_: (g, *(0 for _ in dims)))

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    inputs, specs = [q4], [row_block(heads, padded, shape.q_width)]
    if kv is not None:
        inputs.append(jnp.pad(kv, ((0, extra), (0, 0), (0, 0)))[:, :, None])
        specs.append(row_block(heads, 1, shape.row_dim))
    if sinks is not None:
        grouped = jnp.pad(sinks.astype(jnp.float32).reshape(heads, group), ((0, 0), (0, padded - group)))
        inputs.append(jnp.broadcast_to(grouped[..., None], (heads, padded, LANES)))
        specs.append(pl.BlockSpec((heads, padded, LANES), lambda g, *_: (0, 0, 0)))
    kernel = functools.partial(
        _kernel,
        shape=shape,
        spec=spec,
        blocks=blocks,
        pages_per_seq=table.shape[1],
        has_new=kv is not None,
        has_sinks=sinks is not None,
    )
    state = (heads, padded)
    tile = min(sublanes(kv_pool.dtype), shape.page_size)
    prefetched = 4
    out, kv_pool = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=prefetched,
            grid=(num_padded // _ROWS_PER_STEP,),
            in_specs=[*specs, in_hbm],
            out_specs=[row_block(heads, padded, shape.out_width), in_hbm],
            scratch_shapes=[
                pltpu.VMEM((2, blocks.pages_per_block, *kv_pool.shape[2:]), kv_pool.dtype),
                pltpu.VMEM((2, heads, tile, shape.row_dim), kv_pool.dtype),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, shape.out_width), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_padded, heads, padded, shape.out_width), q.dtype),
            jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype),
        ],
        input_output_aliases={prefetched + len(inputs): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit(kv_pool, blocks)
        ),
        interpret=interpret,
        name="ragged_paged_attention_decode",
    )(scalars, kv_lens, table.reshape(-1), following, *inputs, kv_pool)
    out = shape.narrow(out[:num_seqs, :, :group])
    return out.reshape(num_seqs, num_q_heads, -1), kv_pool


def _kernel(
    scalars: Any,  # SMEM int32 [2]: layer, window
    kv_lens: Any,  # SMEM int32 [num_seqs]
    table: Any,  # SMEM int32 [num_seqs * pages_per_seq]
    following: Any,  # SMEM int32 [num_seqs + 1]
    *refs: Any,
    shape: KVShape,
    spec: AttentionSpec,
    blocks: Blocks,
    pages_per_seq: int,
    has_new: bool,
    has_sinks: bool,
) -> None:
    q_ref, *rest = refs  # [rows_per_step, num_heads, padded, q_width]
    new_ref = rest.pop(0) if has_new else None  # [rows_per_step, num_heads, 1, row_dim]
    sinks_ref = rest.pop(0) if has_sinks else None  # [num_heads, padded, 128]
    _, out_ref, pool_ref, buffers, slabs, maximum, norm, acc, state, arrived, written = rest
    program, num_seqs = pl.program_id(0), kv_lens.shape[0]
    page_size, block_keys = shape.page_size, blocks.pages_per_block * shape.page_size
    layer, window = scalars[0], scalars[1]
    stream = PageStream((pool_ref, table, buffers, arrived), layer, pages_per_seq, blocks)
    softmax = OnlineSoftmax((maximum, norm, acc), spec)
    tile = slabs.shape[2]

    def first_page(row: jax.Array) -> jax.Array:
        return jnp.maximum(kv_lens[row] - window, 0) // page_size

    def num_pages(row: jax.Array) -> jax.Array:
        return (kv_lens[row] + page_size - 1) // page_size

    def start(row: jax.Array, page: jax.Array, slot: jax.Array) -> None:
        stream.start(row, page, stream.count(page, num_pages(row)), slot)

    def write_back(row: jax.Array, place: jax.Array) -> Any:
        last = jnp.maximum(kv_lens[row] - 1, 0)
        page = table[row * pages_per_seq + last // page_size]
        offset = pl.multiple_of((last % page_size) // tile * tile, tile)
        return pltpu.make_async_copy(
            slabs.at[place], pool_ref.at[layer, page, :, pl.ds(offset, tile)], written.at[place]
        )

    # state: the buffer of the current block, and the rows written so far.
    @pl.when(program == 0)
    def first_fetch() -> None:
        state[0] = 0
        state[1] = 0

        @pl.when(following[0] < num_seqs)
        def fetch_first_row() -> None:
            start(following[0], first_page(following[0]), jnp.int32(0))

    def one_row(r: jax.Array, _: None) -> None:
        row = program * _ROWS_PER_STEP + r
        kv_len = kv_lens[row]
        since = jnp.maximum(kv_len - window, 0)
        page0, pages = first_page(row), num_pages(row)
        num_blocks = (pages - page0 + blocks.pages_per_block - 1) // blocks.pages_per_block

        @pl.when(kv_len == 0)
        def leave_alone() -> None:
            out_ref[r] = jnp.zeros(out_ref.shape[1:], out_ref.dtype)

        @pl.when(kv_len > 0)
        def attend_row() -> None:
            softmax.reset(sinks_ref[...] if sinks_ref is not None else None)

            def one_block(b: jax.Array, _: None) -> None:
                slot = state[0]
                page = page0 + b * blocks.pages_per_block
                base = page * page_size  # the block's first key
                is_last = b == num_blocks - 1
                next_row = jnp.where(is_last, following[row + 1], row)

                @pl.when(next_row < num_seqs)
                def prefetch() -> None:
                    after = jnp.where(is_last, first_page(next_row), page + blocks.pages_per_block)
                    start(next_row, after, 1 - slot)

                stream.wait(row, page, stream.count(page, pages), slot)

                @pl.when(is_last)
                def finish_block() -> None:
                    place = state[1] % 2
                    if new_ref is None:
                        stream.zero_after(kv_len - 1 - base, slot, None, None)
                        return

                    @pl.when(state[1] >= 2)
                    def reuse_slab() -> None:
                        write_back(row, place).wait()  # of the row before the last; all are of one size

                    stream.zero_after(kv_len - 1 - base, slot, new_ref[r], slabs.at[place])
                    write_back(row, place).start()
                    state[1] = state[1] + 1

                def one_step(step: jax.Array, _: None) -> None:
                    key = base + step * stream.keys
                    key += jax.lax.broadcasted_iota(jnp.int32, (q_ref.shape[2], stream.keys), 1)
                    is_seen = (key < kv_len) & (key >= since)

                    def one_head(head: jax.Array | int) -> None:
                        k, v = shape.split(stream.rows(slot, step, head))
                        softmax.update(head, q_ref[r, head], k, v, is_seen)

                    for_each_head(shape.num_heads, _HEADS_AT_ONCE, one_head)

                live = jnp.minimum(kv_len - base, block_keys)
                jax.lax.fori_loop(0, (live + stream.keys - 1) // stream.keys, one_step, None)
                state[0] = 1 - slot

            jax.lax.fori_loop(0, num_blocks, one_block, None)

            def finish(head: jax.Array | int) -> None:
                out_ref[r, head] = softmax.result(head).astype(out_ref.dtype)

            for_each_head(shape.num_heads, _HEADS_AT_ONCE, finish)

    jax.lax.fori_loop(0, _ROWS_PER_STEP, one_row, None)

    if new_ref is not None:

        @pl.when(program == pl.num_programs(0) - 1)
        def drain() -> None:
            for back in (1, 2):

                @pl.when(state[1] >= back)
                def wait_for(back: int = back) -> None:
                    # Any row's copy has the size that is waited for.
                    write_back(jnp.int32(0), (state[1] - back) % 2).wait()
