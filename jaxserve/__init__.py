"""jaxserve: a JAX/XLA inference engine for large language models.

Names load on first use, so that the scheduler's side and the server's modules can be imported without jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "jaxserve.llm",
    "AsyncLLMEngine": "jaxserve.async_engine",
    "EngineArgs": "jaxserve.engine_args",
    "SamplingParams": "jaxserve.sampling_params",
    "PoolingParams": "jaxserve.pooling",
    "RequestOutput": "jaxserve.outputs",
    "CompletionOutput": "jaxserve.outputs",
}
__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
]

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine
    from jaxserve.engine_args import EngineArgs
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, RequestOutput
    from jaxserve.pooling import PoolingParams
    from jaxserve.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
