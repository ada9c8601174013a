"""Probes, models, version, metrics: the routes that never touch the engine's queue."""

from __future__ import annotations

from typing import Any

from aiohttp import web

import jaxserve
from jaxserve_server.config import ServerConfig
from jaxserve_server.lifecycle import Phase
from jaxserve_server.metrics import CONTENT_TYPE
from jaxserve_server.middleware import Handler, open_to_all
from jaxserve_server.state import STATE, ServerState
from jaxserve_server.workers import off_loop


def open_by_flag(config: ServerConfig) -> tuple[Handler, ...]:
    """The handlers that this configuration opens to all."""
    return (metrics,) if config.metrics_without_key else ()


def _probe(request: web.Request, good: bool) -> web.Response:
    phase = request.app[STATE].lifecycle.phase
    return web.json_response({"status": phase.value}, status=200 if good else 503)


@open_to_all
async def health(request: web.Request) -> web.Response:
    """Liveness: 503 asks for a restart, which helps only against a dead engine."""
    return _probe(request, request.app[STATE].lifecycle.phase is not Phase.DEAD)


@open_to_all
async def ready(request: web.Request) -> web.Response:
    """Readiness: whether a request sent now would be admitted."""
    return _probe(request, request.app[STATE].lifecycle.phase is Phase.READY)


@open_to_all
async def startup(request: web.Request) -> web.Response:
    """Whether weights are loaded and programs compiled; stays 200 while draining."""
    return _probe(request, request.app[STATE].lifecycle.phase in (Phase.READY, Phase.DRAINING))


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": jaxserve.__version__})


async def metrics(request: web.Request) -> web.Response:
    page = await off_loop(0, request.app[STATE].metrics.page)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})


def _card(state: ServerState, name: str) -> dict[str, Any]:
    engine = state.lifecycle.engine()
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxserve",
        "root": engine.model_name,
        "parent": None,
        "max_model_len": engine.max_model_len,
        "permission": [],
    }


async def list_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return web.json_response({"object": "list", "data": [_card(state, name) for name in state.model_names]})


async def get_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return web.json_response(_card(state, state.model_name(request.match_info["id"])))
