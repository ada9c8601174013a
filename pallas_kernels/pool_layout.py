"""The layout of the KV pool: one array for all layers.

    kv_pool [num_layers, num_pages, num_kv_heads, 2, page_size, head_dim]     axis 3: 0 is K, 1 is V

A page holds one head's K as a [page_size, head_dim] tile, which a matrix unit takes as it is, and a page of
one layer is contiguous, so that one copy fetches it whole. The head axis stands alone so that a mesh can
split it. The whole pool is handed to a kernel with the layer's index: slicing a layer out would copy it.
Page 0 is never allocated: padding reads and writes go there.
"""

from __future__ import annotations

import math

import numpy as np

HEAD_AXIS = 2


def pool_shape(
    num_layers: int, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int
) -> tuple[int, int, int, int, int, int]:
    return (num_layers, num_pages, num_kv_heads, 2, page_size, head_dim)


def page_bytes(num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: np.dtype) -> int:
    """Bytes of one page over all layers."""
    return math.prod(pool_shape(num_layers, 1, num_kv_heads, page_size, head_dim)) * np.dtype(dtype).itemsize
