"""Activations in 8-bit integers times weights of 4 or 8 bits, for CPUs."""

from pallas_kernels.packed_matmul.activations import Activations, Gated, Normed, written_out
from pallas_kernels.packed_matmul.api import packed_matmul
from pallas_kernels.packed_matmul.mlp import MLPWeights, packed_mlp
from pallas_kernels.packed_matmul.weight import (
    PackedWeight,
    dequantize,
    dequantize_rows,
    pack,
    pack4,
    quantize_int8,
)

__all__ = [
    "Activations",
    "Gated",
    "MLPWeights",
    "Normed",
    "PackedWeight",
    "dequantize",
    "dequantize_rows",
    "pack",
    "pack4",
    "packed_matmul",
    "packed_mlp",
    "quantize_int8",
    "written_out",
]
