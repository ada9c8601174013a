"""JSON that is too much to be made, encoded or sent at once: that would hold up everybody else."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any

from aiohttp import web

from jaxserve_server.sse import SLOW_READER_SECONDS, write
from jaxserve_server.state import STATE
from jaxserve_server.workers import for_answer

logger = logging.getLogger(__name__)

_ITEMS = 64  # of a list, encoded at once: each may have the log-probabilities of a position
_BATCH_BYTES = 64 * 1024
_dumps = json.JSONEncoder(separators=(",", ":")).encode


def encoded(value: Any) -> Iterator[bytes]:
    """The JSON of `value` in pieces, each quick to make: a thread that makes them lets others run between."""
    if isinstance(value, dict) and value:
        opening = "{"
        for key, item in value.items():
            yield f"{opening}{_dumps(str(key))}:".encode("ascii")
            yield from encoded(item)
            opening = ","
        yield b"}"
    elif isinstance(value, list) and len(value) > _ITEMS:
        for start in range(0, len(value), _ITEMS):
            yield (b"," if start else b"[") + _dumps(value[start : start + _ITEMS])[1:-1].encode("ascii")
        yield b"]"
    else:
        yield _dumps(value).encode("ascii")


async def made_on_threads(pieces: Iterable[bytes]) -> AsyncGenerator[bytes]:
    """The pieces, some joined to one; only making one of them keeps a thread for long."""
    left = iter(pieces)

    def batch() -> bytes:
        made, size = [], 0
        for piece in left:
            made.append(piece)
            size += len(piece)
            if size >= _BATCH_BYTES:
                break
        return b"".join(made)

    while made := await for_answer(batch):
        yield made


async def answered(request: web.Request, pieces: Sequence[bytes]) -> web.StreamResponse:
    """The response whose JSON body is these pieces; where they are many, they have been sent."""
    size = sum(map(len, pieces))
    if size <= _BATCH_BYTES:
        return web.Response(body=b"".join(pieces), content_type="application/json")
    response = web.StreamResponse()
    response.content_type = "application/json"
    response.content_length = size
    try:
        await response.prepare(request)
        for piece in pieces:
            await write(request, response, piece, SLOW_READER_SECONDS)
        await response.write_eof()
    except ConnectionError as error:
        logger.info("an answer ended early: %s", error)
        request.app[STATE].metrics.disconnected()
    return response
