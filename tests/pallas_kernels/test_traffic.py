"""Bytes the TPU kernels move, against counts made by hand."""

from __future__ import annotations

import pytest

from pallas_kernels.ragged_paged_attention.cases import REAL_CASES, Case
from pallas_kernels.ragged_paged_attention.traffic import tpu_traffic

ROW = 2 * 256 * 2  # two heads, K and V of 128, bfloat16


def case(*rows: tuple[int, int], **changes: object) -> Case:
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "kv_dtype": "bfloat16"}
    return Case("counted", rows, **{**shape, **changes})  # type: ignore[arg-type]


def test_a_decode_fetches_its_live_pages_and_writes_one_piece() -> None:
    traffic = tpu_traffic(case((1, 33)), "v6e")
    assert traffic.pages == 48 * ROW  # three pages of 16
    assert traffic.rows_written == (1 + 16) * ROW  # the new row comes in, 16 rows go out
    assert traffic.queries == 2 * 16 * (128 + 128) * 2  # groups of 4 fill tiles of 16
    assert traffic.layout == 0
    assert traffic.least == 32 * ROW + 2 * ROW + 8 * (128 + 128) * 2


def test_a_window_skips_pages() -> None:
    assert tpu_traffic(case((1, 100), window=20), "v6e").pages == 32 * ROW  # keys 80..99: pages 5 and 6


def test_a_prompt_fetches_up_to_each_tile_s_last_query() -> None:
    traffic = tpu_traffic(case((600, 600)), "v6e")  # tiles of 512 queries in parts of 128, blocks of 256 keys
    assert traffic.pages == (512 + 608) * ROW
    blocks = (4 + 2) + (1 + 1 + 1)  # parts that see a block of the first tile, and of the second's 88 queries
    assert traffic.flops == 2 * 128 * 256 * blocks * 8 * (128 + 128)
    assert traffic.least_flops == 2 * 8 * (600 * 601 // 2) * (128 + 128)
    assert traffic.layout == (600 + 608) * ROW + 2 * 8 * 600 * (128 + 128) * 2


def test_whole_rows_of_lanes_are_moved() -> None:
    narrow = tpu_traffic(case((1, 32), head_dim=96), "v6e")
    assert narrow.pages == 32 * ROW  # 192 elements take 256


@pytest.mark.parametrize("real", REAL_CASES, ids=lambda real: real.name)
def test_no_real_shape_moves_less_than_the_least(real: Case) -> None:
    traffic = tpu_traffic(real, "v6e")
    assert traffic.excess > 0
    assert traffic.flops >= traffic.least_flops
