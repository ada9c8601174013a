"""--request-timeout: what takes too long is answered with an error, in time, and leaves nothing behind."""

import asyncio
import json
import time

import pytest
from conftest import messages, running
from fake_engine import FakeEngine
from live import is_idle, live

from jaxserve.errors import ConfigError
from jaxserve_server.config import ServerConfig

BODIES = {
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 400},
    "/v1/chat/completions": {"messages": messages("a"), "n": 2},
}


@pytest.fixture
async def api():
    async with running(FakeEngine(), ServerConfig(request_timeout=0.2)) as api:
        yield api


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_that_takes_too_long_is_a_504(api, path):
    api.engine.pause()
    start = time.monotonic()
    async with api.http.post(path, json=BODIES[path]) as response:
        assert response.status == 504
        error = (await response.json())["error"]
    assert 0.15 < time.monotonic() - start < 2
    assert (error["code"], error["type"]) == ("request_timeout", "server_error")
    assert api.engine.streams == {}
    assert len(api.engine.aborted) == len(BODIES[path].get("prompt", [0]))
    api.engine.resume()
    assert (await api.complete("hi", max_tokens=1))["choices"]


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_takes_too_long_ends_with_an_error_event(api, path, begins):
    if not begins:
        api.engine.pause()
    async with api.http.post(path, json={**BODIES[path], "stream": True}) as response:
        assert response.status == 200
        if begins:
            await response.content.readuntil(b"\n\n")
            api.engine.pause()
        raw = await response.text()
    *_, error, done, end = raw.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert api.engine.streams == {}


async def test_requests_that_are_fast_enough_end_as_ever(api):
    for _ in range(3):
        assert (await api.complete("hi", max_tokens=3))["choices"][0]["text"] == "def"
        events = await api.events("/v1/completions", prompt="hi", max_tokens=3)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    await asyncio.sleep(0.3)  # a timer that was left behind would fire now
    assert (await api.complete("hi", max_tokens=3))["choices"][0]["text"] == "def"


async def test_a_body_that_does_not_come_counts_too(api):
    reader, writer = await asyncio.open_connection(api.http.host, api.http.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    async with asyncio.timeout(5):
        assert b" 504 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_it_is_counted_as_a_rejection(api):
    api.engine.pause()
    await api.post("/v1/completions", prompt="hi")
    async with api.http.get("/metrics") as response:
        assert 'reason="request_timeout"} 1.0' in await response.text()


@pytest.mark.parametrize("field", ["request_timeout", "step_timeout"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_is_a_positive_number(field, seconds):
    with pytest.raises(ConfigError, match=field):
        ServerConfig(**{field: seconds})


async def test_running_and_waiting_requests_of_an_engine_free_their_pages():
    config = ServerConfig(request_timeout=3.0)
    async with live("gpt2", config, max_num_seqs=2) as api:
        while (await api.post("/v1/completions", prompt="warm", max_tokens=8))[0] != 200:
            pass  # it compiles
        runner = api.engine._engine.runner
        execute = runner.execute

        def slowly(output):
            time.sleep(0.05)
            return execute(output)

        runner.execute = slowly
        body = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True}
        answers = await asyncio.gather(*(api.post("/v1/completions", **body) for _ in range(5)))
        assert {status for status, _ in answers} == {504}
        assert await is_idle(api.engine)
        runner.execute = execute
        async with asyncio.timeout(60):
            while (await api.post("/v1/completions", prompt="hi", max_tokens=2))[0] != 200:
                pass
