"""Reading a JSON body: its kind, size, depth and encoding are checked before anything looks inside."""

from __future__ import annotations

import asyncio
from typing import Any

import pydantic_core
from aiohttp import web

from jaxserve_server.errors import ApiError

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
READ_SECONDS = 60.0  # for the whole body


async def read_json(request: web.Request) -> Any:
    """The decoded body; raises ApiError with the status that fits.

    NaN and Infinity, lone surrogates and anything else that is not JSON are refused.
    """
    if request.content_type != "application/json":
        raise ApiError(400, "the Content-Type must be application/json")
    if (request.charset or "utf-8").lower().replace("_", "-") not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(400, "the body must be UTF-8")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(400, "a Content-Encoding is not accepted")
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise ApiError(413, f"the request body is larger than {MAX_BODY_BYTES} bytes")
    try:
        async with asyncio.timeout(READ_SECONDS):
            raw = await request.read()
    except TimeoutError:
        raise ApiError(408, "the request body did not arrive in time") from None
    try:
        data = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if _deeper_than(data, MAX_DEPTH):
        raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep")
    return data


def _deeper_than(data: Any, limit: int) -> bool:
    level = [data]
    for _ in range(limit):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [
            child
            for container in containers
            for child in (container.values() if isinstance(container, dict) else container)
        ]
    return any(isinstance(item, dict | list) for item in level)
