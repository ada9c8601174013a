"""Loading, draining, dying, leaving: what the server does around its requests."""

import asyncio
import json
import threading

import pytest
from conftest import messages, running
from fake_engine import FakeEngine

import jaxserve_server.sse


async def eventually(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def probes(api):
    statuses = []
    for path in ("/startup", "/ready", "/health"):
        async with api.http.get(path) as response:
            statuses.append(response.status)
    return statuses


async def test_probes_while_loading_ready_draining_and_dead(engine):
    gate = threading.Event()

    def load():
        gate.wait(10)
        return engine

    async with running(engine, load=load) as api:
        loading = asyncio.ensure_future(api.lifecycle.load())
        assert await probes(api) == [503, 503, 200]
        status, answer = await api.post("/v1/completions", prompt="hi")
        assert (status, answer["error"]["code"]) == (503, "loading")
        async with api.http.get("/v1/models") as response:
            assert response.status == 503
        async with api.http.get("/metrics") as response:
            assert response.status == 200
        gate.set()
        await loading
        assert await probes(api) == [200, 200, 200]

        engine.pause()
        running_request = asyncio.ensure_future(api.complete("hi", max_tokens=4))
        await eventually(lambda: engine.streams)
        draining = asyncio.ensure_future(api.lifecycle.drain(10))
        await asyncio.sleep(0)
        assert await probes(api) == [200, 503, 200]
        status, answer = await api.post("/v1/completions", prompt="hi")
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert not draining.done()
        engine.resume()
        assert (await running_request)["choices"][0]["text"] == "defg"
        await draining


async def test_requests_that_outlast_the_drain_end_with_an_error(api, engine):
    engine.pause()
    whole = asyncio.ensure_future(api.post("/v1/completions", prompt="hi"))
    stream = asyncio.ensure_future(api.events("/v1/chat/completions", messages=messages("hi")))
    await eventually(lambda: len(engine.streams) == 2)
    await api.lifecycle.drain(0.01)
    status, answer = await whole
    assert (status, answer["error"]["code"]) == (503, "draining")
    assert (await stream)[-1]["error"]["code"] == "draining"


async def test_a_dead_engine_fails_liveness(api, engine):
    died = asyncio.ensure_future(api.lifecycle.died())
    engine.die(RuntimeError("boom"))
    assert await probes(api) == [503, 503, 503]
    await asyncio.wait_for(died, 10)
    status, answer = await api.post("/v1/completions", prompt="hi")
    assert (status, answer["error"]["code"]) == (503, "dead")


async def test_what_loading_raises_comes_out(engine):
    def load():
        raise ValueError("broken")

    async with running(engine, load=load) as api:
        with pytest.raises(ValueError, match="broken"):
            await api.lifecycle.load()
        assert await probes(api) == [503, 503, 503]


async def metric(api, sample):
    async with api.http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    (value,) = [float(line.removeprefix(sample)) for line in lines if line.startswith(sample)]
    return value


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("phase", ["waiting", "generating"])
async def test_a_client_that_leaves_frees_its_requests(api, engine, path, stream, phase):
    if phase == "waiting":
        engine.pause()
    body = {"prompt": ["a", "b"], "messages": messages("a"), "max_tokens": 400, "stream": stream}
    if phase == "generating":
        body["max_tokens"] = 490
        engine.alphabet = b"x" * 26
    request = asyncio.ensure_future(api.http.post(path, json=body))
    await eventually(lambda: engine.streams)
    if stream and phase == "waiting":
        await request  # the headers are out; now the reader goes
        request.result().close()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    if stream and phase == "generating" and not request.cancelled():
        request.result().close()
    await eventually(lambda: not engine.streams)
    if phase == "waiting":
        assert len(engine.aborted) == (2 if path == "/v1/completions" else 1)
        assert await metric(api, 'jaxserve_disconnect_aborts_total{model_name="fake"}') == 1
    engine.resume()
    assert (await api.complete("hi", max_tokens=2))["choices"][0]["finish_reason"] == "length"


async def test_a_reader_that_stops_reading_is_cut_off(monkeypatch):
    monkeypatch.setattr(jaxserve_server.sse.EventStream.__init__, "__defaults__", (0.05,))
    engine = FakeEngine(max_model_len=2_000_000, alphabet=b"x")
    async with running(engine) as api:
        body = {"prompt": ["a"] * 64, "max_tokens": 1_000_000, "stream": True, "logprobs": 20}
        reader, writer = await asyncio.open_connection(api.http.host, api.http.port, limit=1024)
        raw = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        await reader.readline()
        reader._transport.pause_reading()
        await eventually(lambda: len(engine.aborted) == 64)
        writer.close()
        assert (await api.complete("hi", max_tokens=1))["choices"]
