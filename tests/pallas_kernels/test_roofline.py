"""Bytes, operations and least times of calls, against counting by hand and by brute force."""

from __future__ import annotations

import dataclasses

import pytest

from pallas_kernels.chips import chip_by_name
from pallas_kernels.roofline import (
    AttentionShape,
    Cost,
    attention_cost,
    grouped_matmul_cost,
    kv_write_cost,
    link_seconds,
    matmul_cost,
)

pytestmark = pytest.mark.quick
SHAPE = AttentionShape(num_q_heads=6, num_kv_heads=2, k_dim=8, v_dim=4, kv_dim=12, q_bytes=2, kv_bytes=1)


def counted(q_lens, kv_lens, window):
    """(old tokens seen by some query, pairs of query and key), one by one."""
    seen, pairs = 0, 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        by_query = [
            {k for k in range(kv_len) if k <= p and (window is None or k > p - window)}
            for p in range(kv_len - q_len, kv_len)
        ]
        pairs += sum(map(len, by_query))
        seen += len({k for keys in by_query for k in keys if k < kv_len - q_len})
    return seen, pairs


@pytest.mark.parametrize("window", [None, 1, 3, 7, 40])
@pytest.mark.parametrize(
    "rows", [[(1, 1)], [(1, 30)], [(9, 9)], [(5, 12), (1, 4), (0, 0), (0, 6), (16, 40)]], ids=str
)
def test_attention_counts_what_its_queries_see(rows, window):
    q_lens, kv_lens = zip(*rows, strict=True)
    cost = attention_cost(q_lens, kv_lens, dataclasses.replace(SHAPE, window=window))
    seen, pairs = counted(q_lens, kv_lens, window)
    new = sum(q_lens)
    assert cost.flops == 2 * pairs * 6 * (8 + 4)
    arguments = new * 6 * (8 + 4) * 2 + new * 2 * 12 * 2  # q and the output; the new rows
    assert cost.num_bytes == arguments + (seen + new) * 2 * 12 * 1


def test_in_latent_form_a_row_is_read_once_for_k_and_v():
    latent = AttentionShape(num_q_heads=16, num_kv_heads=1, k_dim=576, v_dim=512, kv_dim=576)
    cost = attention_cost([1], [1000], latent)
    assert cost.num_bytes == 16 * (576 + 512) * 2 + 1000 * 576 * 2 + 576 * 2
    assert cost.flops == 2 * 1000 * 16 * (576 + 512)


def test_more_queries_than_tokens_are_refused():
    with pytest.raises(ValueError, match="3 queries cannot be the last of 2 tokens"):
        attention_cost([3], [2], SHAPE)


def test_a_write_reads_rows_in_one_dtype_and_writes_them_in_another():
    assert kv_write_cost(5, SHAPE) == Cost(5 * 2 * 12 * (2 + 1))


def test_matmuls_read_their_operands_once():
    assert matmul_cost(3, 4, 5) == Cost((12 + 20 + 15) * 2, 2 * 60)
    assert matmul_cost(3, 4, 5, weight_bytes=0.5, out_bytes=4) == Cost(24 + 10 + 60, 120)


def test_an_expert_without_tokens_is_not_read():
    assert grouped_matmul_cost([3, 0, 1], 4, 5) == matmul_cost(3, 4, 5) + matmul_cost(1, 4, 5)


def test_the_bound_is_the_slower_of_memory_and_arithmetic():
    chip = chip_by_name("v6e")  # 1640e9 bytes/s, 918e12 operations/s, links of 400e9 bytes/s
    assert Cost(1640e9, 918e12 / 2).seconds(chip) == 1.0
    assert Cost(1640e9, 918e12 * 3).seconds(chip) == 3.0
    assert Cost(0, 918e12).seconds(chip, peak=chip.ops_8bit) == 0.5
    assert link_seconds(100e9, chip) == 0.25
    assert Cost(1, 2) * 3 + Cost(1, 1) == Cost(4, 7)
