"""What happens around every handler: request ids, keys, CORS, errors in one shape, the request log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from jaxserve_server.errors import ApiError, to_api_error
from jaxserve_server.state import STATE

access_logger = logging.getLogger("jaxserve_server.access")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST_ID = web.RequestKey("request_id", str)
_LOG_FIELDS = web.RequestKey("log_fields", dict[str, Any])
_OPEN_ATTRIBUTE = "_jaxserve_open"

_ACCEPTABLE_ID = re.compile(r"[!-~]{1,128}")
_ACCEPTABLE_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


def open_to_all(handler: Handler) -> Handler:
    """Marks a handler that answers without a key (probes)."""
    setattr(handler, _OPEN_ATTRIBUTE, True)
    return handler


def log_fields(request: web.Request, **fields: Any) -> None:
    """Add fields to the request's log line; counts and reasons, never texts."""
    known = request[_LOG_FIELDS]
    known.update(fields)


@web.middleware
async def outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request its id, turns every exception into an error body, writes the log line."""
    state = request.app[STATE]
    given = request.headers.get("X-Request-Id", "")
    request[_REQUEST_ID] = given if _ACCEPTABLE_ID.fullmatch(given) else uuid.uuid4().hex
    request[_LOG_FIELDS] = {}
    start = time.monotonic()
    status: int | str = "disconnected"
    try:
        try:
            if request.host and not _ACCEPTABLE_HOST.fullmatch(request.host):
                raise ApiError(400, "the Host header is not valid")
            response = await handler(request)
        except Exception as error:
            response = _error_response(request, error)
        status = response.status
        return response
    except asyncio.CancelledError:
        # aiohttp cancels the handler of a connection that is gone.
        state.metrics.disconnected()
        raise
    finally:
        if state.config.log_requests:
            logged = request[_LOG_FIELDS]
            fields = {
                "request_id": request[_REQUEST_ID],
                "method": request.method,
                "route": getattr(request.match_info.route.resource, "canonical", "-"),
                "status": status,
                "seconds": round(time.monotonic() - start, 3),
                **logged,
            }
            access_logger.info("request", extra={"fields": fields})


def _error_response(request: web.Request, error: Exception) -> web.Response:
    answer = to_api_error(error)
    request.app[STATE].metrics.rejected(answer.code or str(answer.status))
    return web.json_response(answer.body(), status=answer.status, headers=answer.headers)


@web.middleware
async def cross_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers a browser's preflight for the allowed origins; those carry no key."""
    if (
        request.method == "OPTIONS"
        and "Access-Control-Request-Method" in request.headers
        and _allowed_origin(request) is not None
    ):
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
                "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
                "Access-Control-Max-Age": "600",
            },
        )
    return await handler(request)


def _allowed_origin(request: web.Request) -> str | None:
    allowed = request.app[STATE].config.allowed_origins
    if "*" in allowed:
        return "*"
    origin = request.headers.get("Origin")
    return origin if origin in allowed else None


def authenticate(keys: tuple[bytes, ...]) -> Any:
    """Middleware: one of `keys` opens every path but those whose handler is marked open."""
    digests = [hashlib.sha256(key).digest() for key in keys]

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if digests and not getattr(request.match_info.handler, _OPEN_ATTRIBUTE, False):
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
            # All keys are compared, and digests of one length: the time tells nothing.
            matches = [hmac.compare_digest(digest, given) for digest in digests]
            if scheme.lower() != "bearer" or not any(matches):
                raise ApiError(
                    401,
                    "a valid API key is needed: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        return await handler(request)

    return middleware


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal before headers go out, of streams too."""
    request_id = request.get(_REQUEST_ID)
    if request_id is not None:
        response.headers["X-Request-Id"] = request_id
    origin = _allowed_origin(request)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        if origin != "*":
            response.headers["Vary"] = "Origin"
