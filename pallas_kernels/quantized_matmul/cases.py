"""Named shapes, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """group_size None: one group, a scale per output channel."""

    name: str
    num_tokens: int
    in_features: int
    out_features: int
    group_size: int | None
    bits: int = 4
    zeros: bool = False


CASES: tuple[Case, ...] = (
    Case("one token", 1, 256, 128, 128),
    Case("groups of 32", 5, 256, 64, 32),
    Case("groups of 64 with zero points", 9, 256, 192, 64, zeros=True),
    Case("groups of 128 with zero points", 33, 512, 256, 128, zeros=True),
    Case("per channel", 7, 256, 128, None),
    Case("int8 per channel", 40, 256, 320, None, bits=8),
    Case("int8 in groups with zero points", 3, 256, 128, 64, bits=8, zeros=True),
    Case("ragged tokens and channels", 130, 256, 200, 128),
    Case("several tiles of tokens and channels", 300, 256, 640, 128, zeros=True),
)

# Llama-3-8B's projections; the first is the reference for static figures. Source: the model's config.json.
REAL_CASES: tuple[Case, ...] = tuple(
    Case(f"Llama-3-8B {name}, {tokens} tokens", tokens, width_in, width_out, group_size, bits)
    for name, width_in, width_out, group_size, bits in (
        ("gate int4 g128", 4096, 14336, 128, 4),
        ("down int4 g128", 14336, 4096, 128, 4),
        ("gate int8 per channel", 4096, 14336, None, 8),
    )
    for tokens in (1, 32, 512)
)
