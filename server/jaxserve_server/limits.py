"""Limits of a key: requests a minute, tokens a minute, requests at once.

Both rates are token buckets: a bucket holds a minute's worth, begins full, and fills evenly, so that after a
pause a minute's budget may be spent at once, and in the long run no more than the rate. A request takes one
from the bucket of requests. Tokens are charged when they are known, the prompt when it is admitted and the
output when the request ends, however it ends; the bucket may fall below zero, and nothing is admitted until
it has refilled above zero. A request that is refused costs nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from aiohttp import web

from jaxserve_server.access import API_KEY, ApiKey
from jaxserve_server.errors import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Clock = Callable[[], float]  # seconds, monotonic
H = TypeVar("H", bound=Callable[..., Any])

_MINUTE = 60.0
_SPENDS_NO_TOKENS = "_jaxserve_spends_no_tokens"


def spends_no_tokens(handler: H) -> H:
    """Marks a POST handler that a spent budget of tokens does not stop."""
    setattr(handler, _SPENDS_NO_TOKENS, True)
    return handler


class Bucket:
    """`per_minute` units, filling evenly; the level may go below zero."""

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._seen = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        gained = (now - self._seen) * self.per_minute / _MINUTE
        self._level = min(self._level + gained, float(self.per_minute))
        self._seen = now
        return self._level

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        """How long until that level is reached, when nothing is taken meanwhile."""
        return max(0.0, (level - self.level) * _MINUTE / self.per_minute)


class KeyLimits:
    """What one key has left."""

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic) -> None:
        requests, tokens = key.requests_per_minute, key.tokens_per_minute
        self.requests = Bucket(requests, clock) if requests is not None else None
        self.tokens = Bucket(tokens, clock) if tokens is not None else None
        self._concurrency = key.concurrency
        self._num_running = 0

    def admit(self, *, spends_tokens: bool) -> None:
        """Count a request, which `release` must follow; raises a 429, which costs nothing."""
        if self._concurrency is not None and self._num_running >= self._concurrency:
            most = self._concurrency
            raise _refusal(f"this key may have {most} request{'s' * (most > 1)} running at once", 0.0)
        if spends_tokens and self.tokens is not None and self.tokens.level <= 0:
            wait = self.tokens.seconds_until(0.0)
            raise _refusal(f"this key's {self.tokens.per_minute} tokens a minute are spent", wait)
        if self.requests is not None:
            if self.requests.level < 1:
                wait = self.requests.seconds_until(1.0)
                raise _refusal(f"this key's {self.requests.per_minute} requests a minute are spent", wait)
            self.requests.take(1)
        self._num_running += 1

    def release(self) -> None:
        self._num_running -= 1

    def headers(self) -> dict[str, str]:
        """The headers of OpenAI's API; `reset` is the time until the whole minute's budget is back."""
        headers = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{name}"] = _duration(bucket.seconds_until(bucket.per_minute))
        return headers


def _refusal(message: str, wait: float) -> ApiError:
    # A second is the least that the header can say; at a level of exactly zero nothing is admitted yet.
    headers = {"Retry-After": str(math.floor(wait) + 1)}
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    shown = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{shown}s" if minutes else f"{shown}s"


LIMITS = web.RequestKey("limits", KeyLimits)


def limit(keys: Iterable[ApiKey], clock: Clock = time.monotonic) -> Any:
    """Middleware: holds every POST to its key's limits, before its body is read."""
    limits = {key.name: KeyLimits(key, clock) for key in keys}

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        key = request.get(API_KEY)
        is_unknown = request.match_info.http_exception is not None  # no such path or method
        if key is None or request.method != "POST" or is_unknown:
            return await handler(request)
        of_key = request[LIMITS] = limits[key.name]
        of_key.admit(spends_tokens=not hasattr(request.match_info.handler, _SPENDS_NO_TOKENS))
        try:
            return await handler(request)
        finally:
            of_key.release()

    return middleware


def counts_tokens(request: web.Request) -> bool:
    """Whether somebody wants to know of tokens before the request is finished."""
    limits = request.get(LIMITS)
    return limits is not None and limits.tokens is not None


def charge_tokens(request: web.Request, count: int) -> None:
    """Take tokens that were used from the key's budget."""
    limits = request.get(LIMITS)
    if limits is not None and limits.tokens is not None:
        limits.tokens.take(count)
