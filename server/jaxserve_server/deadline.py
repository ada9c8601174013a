"""How long a request may take, whether it waits, runs or is read slowly; what is over time is aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from jaxserve_server.errors import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_TIMEOUT = web.RequestKey("timeout", asyncio.Timeout)


def limit_time(seconds: float | None) -> Any:
    """Middleware: a request that is not answered in `seconds` gets a 504; None is no limit."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        async with _within(asyncio.timeout(seconds)) as timeout:
            request[_TIMEOUT] = timeout
            return await handler(request)

    return middleware


@asynccontextmanager
async def rest_of_time(request: web.Request) -> AsyncIterator[None]:
    """For a stream: the same deadline, but the 504 is raised by this block, to be sent as an event.

    A request may enter one such block; what follows it has no deadline.
    """
    whole = request[_TIMEOUT]
    deadline = whole.when()
    whole.reschedule(None)
    async with _within(asyncio.timeout_at(deadline)):
        yield


@asynccontextmanager
async def _within(timeout: asyncio.Timeout) -> AsyncIterator[asyncio.Timeout]:
    try:
        async with timeout:
            yield timeout
    except TimeoutError:
        if not timeout.expired():
            raise
        message = "the request took longer than this server allows and was stopped"
        raise ApiError(504, message, code="request_timeout") from None
