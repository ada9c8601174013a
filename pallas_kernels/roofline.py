"""What each operation's call must move and compute, and so the least time it can take on a chip.

A bound on time is the larger of bytes over memory bandwidth and operations over the peak rate (the roofline:
Williams, Waterman & Patterson, 2009). Every operand is counted once, as if caches and scratch memory were
perfect; a measured time divided into the bound is a fraction that cannot exceed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.chips import Chip


@dataclass(frozen=True)
class Cost:
    """Of one or several calls: bytes read and written, and operations (a multiply-add is two)."""

    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.num_bytes * times, self.flops * times)

    def seconds(self, chip: Chip, peak: float | None = None) -> float:
        """The least time on a chip. `peak`: operations/s, by default those of bfloat16."""
        return max(self.num_bytes / chip.memory_bandwidth, self.flops / (peak or chip.flops_bf16))


@dataclass(frozen=True)
class AttentionShape:
    """What an attention call has on one device, beside its rows.

    `kv_bytes` and `q_bytes` are the bytes of an element of the pool and of q, the new rows and the output. In
    latent form a pool row is K alone (`kv_dim == k_dim`); else it is K, then V.
    """

    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    kv_dim: int
    q_bytes: int = 2
    kv_bytes: int = 2
    window: int | None = None


def attention_cost(q_lens: Sequence[int], kv_lens: Sequence[int], shape: AttentionShape) -> Cost:
    """One layer's `ragged_paged_attention`, its write of the new rows included.

    Args:
        q_lens: queries of each sequence.
        kv_lens: tokens of each sequence, the new ones included.

    Live keys and values are read once a sequence, however many queries and heads share them; those of the
    new tokens come as arguments and go to the pool. q is read and the output written once. Each query is
    multiplied with the keys it sees, and its weights with their values.
    """
    s, num_new, num_read, num_pairs = shape, 0, 0, 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        if not 0 <= q_len <= kv_len:
            raise ValueError(f"{q_len} queries cannot be the last of {kv_len} tokens")
        num_new += q_len
        old = kv_len - q_len
        # The first query sees the most of the old tokens: the window less itself.
        num_read += (old if s.window is None else min(old, s.window - 1)) if q_len else 0
        num_pairs += _seen_pairs(q_len, kv_len, s.window)
    q_and_out = num_new * s.num_q_heads * (s.k_dim + s.v_dim) * s.q_bytes
    pool_reads = num_read * s.num_kv_heads * s.kv_dim * s.kv_bytes
    flops = 2 * num_pairs * s.num_q_heads * (s.k_dim + s.v_dim)
    return Cost(q_and_out + pool_reads, flops) + kv_write_cost(num_new, shape)


def _seen_pairs(q_len: int, kv_len: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees; query i of q_len is token kv_len - q_len + i."""
    first, last = kv_len - q_len + 1, kv_len  # keys that the first and the last query see without a window
    if window is None or last <= window:
        return (first + last) * q_len // 2
    num_short = max(0, min(q_len, window - first))  # queries that see less than the window
    return num_short * (2 * first + num_short - 1) // 2 + (q_len - num_short) * window


def kv_write_cost(num_tokens: int, shape: AttentionShape) -> Cost:
    """Reading new rows of K and V, and writing them into the pool."""
    return Cost(num_tokens * shape.num_kv_heads * shape.kv_dim * (shape.q_bytes + shape.kv_bytes))


def matmul_cost(
    m: int, k: int, n: int, *, x_bytes: float = 2, weight_bytes: float = 2, out_bytes: float = 2
) -> Cost:
    """[m, k] @ [k, n]; the bytes are those of an element (int4: 0.5)."""
    return Cost(m * k * x_bytes + k * n * weight_bytes + m * n * out_bytes, 2 * m * k * n)


def grouped_matmul_cost(
    group_sizes: Sequence[int], k: int, n: int, *, x_bytes: float = 2, weight_bytes: float = 2
) -> Cost:
    """Rows of each group times the group's own [k, n]; a group without rows is not read."""
    costs = (
        matmul_cost(m, k, n, x_bytes=x_bytes, weight_bytes=weight_bytes, out_bytes=x_bytes)
        for m in group_sizes
        if m
    )
    return sum(costs, Cost())


def link_seconds(num_bytes: float, chip: Chip) -> float:
    """The least time for a device to send so many bytes to its peers."""
    return num_bytes / chip.link_bandwidth
