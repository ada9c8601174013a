"""How many pages the pool gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.sharding import num_pool_heads, platform_of
from pallas_kernels.pool_layout import page_bytes, pool_shape, row_dim


@dataclass(frozen=True)
class PoolSpec:
    """Shape and size of the page pool."""

    shape: tuple[int, int, int, int, int]  # see pallas_kernels.pool_layout
    dtype: np.dtype

    @property
    def num_pages(self) -> int:
        return self.shape[1]

    @property
    def page_size(self) -> int:
        return self.shape[3]

    @property
    def num_tokens(self) -> int:
        """Tokens that fit; page 0 is reserved."""
        return (self.num_pages - 1) * self.page_size

    @property
    def num_bytes(self) -> int:
        layers, pages, heads, page_size, row = self.shape
        return pages * page_bytes(layers, heads, page_size, row, self.dtype)


# On an accelerator a page is one copy of the kernel's, and small copies cost more to start than to make.
_LEAST_COPY_BYTES = 32 * 1024
_LONGEST_DEFAULT_PAGE = 128


def default_page_size(max_model_len: int, platform: str = "cpu", token_bytes: int = 0) -> int:
    """32 for contexts of 512 to 8k, else 16: small, so that prefixes match finely.

    On an accelerator doubled, up to 128, until a layer's page on one device has 32 KiB. token_bytes: of one
    token's row of one layer on one device.
    """
    size = 32 if 512 <= max_model_len <= 8192 else 16
    if platform != "cpu":
        while size < _LONGEST_DEFAULT_PAGE and size * token_bytes < _LEAST_COPY_BYTES:
            size *= 2
    return size


def plan_pool(
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: np.dtype,
    page_size: int,
    num_pages: int | None,
    budget_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    num_pinned: int = 0,
) -> PoolSpec:
    """The pool of a mesh: `num_pages` if given, else what the budget holds; never more than can be used.

    `budget_bytes`: over all devices that share the pool. `num_pinned`: tokens of pinned prefixes.

    Raises ConfigError when that is too small for a single token.
    """
    heads, row = num_pool_heads(config, mesh), row_dim(2 * config.head_dim, platform_of(mesh))
    each = page_bytes(config.num_layers, heads, page_size, row, dtype)
    useful = max_num_seqs * -(-max_model_len // page_size) + num_pinned // page_size + 1
    num_pages = min(budget_bytes // each if num_pages is None else num_pages, useful)
    if num_pages < 2:
        raise ConfigError(
            f"the KV pool would have {num_pages} pages of {each:,} bytes; it needs 2 or more "
            "(raise --kv-cache-memory or --memory-utilization, or lower --page-size)"
        )
    shape = pool_shape(config.num_layers, num_pages, heads, page_size, row)
    return PoolSpec(shape, np.dtype(dtype))
