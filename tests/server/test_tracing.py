"""OpenTelemetry: the spans of a request, whose trace they join, and that no collector can hurt the server."""

import asyncio
import builtins
import gzip
import socket
import subprocess
import sys
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from conftest import running
from fake_engine import FakeEngine
from live import live
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxserve.errors import ConfigError
from jaxserve_server.app import create_app
from jaxserve_server.config import ServerConfig
from jaxserve_server.lifecycle import Lifecycle
from jaxserve_server.state import STATE
from jaxserve_server.tracing import Tracer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}


def traced(api):
    """The tree of spans that the server makes from now on: call it for [(root, {name: child})]."""
    exporter = InMemorySpanExporter()
    tracer = api.http.server.app[STATE].tracer = Tracer(exporter)

    def trees():
        tracer._provider.force_flush()
        spans = exporter.get_finished_spans()
        roots = [span for span in spans if span.kind is SpanKind.SERVER]
        children = {root.context.span_id: {} for root in roots}
        for span in spans:
            if span.kind is not SpanKind.SERVER:
                children[span.parent.span_id].setdefault(span.name, []).append(span)
        return [(root, children[root.context.span_id]) for root in roots]

    return trees


async def post(api, path="/v1/completions", headers=None, **body):
    async with api.http.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_server_span_with_its_phases(api, stream):
    trees = traced(api)
    before = time.time_ns()
    headers = {**HEADERS, "X-Request-Id": "mine"}
    sampling = {"temperature": 0.5, "top_p": 0.25, "seed": 7, "max_tokens": 3}
    await post(api, headers=headers, prompt="hi", n=2, stream=stream, **sampling)
    after = time.time_ns()
    ((root, children),) = trees()
    assert root.name == "text_completion fake"
    assert format(root.context.trace_id, "032x") == TRACE
    assert format(root.parent.span_id, "016x") == PARENT
    assert root.context.trace_state.get("vendor") == "value"
    assert root.status.status_code is StatusCode.UNSET
    attributes = dict(root.attributes)
    seconds = {name: attributes.pop(name) for name in list(attributes) if ".latency." in name}
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.seed": 7,
        "gen_ai.request.n": 2,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "http.route": "/v1/completions",
    }
    assert list(seconds) == [
        "gen_ai.latency.time_in_queue",
        "gen_ai.latency.time_to_first_token",
        "gen_ai.latency.e2e",
    ]
    assert list(seconds.values()) == sorted(seconds.values())
    assert set(children) == {"queue", "prefill", "decode"}
    (queue,), (prefill,), (decode,) = children["queue"], children["prefill"], children["decode"]
    assert before <= root.start_time <= queue.start_time
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert decode.start_time < decode.end_time <= root.end_time <= after
    assert prefill.end_time - root.start_time == pytest.approx(
        seconds["gen_ai.latency.time_to_first_token"] * 1e9, abs=10_000
    )


async def test_phases_are_exactly_the_engines_times():
    async with live("gpt2") as api:
        trees = traced(api)
        await post(api, prompt=["the quick brown fox", "b"], max_tokens=4, ignore_eos=True)
        ((_, children),) = trees()
        tallies = api.engine.tallies
        for name, tally in (
            ("queue", tallies.queue),
            ("prefill", tallies.prefill),
            ("decode", tallies.decode),
        ):
            spans = children[name]
            assert sorted(span.attributes["jaxserve.prompt"] for span in spans) == [0, 1]
            total = sum(span.end_time - span.start_time for span in spans) / 1e9
            assert total == pytest.approx(tally.total, abs=1e-5)


async def test_of_many_prompts_the_first_sixteen_have_phases():
    async with running(FakeEngine()) as api:
        trees = traced(api)
        await post(api, prompt=["hi"] * 40, max_tokens=2)
        ((root, children),) = trees()
    assert root.attributes["gen_ai.usage.output_tokens"] == 80
    for spans in children.values():
        assert sorted(span.attributes["jaxserve.prompt"] for span in spans) == [*range(16)]


async def test_a_chat_is_named_so(api):
    trees = traced(api)
    await post(api, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    ((root, _),) = trees()
    assert (root.name, root.attributes["http.route"]) == ("chat fake", "/v1/chat/completions")


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        "é",
    ],
)
async def test_a_malformed_traceparent_begins_a_new_trace(api, traceparent):
    trees = traced(api)
    await post(api, headers={"traceparent": traceparent}, prompt="hi", max_tokens=2)
    ((root, _),) = trees()
    assert root.parent is None
    assert format(root.context.trace_id, "032x") != TRACE


async def test_a_caller_that_does_not_sample_gets_no_spans(api):
    trees = traced(api)
    await post(api, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}, prompt="hi", max_tokens=2)
    assert trees() == []


async def test_a_request_that_is_cut_off_is_an_error_with_what_there_was():
    engine = FakeEngine(pause_after=3)
    async with running(engine) as api:
        trees = traced(api)
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.3):
                await api.events("/v1/completions", prompt="hi", max_tokens=50)
        while engine.streams:
            await asyncio.sleep(0.01)
        ((root, children),) = trees()
    assert (root.status.status_code, root.attributes["error.type"]) == (StatusCode.ERROR, "cancelled")
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert set(children) == {"queue", "prefill", "decode"}


async def test_an_engine_that_fails_is_an_error():
    async with running(FakeEngine(fail_after=2)) as api:
        trees = traced(api)
        assert (await api.post("/v1/completions", prompt="hi", max_tokens=5))[0] == 500
        ((root, _),) = trees()
    assert (root.status.status_code, root.attributes["error.type"]) == (StatusCode.ERROR, "EngineDeadError")


async def test_a_collector_gets_the_spans_that_are_left_at_the_end():
    """Over the wire, as OTLP."""
    arrived = []

    async def collect(request):
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        arrived.append(ExportTraceServiceRequest.FromString(body))
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    async with TestServer(app) as collector:
        config = ServerConfig(otlp_traces_endpoint=str(collector.make_url("/v1/traces")))
        async with running(FakeEngine(), config) as api:
            await post(api, headers=HEADERS, prompt="hi", max_tokens=2)
    (resource,) = [spans for batch in arrived for spans in batch.resource_spans]
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert names["service.name"] == "jaxserve"
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"text_completion fake", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}


class Broken(SpanExporter):
    """Raises, or never returns."""

    def __init__(self, hangs):
        self.hangs = hangs
        self.calls = 0

    def export(self, spans):
        self.calls += 1
        while self.hangs:
            time.sleep(0.05)
        raise RuntimeError("no collector")

    def shutdown(self):
        return SpanExportResult.FAILURE


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_broken_exporter_hurts_neither_requests_nor_the_end(hangs, caplog):
    exporter = Broken(hangs)
    async with running(FakeEngine()) as api:
        api.http.server.app[STATE].tracer = Tracer(exporter)
        for _ in range(600):  # more than a batch
            await post(api, prompt="hi", max_tokens=1)
        start = time.monotonic()
    assert time.monotonic() - start < 5
    assert exporter.calls
    exporter.hangs = False


async def test_a_dead_or_silent_collector_does_not_delay_the_end():
    """Nothing listens at one address; the other accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for port in (silent.getsockname()[1], closed.getsockname()[1]):
            config = ServerConfig(otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces")
            async with running(FakeEngine(), config) as api:
                start = time.monotonic()
                for _ in range(20):
                    await post(api, prompt="hi", max_tokens=2)
                assert time.monotonic() - start < 2
                start = time.monotonic()
            assert time.monotonic() - start < 5


def test_without_the_packages_the_flag_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    config = ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        create_app(config, Lifecycle(FakeEngine), ("fake",))


def test_the_endpoint_must_be_a_url():
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        create_app(ServerConfig(otlp_traces_endpoint="localhost:4317"), Lifecycle(FakeEngine), ("fake",))


def test_opentelemetry_is_not_imported_without_the_flag():
    code = (
        "import sys; from jaxserve_server.app import create_app; from jaxserve_server.config import *;"
        "from jaxserve_server.lifecycle import Lifecycle;"
        "create_app(ServerConfig(), Lifecycle(lambda: None), ('m',));"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
