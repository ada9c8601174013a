"""What the tests of compiled kernels share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from pallas_kernels.native import library

# The native kernels' libraries are kept for the next run, beside compiled programs.
NATIVE_CACHE = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).parent / "native"


@pytest.fixture
def no_cached_programs() -> Iterator[None]:
    """Compile anew: a program read back prints no figures, and one for an absent device cannot be read."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.fixture(params=library.ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set of the native kernels that this processor has; its library is loaded."""
    return _load_or_skip(request.param)


@pytest.fixture
def load_isa() -> Callable[[str], str]:
    """Loads the library of an instruction set, or skips the test."""
    return _load_or_skip


def _load_or_skip(name: str) -> str:
    if name not in library.processor_isas():
        pytest.skip(f"this processor has no {name}")
    try:
        library.load(name, NATIVE_CACHE)
    except library.BuildError as error:
        if os.environ.get("REQUIRE_COMPILERS"):
            raise
        pytest.skip(str(error))
    return name
