"""Activations times a weight of 4 or 8 bit integers with scales, never made whole in floating point."""

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.weight import QuantizedWeight, dequantize, pack

__all__ = ["QuantizedWeight", "dequantize", "pack", "quantized_matmul"]
