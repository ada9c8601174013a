"""Named batch shapes, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """rows: (queries, tokens) of each sequence."""

    name: str
    rows: tuple[tuple[int, int], ...]
    empty_rows: int = 0
    padding_tokens: int = 0
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    num_layers: int = 2
    layer: int = 1


CASES: tuple[Case, ...] = (
    Case("one prompt", rows=((37, 37),)),
    Case("one token", rows=((1, 1),)),
    Case("decodes of ragged lengths", rows=((1, 1), (1, 16), (1, 17), (1, 200), (1, 63))),
    Case("many blocks in one row", rows=((1, 1500),), page_size=32),
    Case("more items than a loop step takes", rows=((1, 300),) * 24, page_size=8),
    Case("mixed", rows=((1, 40), (1, 7), (20, 20), (33, 90), (2, 65)), padding_tokens=5, empty_rows=3),
    Case("a decode behind a prompt", rows=((19, 19), (1, 30), (70, 70), (1, 3))),
    Case("a chunk of a long context", rows=((65, 700), (64, 64), (130, 131)), page_size=32),
    Case(
        "grouped heads that are no power of two",
        rows=((9, 9), (1, 80)),
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
    ),
    Case("one key-value head", rows=((5, 29), (1, 12)), num_q_heads=4, num_kv_heads=1, head_dim=16),
    Case(
        "as many key-value heads as heads",
        rows=((5, 29), (1, 12)),
        num_q_heads=3,
        num_kv_heads=3,
        head_dim=80,
    ),
    Case("pages of 8", rows=((1, 9), (12, 23)), page_size=8),
    Case("pages of 128", rows=((1, 129), (140, 300)), page_size=128),
    Case("pages of 256", rows=((1, 257), (3, 255)), page_size=256),
)
