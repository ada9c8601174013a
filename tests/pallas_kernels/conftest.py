"""What the tests of compiled kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def no_cached_programs() -> Iterator[None]:
    """Compile anew: a program read back prints no figures, and one for an absent device cannot be read."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
