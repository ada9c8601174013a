"""Writing a step's keys and values into the page pool."""

from pallas_kernels.kv_write.api import write_kv

__all__ = ["write_kv"]
