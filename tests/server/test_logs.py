"""Log lines: what is in them, that every line of a request carries its id, and that nobody forges one."""

import asyncio
import io
import json
import logging
import sys
import time

import pytest
from aiohttp import ClientError, web
from conftest import running
from fake_engine import FakeEngine

from jaxserve_server.config import ServerConfig
from jaxserve_server.errors import ApiError
from jaxserve_server.logs import JsonFormatter, TextFormatter, configure_logging

HOSTILE = 'x\n2026-01-01 00:00:00 INFO    forged\r\x1b[2K\u2028"} {"level": "info", "message": "forged"}'
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def lines(monkeypatch):
    """What a server that logs requests writes, line by line, in the format that is asked for."""
    stream = io.StringIO()
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level

    def configured(log_format):
        monkeypatch.setattr(sys, "stderr", stream)
        configure_logging(log_format)
        return lambda: stream.getvalue().split("\n")[:-1]

    yield configured
    root.handlers[:] = kept
    root.setLevel(level)


def record(message="request", exc_info=None, **fields):
    made = logging.LogRecord("jaxserve_server", logging.INFO, __file__, 1, message, None, exc_info)
    made.fields = fields
    return made


def raised(message):
    try:
        raise ValueError(message)
    except ValueError:
        return sys.exc_info()


def test_a_json_line_is_one_object_whatever_the_texts_hold():
    line = JsonFormatter().format(
        record(HOSTILE, raised(HOSTILE), level="forged", ts="forged", model=HOSTILE)
    )
    assert len(line.splitlines()) == 1
    assert line.isascii()
    assert not any(ord(character) < 32 for character in line)
    found = json.loads(line)
    assert found["message"] == found["model"] == HOSTILE
    assert (found["level"], found["logger"]) == ("info", "jaxserve_server")
    assert found["ts"].endswith("+00:00")
    assert HOSTILE in found["exception"]


def test_a_text_line_cannot_be_forged():
    first, *rest = TextFormatter().format(record(HOSTILE, raised(HOSTILE), model=HOSTILE)).split("\n")
    assert first.count("INFO") == 3  # its own level, and two that are quoted
    assert rest
    assert all(line.startswith("    ") for line in rest)
    whole = "".join([first, *rest])
    assert not any(character in whole for character in "\r\x1b\u2028")


@pytest.mark.parametrize("zone", ["UTC", "America/Lima", "Asia/Kathmandu"])
def test_every_line_has_its_time_in_utc(monkeypatch, zone):
    made = record()
    made.created = 1767225599.25
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert TextFormatter().format(made).startswith("2025-12-31 23:59:59Z INFO ")
        assert json.loads(JsonFormatter().format(made))["ts"] == "2025-12-31T23:59:59.250+00:00"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_values_with_spaces_are_quoted_in_text_lines():
    line = TextFormatter().format(record(status=200, error='a "b" status=500'))
    assert line.endswith(r' request status=200 error="a \"b\" status=500"')


@pytest.mark.parametrize("stream", [False, True])
async def test_a_requests_line_has_counts_reasons_and_times(lines, stream):
    written = lines("json")
    async with running(FakeEngine(), ServerConfig(log_requests=True, log_format="json")) as api:
        body = {"prompt": ["a secret prompt", "b"], "n": 2, "max_tokens": 3, "stream": stream}
        headers = {"X-Request-Id": "mine", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        async with api.http.post("/v1/completions", json=body, headers=headers) as response:
            answer = await response.text()
    (line,) = map(json.loads, written())
    assert line["request_id"] == "mine"
    assert line["trace_id"] == TRACE
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["model"] == "fake"
    assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (16 + 2, 12, 0)
    assert line["finish_reasons"] == "length,length,length,length"
    assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["seconds"]
    assert line.keys() >= {"ts", "level", "logger", "message"}
    assert "secret" not in "".join(written())
    assert answer


async def test_a_request_that_its_client_left_is_logged_as_far_as_it_came(lines):
    written = lines("json")
    engine = FakeEngine(pause_after=3)
    async with running(engine, ServerConfig(log_requests=True)) as api:
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.3):
                await api.events("/v1/completions", prompt="hi", max_tokens=50)
        while engine.streams:
            await asyncio.sleep(0.01)
    line = json.loads(written()[-1])
    assert line["error"] == "cancelled"
    assert line["completion_tokens"] == 3
    assert line["status"] == "disconnected"


@pytest.mark.parametrize(
    ("failure", "status", "counted"),
    [
        (RuntimeError("a bug"), "error", "5xx"),
        (ApiError(500, "the engine failed"), "error", "5xx"),
        (ConnectionResetError("gone"), "disconnected", "disconnected"),
    ],
)
async def test_an_answer_that_breaks_off_is_an_error_unless_its_client_left(lines, failure, status, counted):
    written = lines("json")

    async def breaks(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        raise failure

    async with running(FakeEngine(), ServerConfig(log_requests=True)) as api:
        route = next(
            r
            for r in api.http.server.app.router.routes()
            if (r.method, r.resource.canonical) == ("GET", "/docs")
        )
        route._handler = breaks
        with pytest.raises((ClientError, ConnectionError)):
            async with api.http.get("/docs") as response:
                await response.read()
        async with api.http.get("/metrics") as response:
            page = await response.text()
    found = [line for line in map(json.loads, written()) if line.get("route") == "/docs"]
    assert [line["status"] for line in found] == [status]
    assert f'handler="/docs",method="GET",model_name="fake",status="{counted}"}} 1.0' in page


async def test_every_line_that_a_request_causes_carries_its_id(lines):
    """Also one from a thread that works for it."""
    written = lines("json")
    engine = FakeEngine()
    encode = engine.tokenizer.encode

    def warned(*args, **kwargs):
        logging.getLogger("jaxserve.tokenizer").warning("from a thread")
        return encode(*args, **kwargs)

    def fail(*args, **kwargs):
        raise RuntimeError("a bug")

    engine.tokenizer.encode = warned
    engine.add_request = fail
    async with running(engine) as api:
        for name in ("one", "two"):
            headers = {"X-Request-Id": name}
            async with api.http.post("/v1/completions", json={"prompt": "x"}, headers=headers) as response:
                assert response.status == 500
        logging.getLogger("jaxserve").warning("about nobody")
    found = [(line.get("request_id"), line["message"]) for line in map(json.loads, written())]
    assert found == [
        ("one", "from a thread"),
        ("one", "a request failed"),
        ("two", "from a thread"),
        ("two", "a request failed"),
        (None, "about nobody"),
    ]


@pytest.mark.parametrize("log_format", ["json", "text"])
async def test_nothing_that_a_client_sends_makes_a_line_of_its_own(lines, log_format):
    written = lines(log_format)
    engine = FakeEngine()

    def fail(*args, **kwargs):
        raise RuntimeError(HOSTILE)

    async with running(engine, ServerConfig(log_requests=True)) as api:
        headers = {
            "X-Request-Id": 'a" b\u2028c',
            "User-Agent": "agent\ttab",
            "traceparent": "00-" + "x" * 32 + "-y-01",
        }
        for body in ({"prompt": "x", "model": HOSTILE}, {"prompt": HOSTILE}, {"prompt": "x", HOSTILE: 1}):
            async with api.http.post("/v1/completions", json=body, headers=headers):
                pass
        async with api.http.get("/%0a2026-01-01 00:00:00 INFO forged", headers=headers):
            pass
        engine.add_request = fail
        async with api.http.post("/v1/completions", json={"prompt": "x"}, headers=headers):
            pass
    starts = [line for line in written() if not line.startswith("    ")]
    assert len(starts) == 6  # five requests, and the failure of one
    if log_format == "json":
        assert [json.loads(line)["message"] for line in starts].count("request") == 5
    else:
        assert all(line[:4].isdigit() and "forged" not in line[:60] for line in starts)
    assert "agent" not in "".join(written())
