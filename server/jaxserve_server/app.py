"""The application: routes, middlewares and what they share, put together in one place."""

from __future__ import annotations

import asyncio

from aiohttp import web

from jaxserve_server import pages, system
from jaxserve_server.access import read_keys
from jaxserve_server.body import MAX_BODY_BYTES
from jaxserve_server.chat import chat_completions
from jaxserve_server.completions import completions
from jaxserve_server.config import ServerConfig
from jaxserve_server.deadline import limit_time
from jaxserve_server.embeddings import embeddings
from jaxserve_server.lifecycle import Lifecycle
from jaxserve_server.limits import limit, spends_no_tokens
from jaxserve_server.metrics import Metrics
from jaxserve_server.middleware import add_headers, authenticate, cross_origin, outermost
from jaxserve_server.openapi import DOCUMENT, Document, openapi_json
from jaxserve_server.state import STATE, ServerState
from jaxserve_server.tokens import detokenize, tokenize, tokenizer_info
from jaxserve_server.tracing import otlp_tracer


def create_app(config: ServerConfig, lifecycle: Lifecycle, model_names: tuple[str, ...]) -> web.Application:
    """The application over an engine that `lifecycle` owns; it answers from the first moment on."""
    keys = read_keys(config)
    app = web.Application(
        middlewares=[
            outermost,
            cross_origin,
            authenticate(keys, system.open_by_flag(config)),
            limit(keys),
            limit_time(config.request_timeout),
        ],
        client_max_size=MAX_BODY_BYTES,
    )
    tracer = None if config.otlp_traces_endpoint is None else otlp_tracer(config.otlp_traces_endpoint)
    app[STATE] = ServerState(config, model_names, lifecycle, Metrics(model_names[0]), tracer, keys)
    app.on_cleanup.append(_flush_traces)
    app[DOCUMENT] = Document(app)
    app.on_response_prepare.append(add_headers)
    for prefix in dict.fromkeys(("", config.root_path.rstrip("/"))):
        app.add_routes(
            [
                web.get(f"{prefix}/", pages.playground),
                web.get(f"{prefix}/docs", pages.docs),
                web.get(f"{prefix}/openapi.json", openapi_json),
                web.get(f"{prefix}/health", system.health),
                web.get(f"{prefix}/ready", system.ready),
                web.get(f"{prefix}/startup", system.startup),
                web.get(f"{prefix}/version", system.version),
                web.get(f"{prefix}/metrics", system.metrics),
                web.get(f"{prefix}/v1/models", system.list_models),
                web.get(f"{prefix}/v1/models/{{id:.+}}", system.get_model),
                web.post(f"{prefix}/v1/completions", completions),
                web.post(f"{prefix}/v1/chat/completions", chat_completions),
                web.post(f"{prefix}/v1/embeddings", embeddings),
                web.post(f"{prefix}/tokenize", spends_no_tokens(tokenize)),
                web.post(f"{prefix}/detokenize", spends_no_tokens(detokenize)),
                web.get(f"{prefix}/tokenizer_info", tokenizer_info),
            ]
        )
    return app


async def _flush_traces(app: web.Application) -> None:
    tracer = app[STATE].tracer
    if tracer is not None:
        await asyncio.to_thread(tracer.close)
