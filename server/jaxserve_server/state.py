"""What every handler can reach, under one typed key of the application."""

from __future__ import annotations

import textwrap
import time
from dataclasses import dataclass, field

from aiohttp import web

from jaxserve_server.access import ApiKey
from jaxserve_server.config import ServerConfig
from jaxserve_server.errors import ApiError
from jaxserve_server.lifecycle import Lifecycle
from jaxserve_server.metrics import Metrics
from jaxserve_server.tracing import Tracer


@dataclass
class ServerState:
    """The parts of one server."""

    config: ServerConfig
    model_names: tuple[str, ...]  # the first is the default
    lifecycle: Lifecycle
    metrics: Metrics
    tracer: Tracer | None = None
    keys: tuple[ApiKey, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch

    def model_name(self, asked: str) -> str:
        """The served name a request means; raises a 404 for one that is not served."""
        if not asked:
            return self.model_names[0]
        if asked not in self.model_names:
            served = textwrap.shorten(", ".join(self.model_names), 256, placeholder=" ...")
            message = f"the model {asked[:256]!r} does not exist here; served: {served}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return asked


STATE = web.AppKey("state", ServerState)
