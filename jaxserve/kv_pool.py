"""How many pages the pool gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from pallas_kernels.pool_layout import page_bytes, pool_shape, row_dim


@dataclass(frozen=True)
class PoolSpec:
    """Shape and size of the page pool."""

    shape: tuple[int, int, int, int, int]  # see pallas_kernels.pool_layout
    dtype: np.dtype
    hidden_size: int  # of the model whose keys and values it holds

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


def default_page_size(max_model_len: int) -> int:
    """16 above 8k of context, else context / 16 clamped to 16..256, but at most 32 so that prefixes match
    finely."""
    return 16 if max_model_len > 8192 else max(16, min(32, max_model_len // 16))


def plan_pool(
    config: ModelConfig,
    *,
    dtype: np.dtype,
    page_size: int,
    num_pages: int | None,
    budget_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    platform: str = "cpu",
) -> PoolSpec:
    """The pool: `num_pages` if given, else what the budget holds; never more than can be used.

    Raises ConfigError when that is too small for a single token.
    """
    row = row_dim(2 * config.head_dim, platform)
    each = page_bytes(config.num_layers, config.num_kv_heads, page_size, row, dtype)
    useful = max_num_seqs * -(-max_model_len // page_size) + 1
    num_pages = min(budget_bytes // each if num_pages is None else num_pages, useful)
    if num_pages < 2:
        raise ConfigError(
            f"the KV pool would have {num_pages} pages of {each:,} bytes; it needs 2 or more "
            "(raise --kv-cache-memory or --memory-utilization, or lower --page-size)"
        )
    shape = pool_shape(config.num_layers, num_pages, config.num_kv_heads, page_size, row)
    return PoolSpec(shape, np.dtype(dtype), config.hidden_size)
