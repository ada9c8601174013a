"""Server-sent events, for one reader who may be slow or gone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

SLOW_READER_SECONDS = 30.0
_encode = json.JSONEncoder(separators=(",", ":")).encode  # ASCII only: every reader splits lines alike


_TURN_BYTES = 16 * 1024  # some dozens of events: a millisecond or two


class SlowReaderError(ConnectionError):
    """The client did not read for too long."""


def framed(event: bytes) -> bytes:
    """An event, from its JSON, which must be ASCII and one line."""
    return b"data: %b\n\n" % event


class EventStream:
    """A response whose events go out as they are made.

    A write waits when the client does not read (aiohttp holds at most 64 KiB for it, and meanwhile the
    engine's outputs coalesce); a client that does not read for `patience` seconds is cut off.
    """

    def __init__(self, request: web.Request, patience: float = SLOW_READER_SECONDS) -> None:
        self._request = request
        self._patience = patience
        self._since_turn = 0  # bytes written since others had their turn
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, event: dict[str, Any]) -> None:
        await self.send_frames(framed(_encode(event).encode("ascii")))

    async def send_frames(self, frames: bytes) -> None:
        """Whole events, as `framed` makes them."""
        await self._write(frames)
        self._since_turn += len(frames)
        if self._since_turn > _TURN_BYTES:
            # A write waits only for a reader who is slow.
            self._since_turn = 0
            await asyncio.sleep(0)

    async def done(self) -> None:
        await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        await write(self._request, self.response, data, self._patience)


async def write(request: web.Request, response: web.StreamResponse, data: bytes, patience: float) -> None:
    """Send a piece of a response; raises SlowReaderError, its connection cut, after `patience` seconds."""
    try:
        async with asyncio.timeout(patience):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise SlowReaderError("the client did not read") from None
