"""Reading a JSON body: kind, size, encoding and shape are checked before anything looks inside.

A body of megabytes is decoded and validated on a thread. The decoder is one C call that keeps the
interpreter's lock, so what it may meet is counted before: the limits below keep it under a tenth of a second.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TypeVar

import pydantic_core
from aiohttp import web

from jaxserve_server.errors import ApiError
from jaxserve_server.protocol import Body, parse
from jaxserve_server.state import STATE
from jaxserve_server.workers import SHORT_BYTES, off_loop

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
MAX_VALUES = 512 * 1024  # elements of all lists and objects together: token ids above all
MAX_PARTS = 128 * 1024  # strings (keys too), lists and objects together: twenty thousand messages and more
IDLE_SECONDS = 10.0  # between two pieces of a body
READ_SECONDS = 60.0  # for the whole body

BODY_BYTES = web.RequestKey("body_bytes", int)  # how long the body was

_PIECE_BYTES = 64 * 1024
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BACKSLASHES = re.compile(rb"\\*")
_OPENING = frozenset(b"[{")

BodyT = TypeVar("BodyT", bound=Body)


async def read_body(request: web.Request, kind: type[BodyT]) -> BodyT:
    """The validated body.

    NaN and Infinity, lone surrogates and anything else that is not JSON are refused. Raises ApiError with the
    status that fits, and InvalidRequestError with the name of the field that is wrong.
    """
    if request.content_type != "application/json":
        raise ApiError(400, "the Content-Type must be application/json")
    if (request.charset or "utf-8").lower().replace("_", "-") not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(400, "the body must be UTF-8")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(400, "a Content-Encoding is not accepted")
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _too_large()
    raw = await _receive(request)
    request[BODY_BYTES] = len(raw)
    most = request.app[STATE].config.max_stop_strings
    if len(raw) <= SHORT_BYTES:
        return _decode(kind, raw, most)
    return await off_loop(len(raw), _decode, kind, raw, most)


async def _receive(request: web.Request) -> bytes:
    """The raw body, which has to keep coming."""
    raw = bytearray()
    end = time.monotonic() + READ_SECONDS
    try:
        while True:
            async with asyncio.timeout(min(IDLE_SECONDS, end - time.monotonic())):
                piece = await request.content.readany()  # all that is there; nothing at the end
            if not piece:
                return bytes(raw)
            raw += piece
            if len(raw) > MAX_BODY_BYTES:  # chunks do not say how many will come
                raise _too_large()
    except TimeoutError:
        raise ApiError(408, "the request body did not arrive in time", code="body_timeout") from None


def _too_large() -> ApiError:
    return ApiError(413, f"the request body is larger than {MAX_BODY_BYTES} bytes")


def _decode(kind: type[BodyT], raw: bytes, max_stop_strings: int) -> BodyT:
    check_shape(raw)
    try:
        data = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    return parse(kind, data, max_stop_strings)


def check_shape(raw: bytes) -> None:
    """Counts what a JSON text holds; raises ApiError over MAX_DEPTH, MAX_VALUES or MAX_PARTS.

    Only counts: whether it is JSON the decoder finds out. Never a long C call.
    """
    depth = values = parts = 0
    is_inside = False  # a string
    start = 0
    while start < len(raw):
        end = start + _PIECE_BYTES
        if raw[end - 1 : end] == b"\\":  # a backslash and what it escapes stay together
            end = _BACKSLASHES.match(raw, end).end() + 1  # type: ignore[union-attr]
        # Every quote that is left begins or ends a string.
        texts = raw[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        start = end
        outside = b"".join(texts[is_inside::2])
        is_inside ^= len(texts) % 2 == 0
        values += outside.count(b",")
        parts += len(texts) // 2 + outside.count(b"[") + outside.count(b"{")
        if values >= MAX_VALUES or parts > MAX_PARTS:
            raise ApiError(
                400,
                f"the body holds too much: at most {MAX_VALUES} elements of lists and objects, "
                f"and at most {MAX_PARTS} strings, lists and objects",
            )
        for bracket in outside.translate(None, _NOT_BRACKETS):
            depth += 1 if bracket in _OPENING else -1
            if depth > MAX_DEPTH:
                raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep")
