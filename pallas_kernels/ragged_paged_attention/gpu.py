"""Ragged paged attention on Hopper (sm_90a): the new rows are scattered into the pool, one kernel attends.

Sequences with one query and those with more are two lists of tiles for the same kernel (`gpu_kernel`), in
other block sizes: a decode is bound by memory, so its keys may be split over many thread blocks.
"""

from __future__ import annotations

from typing import NoReturn

import jax
import jax.numpy as jnp

from pallas_kernels.chips import chip_by_name
from pallas_kernels.kv_write import kv_rows, locate_tokens, write_kv
from pallas_kernels.ragged_paged_attention import gpu_tiles
from pallas_kernels.ragged_paged_attention.gpu_kernel import LOG2_E, WARPGROUP_ROWS, Plan, attend
from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows

_MOST_COLUMNS = 256  # of V in the accumulator of a warpgroup
_MIN_BLOCKS = 4  # of a split: fewer keys do not pay for joining
_KEYS_OF_A_SPLIT = 16384  # about the most that one thread block should walk alone
_SHARED_MEMORY = 228 * 1024  # bytes of a Hopper core
_RESERVED = 1024  # of them, kept by the hardware for every thread block
_BARRIERS = 256  # bytes of a thread block's barriers, at most
# Pool dtype -> dtype of the matrix products, which holds its values exactly. Hopper has one instruction from
# float8 to float16 and none to bfloat16.
_PRODUCTS = {"bfloat16": jnp.bfloat16, "float8_e4m3fn": jnp.float16, "int8": jnp.bfloat16}


def mosaic_gpu_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_pool: jax.Array,
    layer: int | jax.Array,
    rows: Rows,
    *,
    spec: AttentionSpec,
    chip: str,
    window: int | jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `ragged_paged_attention`; q is bfloat16, the pool bfloat16, float8_e4m3fn or int8.

    Raises:
        NotImplementedError: a dtype or shape that the kernel does not serve; implementation="xla" does.
    """
    num_tokens = q.shape[0]
    check_case(q, kv_pool, spec)
    if k is not None:
        places = locate_tokens(rows, num_tokens, kv_pool.shape[3], decode_only=spec.decode_only)
        kv_pool = write_kv(kv_pool, layer, kv_rows(k, v, kv_pool.dtype, kv_pool.shape[4]), *places)
    if window is not None:  # small enough to be multiplied with
        window = jnp.minimum(window, rows.page_indices.shape[1] * kv_pool.shape[3])
    scalars = jnp.stack([jnp.asarray(x, jnp.int32) for x in (layer, 0 if window is None else window)])

    def part(decode: bool) -> tuple[jax.Array, jax.Array]:
        """Attention of the sequences with one query, or of the others: [num_tokens, ...], and of whom."""
        plan = make_plan(q, kv_pool, rows, spec, chip, decode=decode, is_windowed=window is not None)
        tile_rows, group = plan.tile_rows, plan.group
        num_seqs = rows.kv_lens.shape[0]
        num_tiles = gpu_tiles.num_tiles_bound(num_tokens, num_seqs, group, tile_rows, decode=decode)
        tiles = gpu_tiles.make_tiles(
            rows, window, group=group, tile_rows=tile_rows, num_tiles=num_tiles, decode=decode
        )
        queries = gpu_tiles.gather_queries(q.astype(plan.dtype), rows, tiles, plan.num_kv_heads, tile_rows)
        out, lse = attend(queries, kv_pool, tiles.table, rows.page_indices, scalars, plan)
        if plan.splits > 1:
            begin, end = (tiles.table[:, i, None] for i in (gpu_tiles.BEGIN, gpu_tiles.END))
            low, high = gpu_tiles.split_range(
                begin,
                end,
                jnp.arange(plan.splits)[None, :],
                splits=plan.splits,
                block=plan.block,
                min_blocks=plan.min_blocks,
            )
            out, lse = gpu_tiles.join_splits(out, lse, low < high)
        else:
            out, lse = out[:, :, 0], lse[:, :, 0]
        out = (
            jnp.concatenate([out.astype(jnp.float32), lse[..., None]], axis=-1) if sinks is not None else out
        )
        out, is_served = gpu_tiles.scatter_outputs(
            out, rows, tiles, num_tokens, group, decode_only=spec.decode_only
        )
        if sinks is not None:
            # One more term in the softmax's sum: out * s / (s + e^sink), s = 2^lse.
            out, lse = out[..., :-1], out[..., -1]
            out = out * jax.nn.sigmoid(lse / LOG2_E - sinks.astype(jnp.float32)[None, :])[..., None]
        return out.astype(q.dtype), is_served

    decoded, is_decode = part(True)
    result = jnp.where(is_decode[:, None, None], decoded, 0)  # padding tokens: finite
    if not spec.decode_only:
        attended, is_attended = part(False)
        result = jnp.where(is_attended[:, None, None], attended, result)
    return result, kv_pool


def check_case(q: jax.Array, kv_pool: jax.Array, spec: AttentionSpec) -> None:
    """Raise NotImplementedError, with the reason, for what the kernel does not serve."""
    k_dim, page_size, row_dim = q.shape[2], *kv_pool.shape[3:]
    v_start, v_stop = spec.v_slice(k_dim, row_dim)
    v_dim = v_stop - v_start
    least = 32 // kv_pool.dtype.itemsize  # elements of the shortest swizzle
    if q.dtype != jnp.bfloat16:
        _refuse(f"queries of {q.dtype}: the tensor cores are used in 16 bits")
    if jnp.dtype(kv_pool.dtype).name not in _PRODUCTS:
        _refuse(f"a pool of {kv_pool.dtype} (serves {', '.join(_PRODUCTS)})")
    if any(n % least for n in (k_dim, v_start, v_dim, row_dim)):
        _refuse(f"heads of {k_dim} and {v_dim} in {kv_pool.dtype}: a swizzle takes multiples of {least}")
    if page_size % 8 or (128 % page_size and page_size % 128):
        _refuse(f"pages of {page_size}: 8, 16, 32, 64 or multiples of 128 fill a block of keys")
    if v_dim > _MOST_COLUMNS and (v_dim > 2 * _MOST_COLUMNS or v_dim % 128):
        _refuse(f"V of {v_dim}: two accumulators of at most {_MOST_COLUMNS} columns fit the registers")


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f'mosaic_gpu attention does not serve {what}; implementation="xla" does')


def make_plan(
    q: jax.Array,
    kv_pool: jax.Array,
    rows: Rows,
    spec: AttentionSpec,
    chip: str,
    *,
    decode: bool,
    is_windowed: bool,
) -> Plan:
    """Block sizes of the decode or the prefill kernel, from shapes alone."""
    num_tokens, num_q_heads, k_dim = q.shape
    _, num_pages, num_kv_heads, page_size, row_dim = kv_pool.shape
    group = num_q_heads // num_kv_heads
    v_start, v_stop = spec.v_slice(k_dim, row_dim)
    v_dim = v_stop - v_start
    column_groups = 2 if v_dim > _MOST_COLUMNS else 1
    num_seqs, pages_per_seq = rows.page_indices.shape
    row_groups = 1 if decode or column_groups > 1 or num_tokens * group <= WARPGROUP_ROWS else 2
    tile_rows = min(-(-group // 8) * 8, WARPGROUP_ROWS) if decode else WARPGROUP_ROWS * row_groups
    dtype = _PRODUCTS[jnp.dtype(kv_pool.dtype).name]
    is_converted = kv_pool.dtype != dtype
    # More keys at a time make better products, as long as registers and two thread blocks on a core allow it.
    block = 128 if row_dim <= (128 if decode or is_converted else 256) and page_size > 8 else 64

    rows_bytes = row_groups * WARPGROUP_ROWS * k_dim * 2 + (block * row_dim * 2 if is_converted else 0)
    stage = block * row_dim * kv_pool.dtype.itemsize

    def stages_that_fit(resident: int, out_bytes: int) -> int:
        """Where `resident` thread blocks share a core, and an element of the result takes `out_bytes`."""
        free = _SHARED_MEMORY // resident - _RESERVED - _BARRIERS - rows_bytes
        results = WARPGROUP_ROWS * row_groups * (v_dim * out_bytes + 4 * column_groups)
        return free // stage if results <= free else 0

    # Two decoding thread blocks on a core hide each other's waits, where they fit. Splits leave float32.
    for resident, out_bytes in ((2, 4), (1, 4), (1, 2)) if decode else ((1, 4), (1, 2)):
        stages = stages_that_fit(resident, out_bytes)
        if stages >= 2:
            break
    else:
        _refuse(f"rows of {row_dim} {kv_pool.dtype}: two stages of {block} do not fit shared memory")

    # Keys are split where thread blocks would be too few for the cores, or have too much to walk. Of a
    # prompt's tiles only some are there: results of the others are but memory, within bounds.
    num_tiles = gpu_tiles.num_tiles_bound(num_tokens, num_seqs, group, tile_rows, decode=decode)
    num_blocks, slots = num_tiles * num_kv_heads, resident * chip_by_name(chip).num_cores
    context = pages_per_seq * page_size
    if decode:
        splits = max(-(-2 * slots // num_blocks), context // _KEYS_OF_A_SPLIT)
    else:
        live_blocks = -(-num_tokens * group // tile_rows) * num_kv_heads
        splits = min(slots // live_blocks, 2 * slots // num_blocks)
    splits = max(1, min(splits, context // (block * _MIN_BLOCKS))) if out_bytes == 4 else 1
    return Plan(
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        group=group,
        k_dim=k_dim,
        v_start=v_start,
        v_dim=v_dim,
        tile_rows=tile_rows,
        block=block,
        stages=min(stages, 4),
        splits=splits,
        min_blocks=_MIN_BLOCKS,
        row_groups=row_groups,
        column_groups=column_groups,
        is_windowed=is_windowed,
        sm_scale=spec.sm_scale,
        soft_cap=spec.soft_cap,
        dtype=dtype,
        is_converted=is_converted,
    )
