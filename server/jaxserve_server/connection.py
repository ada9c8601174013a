"""One client's connection: the header's size and deadline, and errors that no handler ever sees.

aiohttp answers what is not HTTP by itself, in plain text or HTML. Here those answers have the shape of all
others, and a client that sends its header byte by byte is cut off. aiohttp has no public place for this: what
is used of its inside is used in this file alone, and tests/server/test_raw_http.py fails when it moves.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import BadHttpMessage, BadHttpMethod, InvalidHeader, InvalidURLError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from jaxserve_server.errors import ApiError, to_api_error
from jaxserve_server.state import STATE

MAX_HEADER_BYTES = 16 * 1024  # the request line and all fields together
MAX_HEADERS = 100
SERVER = "jaxserve"  # the Server header
HEADER_SECONDS = (
    10.0  # from the first byte of a header (the connection's start for the first one) to its last
)
IDLE_SECONDS = 75.0  # between two requests of a connection

Rejected = Callable[[str], None]  # is told why


def create_runner(app: web.Application, *, header_seconds: float = HEADER_SECONDS) -> web.AppRunner:
    """The runner with the settings that the server relies on."""
    return _Runner(
        app,
        rejected=app[STATE].metrics.rejected,
        header_seconds=header_seconds,
        handler_cancellation=True,  # a client that leaves cancels its handler, which frees its pages
        access_log=None,
        auto_decompress=False,  # a Content-Encoding is refused, never unpacked
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        keepalive_timeout=IDLE_SECONDS,
        shutdown_timeout=1.0,  # requests have drained before the runner is cleaned up
        logger=logging.getLogger("jaxserve_server.http"),
    )


def check_header(request: web.Request) -> None:
    """Raises for a complete header that aiohttp takes and we do not: its limits of size are per line."""
    if request.version not in (HttpVersion10, HttpVersion11):
        raise ApiError(400, "the protocol must be HTTP/1.0 or HTTP/1.1", code="invalid_http")
    size = len(request.path_qs) + sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    if size > MAX_HEADER_BYTES:
        raise _header_too_large()


def _header_too_large() -> ApiError:
    message = f"the request line and headers are larger than {MAX_HEADER_BYTES} bytes"
    return ApiError(431, message, code="header_too_large")


class Listener(web.TCPSite):
    """A port. Clients have as long for TLS as for a header; aiohttp leaves them asyncio's minute."""

    __slots__ = ()

    async def start(self) -> None:
        await web.BaseSite.start(self)
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,  # type: ignore[arg-type]
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=None if self._ssl_context is None else HEADER_SECONDS,
        )


class _Runner(web.AppRunner):
    __slots__ = ()

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server())


class _Server(web.Server):
    """The server that `web.AppRunner` made, with connections of our kind."""

    def __init__(self, made: web.Server) -> None:
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Connection(web.RequestHandler):
    """Parses requests and runs their handlers, one after the other."""

    __slots__ = ("_body", "_header_bytes", "_header_seconds", "_header_timer", "_is_refused", "_rejected")

    def __init__(
        self, server: web.Server, *, rejected: Rejected, header_seconds: float, **settings: Any
    ) -> None:
        super().__init__(server, **settings)
        self._rejected = rejected
        self._header_seconds = header_seconds
        self._header_bytes = 0  # of a header that is not complete yet
        self._header_timer: asyncio.TimerHandle | None = None
        self._body: StreamReader = EMPTY_PAYLOAD  # of the newest request
        self._is_refused = False  # nothing that comes now is looked at

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        was_in_body = not self._body.is_eof()
        num_known = len(self._messages)
        super().data_received(data)
        if len(self._messages) > num_known:
            self._stop_header_timer()
            message, body = self._messages[-1]
            if not isinstance(message, _ErrInfo):
                self._body = body
                return
            self._is_refused = True
            if was_in_body:  # bad chunks: whoever reads the body is told, not left waiting
                self._body.set_exception(web.RequestPayloadError("the body is not valid"))
        elif data and not was_in_body:
            self._start_header_timer()
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(_header_too_large())

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self._loop.call_later(self._header_seconds, self._on_late_header)

    def _stop_header_timer(self) -> None:
        self._header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_late_header(self) -> None:
        self._header_timer = None
        if self._header_bytes == 0:
            self.force_close()  # opened and never used
        else:
            message = f"the request's header did not arrive within {self._header_seconds:g} seconds"
            self._refuse(ApiError(408, message, code="header_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error`, after the requests that came before, and close."""
        self._stop_header_timer()
        self._is_refused = True
        self._messages.append((_ErrInfo(error.status, error, str(error)), EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _handle_request(
        self, request: web.BaseRequest, start_time: float | None, request_handler: Any
    ) -> tuple[web.StreamResponse, bool]:
        async def handler(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await request_handler(request)
            except web.HTTPException as error:  # from before the middlewares, such as a strange Expect
                return self._answer(to_api_error(error))

        return await super()._handle_request(request, start_time, handler)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is not HTTP, and to a handler that failed outside all middlewares."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is out already")
        if isinstance(exc, BadHttpMessage):
            answer = _parse_error(exc)
        else:
            answer = to_api_error(exc or RuntimeError(f"status {status} without a reason"))
        response = self._answer(answer)
        response.force_close()
        return response

    def _answer(self, error: ApiError) -> web.Response:
        self._rejected(error.code or str(error.status))
        headers = {**error.headers, "X-Request-Id": uuid.uuid4().hex, "Server": SERVER}
        return web.json_response(error.body(), status=error.status, headers=headers)


def _parse_error(error: BadHttpMessage) -> ApiError:
    """What the parser found, without what the client sent."""
    match error:
        case LineTooLong():
            return _header_too_large()
        case BadHttpMethod():
            message = "the request line does not begin with a known method"
        case InvalidURLError():
            message = "the request's target is not a valid URL"
        case InvalidHeader():
            message = "a header is not valid"
        case _ if type(error) is BadHttpMessage:  # its first line is the parser's own sentence
            message = "the request is not valid HTTP: " + error.message.splitlines()[0].rstrip(".:")
        case _:
            message = "the request is not valid HTTP"
    return ApiError(400, message, code="invalid_http")
