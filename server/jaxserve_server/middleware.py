"""What happens around every handler: request ids, keys, CORS, errors in one shape, the request log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from jaxserve_server.access import API_KEY, ApiKey, find_key
from jaxserve_server.connection import SERVER, check_header
from jaxserve_server.errors import ApiError, no_such_path, to_api_error
from jaxserve_server.limits import LIMITS
from jaxserve_server.logs import current_request_id
from jaxserve_server.state import STATE

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("jaxserve_server.access")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST_ID = web.RequestKey("request_id", str)
_ARRIVAL_TIME = web.RequestKey("arrival_time", float)
_IS_ANSWERED = web.RequestKey("is_answered", bool)
_LOG_FIELDS = web.RequestKey("log_fields", dict[str, Any])
_OPEN_ATTRIBUTE = "_jaxserve_open"
_PAGE_ATTRIBUTE = "_jaxserve_page"

_EXPOSED_HEADERS = (
    "X-Request-Id, Retry-After, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    "x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-tokens"
)
_ACCEPTABLE_ID = re.compile(r"[!-~]{1,128}")
_ACCEPTABLE_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


def open_to_all(handler: Handler) -> Handler:
    """Marks a handler that answers without a key (probes)."""
    setattr(handler, _OPEN_ATTRIBUTE, True)
    return handler


def is_open(handler: Any) -> bool:
    """Whether the handler answers without a key."""
    return getattr(handler, _OPEN_ATTRIBUTE, False)


def opened_in_browsers(handler: Handler) -> Handler:
    """Marks a page: a browser that comes without a key is made to ask its user for one."""
    setattr(handler, _PAGE_ATTRIBUTE, True)
    return handler


def request_id_of(request: web.Request) -> str:
    return request[_REQUEST_ID]


def arrival_time_of(request: web.Request) -> float:
    """When its head had been read, of `time.monotonic`."""
    return request[_ARRIVAL_TIME]


def route_of(request: web.Request) -> str | None:
    """The pattern that its path matched, never the path itself."""
    return getattr(request.match_info.route.resource, "canonical", None)


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
    start = request[_ARRIVAL_TIME] = time.monotonic()
    in_logs = current_request_id.set(request[_REQUEST_ID])
    status: int | None = None
    is_broken = False  # an answer that had begun and that we could not end
    try:
        try:
            check_header(request)
            # Not request.host, which asks the resolver for this machine's name where there is no header.
            host = request.headers.get("Host")
            if host and not _ACCEPTABLE_HOST.fullmatch(host):
                raise ApiError(400, "the Host header is not valid")
            response = await handler(request)
        except Exception as error:
            if request.get(_IS_ANSWERED, False):
                is_broken = not isinstance(error, ConnectionError)
                raise _broken_off(request, error) from error
            response = _error_response(request, error)
        status = response.status
        return response
    except asyncio.CancelledError:
        # aiohttp cancels the handler of a connection that is gone.
        state.metrics.disconnected()
        raise
    finally:
        seconds = time.monotonic() - start
        counted = 500 if is_broken else status
        state.metrics.http_ended(route_of(request), request.method, counted, seconds)
        if state.config.log_requests:
            logged = request[_LOG_FIELDS]
            fields = {
                "request_id": request[_REQUEST_ID],
                "method": request.method,
                "route": route_of(request) or "-",
                "status": "error" if is_broken else "disconnected" if status is None else status,
                "seconds": round(seconds, 3),
                **logged,
            }
            access_logger.info("request", extra={"fields": fields})
        current_request_id.reset(in_logs)


def _broken_off(request: web.Request, error: Exception) -> ConnectionResetError:
    """For an answer that is half out: only its breaking off tells the client."""
    is_bug = not isinstance(error, ConnectionError | ApiError)
    level = logging.ERROR if is_bug else logging.INFO
    logger.log(level, "an answer was broken off: %s", error, exc_info=error if is_bug else None)
    if request.transport is not None:
        request.transport.abort()
    return ConnectionResetError("the answer was broken off")


def _error_response(request: web.Request, error: Exception) -> web.Response:
    if isinstance(error, web.HTTPNotFound):
        prefix = request.app[STATE].config.root_path.rstrip("/")
        answer = no_such_path(request.path.removeprefix(prefix))
    else:
        answer = to_api_error(error)
    key = request.get(API_KEY)
    reason = answer.code or str(answer.status)
    request.app[STATE].metrics.rejected(reason, "" if key is None else key.name)
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
                "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
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


def authenticate(keys: Sequence[ApiKey], also_open: Container[Handler] = ()) -> Any:
    """Middleware: one of `keys` opens every path but those whose handler is marked open or in `also_open`.

    Decided on the matched route: a path that matches none asks for a key too.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        matched = request.match_info.handler
        if keys and not is_open(matched) and matched not in also_open:
            try:
                key = find_key(keys, request.headers.get("Authorization", ""))
            except ApiError as error:
                if getattr(matched, _PAGE_ATTRIBUTE, False) and "text/html" in request.headers.get(
                    "Accept", ""
                ):
                    # A line of its own: browsers do not look for a second scheme in one.
                    error.headers = CIMultiDict(error.headers)
                    error.headers.add("WWW-Authenticate", 'Basic realm="jaxserve", charset="UTF-8"')
                raise
            request[API_KEY] = key
            log_fields(request, api_key=key.name)
        return await handler(request)

    return middleware


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal before headers go out, of streams too."""
    request[_IS_ANSWERED] = True
    response.headers["Server"] = SERVER  # not the names and versions of what it is made of
    request_id = request.get(_REQUEST_ID)
    if request_id is not None:
        response.headers["X-Request-Id"] = request_id
    limits = request.get(LIMITS)
    if limits is not None:
        response.headers.update(limits.headers())
    allowed = request.app[STATE].config.allowed_origins
    if allowed and "*" not in allowed:
        response.headers["Vary"] = "Origin"  # without an origin too: a cache would give that answer to all
    origin = _allowed_origin(request)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED_HEADERS
