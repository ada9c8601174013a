"""Writing new keys and values into the paged pool."""

from pallas_kernels.kv_write.api import kv_rows, locate_tokens, write_kv

__all__ = ["kv_rows", "locate_tokens", "write_kv"]
