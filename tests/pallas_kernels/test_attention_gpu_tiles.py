"""Work lists of the Hopper kernel: tiles hold every query once and see what they must; splits join."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import gpu_tiles
from pallas_kernels.ragged_paged_attention.gpu_tiles import Tiles
from pallas_kernels.ragged_paged_attention.types import Rows

ROWS = ((1, 40), (20, 20), (0, 0), (33, 90), (1, 1), (2, 65))  # (queries, tokens)
PADDING = 4


def rows_of(rows: tuple[tuple[int, int], ...]) -> Rows:
    q_lens, kv_lens = np.array(rows, np.int32).T
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    return Rows(jnp.asarray(kv_lens), jnp.zeros((len(rows), 8), jnp.int32), jnp.asarray(cu_q_lens))


def tiles_of(
    rows: Rows, num_tokens: int, group: int, tile_rows: int, decode: bool, window: int | None
) -> Tiles:
    bound = gpu_tiles.num_tiles_bound(num_tokens, len(rows.kv_lens), group, tile_rows, decode=decode)
    return gpu_tiles.make_tiles(
        rows, window, group=group, tile_rows=tile_rows, num_tiles=bound, decode=decode
    )


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize(("group", "tile_rows"), [(1, 8), (3, 64), (71, 64)])
def test_every_query_head_lies_in_one_tile_and_comes_back(group: int, tile_rows: int, decode: bool) -> None:
    num_kv_heads, k_dim = 2, 4
    rows = rows_of(ROWS)
    num_tokens = sum(q for q, _ in ROWS) + PADDING
    q = np.random.default_rng(0).standard_normal((num_tokens, num_kv_heads * group, k_dim)).astype(np.float32)
    tiles = tiles_of(rows, num_tokens, group, tile_rows, decode, None)
    queries = gpu_tiles.gather_queries(jnp.asarray(q), rows, tiles, num_kv_heads, tile_rows)
    assert queries.shape[1:] == (num_kv_heads, tile_rows, k_dim)
    back, is_served = gpu_tiles.scatter_outputs(queries, rows, tiles, num_tokens, group, decode_only=False)
    q_lens = np.repeat([n for n, _ in ROWS], [n for n, _ in ROWS])
    expected = np.append((q_lens == 1) == decode, [False] * PADDING)
    np.testing.assert_array_equal(is_served, expected)
    np.testing.assert_array_equal(np.asarray(back)[expected], q[expected])


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("group", [1, 3])
def test_a_tile_sees_from_its_first_row_s_first_key_to_its_last_row_s_own(
    group: int, decode: bool, window: int | None
) -> None:
    tile_rows = 16
    tiles = tiles_of(rows_of(ROWS), 60, group, tile_rows, decode, window)
    expected = []
    for row, (q_len, kv_len) in enumerate(ROWS):
        if q_len == 0 or (q_len == 1) != decode:
            continue
        for first in range(0, q_len * group, tile_rows):
            flat = np.arange(first, min(first + tile_rows, q_len * group))
            positions = kv_len - q_len + flat // group
            begin = 0 if window is None else max(0, positions[0] - window + 1)
            expected.append((row, first, kv_len - q_len, begin, positions[-1] + 1))
    table = np.asarray(tiles.table)
    live = table[:, gpu_tiles.END] > 0
    np.testing.assert_array_equal(table[live], expected)
    assert (table[~live, gpu_tiles.BEGIN] == 0).all()


def test_no_batch_has_more_tiles_than_the_bound() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        group, tile_rows = int(rng.integers(1, 9)), int(rng.choice([8, 64, 128]))
        lens = rng.integers(0, 12, int(rng.integers(1, 9)))
        num_tokens = max(int(lens.sum()), 1)
        for decode in (True, False):
            served = lens[lens == 1] if decode else lens[lens > 1]
            needed = sum(-(-int(n) * group // tile_rows) for n in served)
            bound = gpu_tiles.num_tiles_bound(num_tokens, len(lens), group, tile_rows, decode=decode)
            assert needed <= bound


@pytest.mark.parametrize(("splits", "min_blocks"), [(1, 4), (5, 1), (5, 4), (64, 2)])
def test_splits_cover_a_tile_s_blocks_once_and_in_order(splits: int, min_blocks: int) -> None:
    for begin, end in ((0, 0), (0, 1), (0, 64), (130, 4096), (63, 65), (900, 901)):
        ranges = [
            gpu_tiles.split_range(
                jnp.int32(begin), jnp.int32(end), s, splits=splits, block=64, min_blocks=min_blocks
            )
            for s in range(splits)
        ]
        blocks = [j for low, high in ranges for j in range(int(low), int(high))]
        assert blocks == (list(range(begin // 64, -(-end // 64))) if end else [])
        sizes = [int(high) - int(low) for low, high in ranges if low < high]
        assert all(size >= min_blocks for size in sizes[:-1])


def test_joined_splits_are_the_softmax_over_all_of_their_keys() -> None:
    rng = np.random.default_rng(2)
    scores = 5 * rng.standard_normal((2, 1, 3, 4, 6))  # [tiles, heads, splits, rows, keys], base 2
    values = rng.standard_normal((2, 1, 3, 6, 5))
    is_live = np.array([[True, True, False], [True, False, False]])
    weights = np.exp2(scores)
    out = (weights @ values) / weights.sum(-1, keepdims=True)
    lse = np.log2(weights.sum(-1))
    poisoned = np.where(is_live[:, None, :, None, None], out, np.nan)
    poisoned_lse = np.where(is_live[:, None, :, None], lse, np.nan)
    joined, joined_lse = gpu_tiles.join_splits(
        jnp.asarray(poisoned, jnp.float32), jnp.asarray(poisoned_lse, jnp.float32), jnp.asarray(is_live)
    )
    live = np.where(is_live[:, None, :, None, None], weights, 0.0)
    total = live.sum((2, 4))
    np.testing.assert_allclose(joined, (live @ values).sum(2) / total[..., None], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(joined_lse, np.log2(total), rtol=1e-5)


def test_a_tile_without_a_live_split_joins_to_zero() -> None:
    nan = jnp.full((1, 1, 2, 8, 4), jnp.nan)
    joined, _ = gpu_tiles.join_splits(nan, nan[..., 0], jnp.zeros((1, 2), bool))
    np.testing.assert_array_equal(joined, np.zeros((1, 1, 8, 4)))
