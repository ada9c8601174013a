"""The application: routes, middlewares and what they share, put together in one place."""

from __future__ import annotations

import logging

from aiohttp import web

from jaxserve_server import system
from jaxserve_server.body import MAX_BODY_BYTES
from jaxserve_server.chat import chat_completions
from jaxserve_server.completions import completions
from jaxserve_server.config import ServerConfig
from jaxserve_server.lifecycle import Lifecycle
from jaxserve_server.metrics import Metrics
from jaxserve_server.middleware import add_headers, authenticate, cross_origin, outermost
from jaxserve_server.state import STATE, ServerState
from jaxserve_server.tokens import detokenize, tokenize

# aiohttp's own: the request line and each header field may have this many bytes.
MAX_HEADER_BYTES = 16 * 1024


def create_app(config: ServerConfig, lifecycle: Lifecycle, model_names: tuple[str, ...]) -> web.Application:
    """The application over an engine that `lifecycle` owns; it answers from the first moment on."""
    app = web.Application(
        middlewares=[outermost, cross_origin, authenticate(config.keys())], client_max_size=MAX_BODY_BYTES
    )
    app[STATE] = ServerState(config, model_names, lifecycle, Metrics(model_names[0]))
    app.on_response_prepare.append(add_headers)
    for prefix in dict.fromkeys(("", config.root_path.rstrip("/"))):
        app.add_routes(
            [
                web.get(f"{prefix}/health", system.health),
                web.get(f"{prefix}/ready", system.ready),
                web.get(f"{prefix}/startup", system.startup),
                web.get(f"{prefix}/version", system.version),
                web.get(f"{prefix}/metrics", system.metrics),
                web.get(f"{prefix}/v1/models", system.list_models),
                web.get(f"{prefix}/v1/models/{{id:.+}}", system.get_model),
                web.post(f"{prefix}/v1/completions", completions),
                web.post(f"{prefix}/v1/chat/completions", chat_completions),
                web.post(f"{prefix}/tokenize", tokenize),
                web.post(f"{prefix}/detokenize", detokenize),
            ]
        )
    return app


def create_runner(app: web.Application) -> web.AppRunner:
    """The runner with the settings that the server relies on."""
    return web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves cancels its handler, which frees its pages
        access_log=None,
        auto_decompress=False,  # a Content-Encoding is refused, never unpacked
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        keepalive_timeout=75.0,
        shutdown_timeout=1.0,  # requests have drained before the runner is cleaned up
        logger=logging.getLogger("jaxserve_server.http"),
    )
