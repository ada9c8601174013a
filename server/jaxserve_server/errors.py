"""Errors on the wire: `{"error": {"message", "type", "param", "code"}}`, whatever went wrong and wherever."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from jaxserve.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
)

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer that is an error; raised anywhere in a handler."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers: Mapping[str, str] = headers or {}

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_HTTP_MESSAGES = {
    404: "there is no such path",
    405: "this path does not take that method",
    413: "the request body is too large",
}
_CHAT = "/v1/chat/completions"
_ADMIN = "only the admin listener (--admin-port) serves this path"
_LORA = "this server does not support LoRA adapters"
_SLEEP = "this server does not support sleeping"
# Paths that clients of other servers ask for: a bare 404 would look like a wrong address.
_NOT_SERVED = {
    "/v1/responses": f"this server does not serve /v1/responses yet: use {_CHAT}",
    "/v1/messages": f"this server does not serve /v1/messages yet: use {_CHAT}",
    "/v1/messages/count_tokens": "this server does not serve /v1/messages/count_tokens yet: use /tokenize",
    "/v1/score": "this server does not serve /v1/score",
    "/v1/rerank": "this server does not serve /v1/rerank",
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
    "/sleep": _SLEEP,
    "/wake_up": _SLEEP,
    "/reset_prefix_cache": _ADMIN,
    "/server_info": _ADMIN,
}


def no_such_path(path: str) -> ApiError:
    """The 404 for a path that matches no route; one that other servers have says what is the matter."""
    message = _NOT_SERVED.get("/v1/responses" if path.startswith("/v1/responses/") else path)
    if message is None:
        return ApiError(404, _HTTP_MESSAGES[404])
    return ApiError(404, message, code="not_supported")


def to_api_error(error: BaseException) -> ApiError:
    """Any exception as the answer that a client may see: no paths, no tracebacks, no internals."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.param)
        case QueueFullError():
            # A place is free as soon as any request ends; clients' own back-off does the rest.
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
        case EngineClosedError():
            # Only a shutdown closes it: another server may be there soon.
            message = "the server is shutting down and the request was not finished"
            return ApiError(503, message, code="draining", headers={"Retry-After": "5"})
        case EngineDeadError():
            return ApiError(500, "the engine stopped before the request was finished", code="engine_dead")
        case web.RequestPayloadError():
            return ApiError(400, "the request body is not valid: its chunks or its length are wrong")
        case web.HTTPException():
            message = _HTTP_MESSAGES.get(error.status, error.reason.lower())
            headers = {k: v for k, v in error.headers.items() if k == "Allow"}
            return ApiError(error.status, message, headers=headers)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal server error", code="internal_error")
