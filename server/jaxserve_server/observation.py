"""What is known of one generation request when it has ended: for its log line and its trace."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from jaxserve.outputs import RequestMetrics, RequestOutput
from jaxserve.pooling import PoolingParams
from jaxserve.sampling_params import SamplingParams
from jaxserve_server.middleware import arrival_time_of, log_fields, request_id_of, route_of
from jaxserve_server.state import STATE

# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)


def _trace_id(traceparent: str) -> str | None:
    """The trace that a caller's `traceparent` header names; None for a header that is not well formed."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return None if match is None else match.group(1)


def trace_headers(request: web.Request) -> dict[str, str]:
    """The caller's `traceparent` and `tracestate`, those that it sent; a state may come in several lines."""
    given = {name: ",".join(request.headers.getall(name, ())) for name in ("traceparent", "tracestate")}
    return {name: value for name, value in given.items() if value}


@contextmanager
def observed(
    request: web.Request, operation: str, model: str, params: SamplingParams | PoolingParams
) -> Iterator[Observation]:
    """What the block sees of a request goes to its log line and its trace, however the block ends."""
    seen = Observation(
        request_id=request_id_of(request),
        operation=operation,
        route=route_of(request) or "",
        model=model,
        params=params,
        arrival_time=arrival_time_of(request),
        trace_headers=trace_headers(request),
    )
    try:
        yield seen
    finally:
        tracer = request.app[STATE].tracer
        seen.trace_id = seen.trace_id if tracer is None else tracer.record(seen)
        log_fields(request, **seen.log_fields())


@dataclass
class Observation:
    """The newest output of every prompt of one request, and how it ended."""

    request_id: str
    operation: str  # chat, text_completion, embeddings
    route: str
    model: str
    params: SamplingParams | PoolingParams
    arrival_time: float  # of time.monotonic, as all times here
    trace_headers: dict[str, str]  # traceparent and tracestate, those that the caller sent
    trace_id: str | None = field(init=False)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)  # by the prompt's index
    error: str | None = None

    def __post_init__(self) -> None:
        self.trace_id = _trace_id(self.trace_headers.get("traceparent", ""))

    async def watch(
        self, outputs: AsyncGenerator[tuple[int, RequestOutput]]
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """The same outputs, seen as they pass."""
        try:
            async for index, output in outputs:
                self.outputs[index] = output
                yield index, output
        except (asyncio.CancelledError, GeneratorExit):
            if not self.is_finished:
                self.error = "cancelled"  # the client left, or a time limit passed
            raise
        except Exception as error:
            self.error = type(error).__name__
            raise

    @property
    def is_finished(self) -> bool:
        return bool(self.outputs) and all(output.finished for output in self.outputs.values())

    @property
    def times(self) -> list[RequestMetrics]:
        return [output.metrics for output in self.outputs.values()]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs.values())

    @property
    def cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.outputs.values())

    @property
    def completion_tokens(self) -> int:
        return sum(c.num_tokens for output in self.outputs.values() for c in output.outputs)

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that have ended, in their order."""
        reasons = [c.finish_reason for _, output in sorted(self.outputs.items()) for c in output.outputs]
        return [reason for reason in reasons if reason is not None]

    @property
    def queue_seconds(self) -> float | None:
        """How long the prompt that waited longest stood in the queue."""
        waits = [
            times.first_scheduled_time - times.queued_time
            for times in self.times
            if times.first_scheduled_time is not None and times.queued_time is not None
        ]
        return max(waits, default=None)

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival to the first token of any choice."""
        firsts = [times.first_token_time for times in self.times if times.first_token_time is not None]
        return min(firsts) - self.arrival_time if firsts else None

    def log_fields(self) -> dict[str, Any]:
        """Counts, reasons and times in seconds; never texts."""
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "finish_reasons": ",".join(self.finish_reasons),
        }
        for name, seconds in (
            ("queue_seconds", self.queue_seconds),
            ("ttft_seconds", self.first_token_seconds),
        ):
            if seconds is not None:
                fields[name] = round(seconds, 4)
        for name, text in (("trace_id", self.trace_id), ("error", self.error)):
            if text is not None:
                fields[name] = text
        return fields
