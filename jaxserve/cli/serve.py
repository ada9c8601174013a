"""`jaxserve serve`: the OpenAI-compatible server."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxserve.cli.command import Command, Values
from jaxserve.engine_args import EngineArgs

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine


@dataclass
class ServedEngineArgs(EngineArgs):
    """An engine's settings where strangers fill its queue: that has an end, so that memory has one."""

    max_queue: int | None = field(
        default=1024,
        metadata={
            **EngineArgs.__dataclass_fields__["max_queue"].metadata,
            "help": "requests that may wait beside those that run; one more is refused with a 429",
        },
    )


def _groups() -> Mapping[str, type]:
    from jaxserve_server.config import ServerConfig

    return {"server": ServerConfig, "engine": ServedEngineArgs}


def run(values: Values) -> int:
    """Serve until SIGTERM or SIGINT."""
    from jaxserve_server.config import ServerConfig
    from jaxserve_server.logs import configure_logging
    from jaxserve_server.serve import serve

    config = values.make(ServerConfig)
    args = values.make(ServedEngineArgs)
    configure_logging(config.log_format)

    def load() -> AsyncLLMEngine:
        # Importing jax takes a second or two; the socket is open by now.
        from jaxserve.async_engine import AsyncLLMEngine

        engine = AsyncLLMEngine.from_engine_args(args)
        # What lives as long as the process is kept out of collections: with jax loaded, a full one would
        # hold every thread for a sixth of a second.
        gc.collect()
        gc.freeze()
        return engine

    return serve(config, load, config.served_model_name or (args.model,))


COMMAND = Command(
    name="serve",
    help="serve a model over HTTP, as OpenAI's API does",
    examples="""\
  jaxserve serve                                        the built-in model on http://127.0.0.1:8000
  jaxserve serve org/name --host 0.0.0.0 --api-key KEY
  jaxserve serve model.gguf --max-model-len 4096 --max-num-seqs 32
  JAXSERVE_PORT=9000 jaxserve serve --config serve.yaml

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "The capital of France is", "max_tokens": 8}'""",
    run=run,
    groups=_groups,
)
