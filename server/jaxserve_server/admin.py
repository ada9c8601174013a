"""The admin listener: what only the machine's own operator may do, on a port of the loopback interface."""

from __future__ import annotations

import dataclasses
import platform
import re
import time
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiohttp import web

import jaxserve
from jaxserve_server import body, connection, system
from jaxserve_server.access import API_KEY, ApiKey
from jaxserve_server.errors import ApiError
from jaxserve_server.middleware import add_headers, authenticate, outermost
from jaxserve_server.state import STATE, ServerState

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
HOST = "127.0.0.1"

_SECRETS = frozenset({"api_key"})
_USER_OF_URL = re.compile("//[^/@]*@")
_PACKAGES = ("jax", "jaxlib", "numpy", "aiohttp", "tokenizers")
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def create_admin_app(state: ServerState) -> web.Application:
    """The application of the admin listener, beside the public one whose state it shares."""
    known = authenticate(state.keys, system.open_by_flag(state.config))
    app = web.Application(middlewares=[outermost, _from_this_machine, known, _admins_only])
    app[STATE] = state
    app.on_response_prepare.append(add_headers)
    app.add_routes(
        [
            web.get("/health", system.health),
            web.get("/ready", system.ready),
            web.get("/startup", system.startup),
            web.get("/metrics", system.metrics),
            web.get("/version", system.version),
            web.get("/server_info", server_info),
            web.post("/reset_prefix_cache", reset_prefix_cache),
        ]
    )
    return app


@web.middleware
async def _from_this_machine(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses what a web page makes a browser of this machine send, also under a name that it points here."""
    name = request.headers.get("Host", "").rpartition(":")
    host = name[0] if name[0] and name[2].isdigit() else "".join(name)
    if host.lower() not in _LOOPBACK_NAMES or "Origin" in request.headers:
        raise ApiError(403, "the admin listener answers programs of this machine alone", code="forbidden")
    return await handler(request)


@web.middleware
async def _admins_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses the keys of tenants; without keys, and for the probes, nobody is asked for one."""
    key = request.get(API_KEY)
    if key is not None and not key.is_admin:
        raise ApiError(403, "this key may not use the admin listener", code="forbidden")
    return await handler(request)


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget what is cached; running requests keep what they use."""
    await request.app[STATE].lifecycle.engine().reset_prefix_cache()
    return web.json_response({"status": "ok"})


async def server_info(request: web.Request) -> web.Response:
    """What was configured and what runs, without keys and salts."""
    state = request.app[STATE]
    engine = state.metrics.engine  # None while it loads; still told of when it is dead
    return web.json_response(
        {
            "version": jaxserve.__version__,
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in _PACKAGES},
            "phase": state.lifecycle.phase.value,
            "uptime_seconds": round(time.time() - state.created, 1),
            "served_model_names": state.model_names,
            "server": _without_secrets(state),
            "keys": [_key_json(key) for key in state.keys],
            "limits": {
                "body_bytes": body.MAX_BODY_BYTES,
                "json_depth": body.MAX_DEPTH,
                "header_bytes": connection.MAX_HEADER_BYTES,
                "headers": connection.MAX_HEADERS,
                "header_seconds": connection.HEADER_SECONDS,
                "idle_seconds": connection.IDLE_SECONDS,
            },
            "engine": None if engine is None else engine.describe(),
        }
    )


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _without_secrets(state: ServerState) -> dict[str, Any]:
    fields = dataclasses.asdict(state.config)
    if state.config.otlp_traces_endpoint is not None:
        fields["otlp_traces_endpoint"] = _USER_OF_URL.sub("//", state.config.otlp_traces_endpoint)
    return {name: value for name, value in fields.items() if name not in _SECRETS}


def _key_json(key: ApiKey) -> dict[str, Any]:
    return {
        "name": key.name,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "concurrency": key.concurrency,
        "is_admin": key.is_admin,
        "has_cache_salt": key.cache_salt is not None,
    }
