"""OpenTelemetry traces: one server span for each generation request, with its queue, prefill and decode.

A request's spans are made when it has ended, from the times that the engine noted, and handed to a thread
that exports them in batches. Serving never waits for the exporter: what it cannot take is dropped.
`opentelemetry` is imported only where traces are asked for.

Attributes follow OpenTelemetry's semantic conventions for generative AI; `gen_ai.latency.*` (seconds),
`gen_ai.request.id`, `gen_ai.request.n` and `gen_ai.usage.{prompt,completion}_tokens` are named as vLLM does.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from jaxserve.errors import ConfigError
from jaxserve.outputs import RequestMetrics
from jaxserve.pooling import PoolingParams
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from jaxserve_server.observation import Observation

_EXPORT_SECONDS = 5.0  # for one attempt to send a batch
_PROMPTS_WITH_PHASES = 16  # of one request: a span takes some thirty microseconds
_FLUSH_SECONDS = 2.0  # what the end of the server waits for the last spans


class Tracer:
    """Makes the spans of ended requests and sends them through `exporter`."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # OTEL_SERVICE_NAME goes first.
        name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "jaxserve"}
        self._provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxserve")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, seen: Observation) -> str:
        """Make the spans of a request that ends now; returns the id of its trace.

        Of many prompts only the first 16 get the spans of their phases: the event loop waits meanwhile.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        wall = time.time_ns() - time.monotonic_ns()

        def nanoseconds(monotonic: float) -> int:
            return wall + int(monotonic * 1e9)

        span = self._tracer.start_span(
            f"{seen.operation} {seen.model}",
            context=self._propagator.extract(seen.trace_headers),  # a malformed header is as none
            kind=SpanKind.SERVER,
            attributes=_attributes(seen),
            start_time=nanoseconds(seen.arrival_time),
        )
        if seen.error is not None:
            span.set_status(Status(StatusCode.ERROR, seen.error))
        context = set_span_in_context(span)
        for index, output in sorted(seen.outputs.items())[:_PROMPTS_WITH_PHASES]:
            for name, start, end in _phases(output.metrics):
                phase = self._tracer.start_span(
                    name, context, attributes={"jaxserve.prompt": index}, start_time=nanoseconds(start)
                )
                phase.end(nanoseconds(end))
        span.end(nanoseconds(time.monotonic()))
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Send what is left, for two seconds at most; a collector that hangs does not hold the exit up."""
        closing = threading.Thread(target=self._provider.shutdown, name="flush-traces", daemon=True)
        closing.start()
        closing.join(_FLUSH_SECONDS)


def otlp_tracer(endpoint: str) -> Tracer:
    """Sends spans as OTLP over HTTP to `endpoint`, such as http://collector:4318/v1/traces.

    Raises ConfigError where OpenTelemetry is not installed, or the address is none.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_traces_endpoint must be an http or https URL, not {endpoint!r}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError("traces need OpenTelemetry: pip install '.[otel]' in a clone") from error
    return Tracer(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS))


def _phases(times: RequestMetrics) -> list[tuple[str, float, float]]:
    """(name, start, end) of those that have ended; of a request cut off, also of the one it was in."""
    now = time.monotonic()
    bounds = (
        ("queue", times.queued_time, times.first_scheduled_time),
        ("prefill", times.first_scheduled_time, times.first_token_time),
        ("decode", times.first_token_time, times.last_token_time),
    )
    end_of_all = times.finished_time or now
    return [(name, start, end or end_of_all) for name, start, end in bounds if start is not None]


def _attributes(seen: Observation) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": seen.operation,
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.id": seen.request_id,
        "gen_ai.request.model": seen.model,
        "gen_ai.response.model": seen.model,
        "gen_ai.usage.input_tokens": seen.prompt_tokens,
        "gen_ai.usage.output_tokens": seen.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": seen.cached_tokens,
        "gen_ai.usage.prompt_tokens": seen.prompt_tokens,
        "gen_ai.usage.completion_tokens": seen.completion_tokens,
        "gen_ai.response.finish_reasons": seen.finish_reasons,
        "gen_ai.latency.time_in_queue": seen.queue_seconds,
        "gen_ai.latency.time_to_first_token": seen.first_token_seconds,
        "gen_ai.latency.e2e": time.monotonic() - seen.arrival_time,
        "http.route": seen.route,
        "error.type": seen.error,
        **_asked(seen.params),
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _asked(params: SamplingParams | PoolingParams) -> dict[str, Any]:
    if isinstance(params, PoolingParams):
        return {"gen_ai.embeddings.dimension.count": params.dimensions}
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n,
    }
