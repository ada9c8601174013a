"""The layout of the KV pool: one array for all layers.

    kv_pool [num_layers, num_pages, num_kv_heads, page_size, row_dim]

A row is one token's K followed by its V, so that a head of 64 fills a TPU's 128 lanes with both, K and V come
with one copy, and a page of one layer is contiguous. In latent form (multi-head latent attention) a row is K
alone, and V is its first part. On TPUs rows are filled up with zeros to whole lanes: their memory is padded
to that anyway, and an unpadded array would be kept transposed, and copied for every kernel. The head axis
stands alone so that a mesh can split it. The whole pool is handed to a kernel with the layer's index: slicing
a layer out would copy it. Page 0 is never allocated: padding reads and writes go there.
"""

from __future__ import annotations

import math

import numpy as np

HEAD_AXIS = 2
TPU_LANES = 128


def pool_shape(
    num_layers: int, num_pages: int, num_kv_heads: int, page_size: int, row_dim: int
) -> tuple[int, int, int, int, int]:
    return (num_layers, num_pages, num_kv_heads, page_size, row_dim)


def row_dim(kv_dim: int, platform: str) -> int:
    """Elements of a row that holds `kv_dim` of them."""
    return -(-kv_dim // TPU_LANES) * TPU_LANES if platform == "tpu" else kv_dim


def page_bytes(num_layers: int, num_kv_heads: int, page_size: int, row_dim: int, dtype: np.dtype) -> int:
    """Bytes of one page over all layers."""
    return math.prod(pool_shape(num_layers, 1, num_kv_heads, page_size, row_dim)) * np.dtype(dtype).itemsize
