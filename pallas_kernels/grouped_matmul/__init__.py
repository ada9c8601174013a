"""Rows sorted by group, each times its own group's matrix: the products of a mixture of experts."""

from pallas_kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
