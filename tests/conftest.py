"""Settings of every test run, harsher than production.

Set through the environment before anything imports jax: the modules that must work without jax are then
tested without it. Warnings are errors (see pyproject.toml).
"""

import os
import sys
from pathlib import Path

assert "jax" not in sys.modules, "jax was imported before its test settings were made"

_cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxserve-tests" / "xla"
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    # Eight devices, so that sharded runs need no hardware.
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip(),
    # Shapes that only broadcast by accident are an error.
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    # Programs compiled by an earlier run are read back; the directory is the user's, not the project's.
    "JAX_COMPILATION_CACHE_DIR": str(_cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "agg",
}


def pytest_sessionstart() -> None:
    """Where the compilers for TPUs and GPUs must be there, a missing one is an error, no skipped test."""
    if os.environ.get("REQUIRE_COMPILERS"):
        from pallas_kernels.aot import abstract_devices

        abstract_devices("v6e")
        abstract_devices("h200")
