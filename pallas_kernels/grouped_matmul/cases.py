"""Named shapes, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """sizes: rows of each group; `padding_rows` more belong to none."""

    name: str
    sizes: tuple[int, ...]
    padding_rows: int = 0
    in_features: int = 24
    out_features: int = 40


CASES: tuple[Case, ...] = (
    Case("one group", sizes=(5,)),
    Case("one row", sizes=(0, 0, 1, 0)),
    Case("groups without rows at both ends and between", sizes=(0, 3, 0, 0, 9, 1, 0)),
    Case("all rows in the last group", sizes=(0, 0, 17)),
    Case("rows of no group", sizes=(4, 0, 11, 2), padding_rows=8),
    Case("no group has a row", sizes=(0, 0, 0), padding_rows=6),
    Case("groups longer than a tile", sizes=(70, 3, 41, 0, 0, 0, 0, 90)),
    Case("groups that end on tiles", sizes=(8, 16, 8, 0, 32)),
)


@dataclass(frozen=True)
class ModelShape:
    """An expert layer of a published model; the rows are its tokens times the experts of each."""

    name: str
    num_experts: int
    experts_per_token: int
    in_features: int
    out_features: int


# Sources: the models' config.json (hidden_size, moe_intermediate_size, num_experts, num_experts_per_tok).
MODEL_SHAPES: tuple[ModelShape, ...] = (
    ModelShape("Qwen3-30B-A3B gate or up", 128, 8, 2048, 768),
    ModelShape("Qwen3-30B-A3B down", 128, 8, 768, 2048),
    ModelShape("Mixtral-8x7B gate or up", 8, 2, 4096, 14336),
)
