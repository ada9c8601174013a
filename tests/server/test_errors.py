"""Errors of one shape on every path; request ids, probes, models."""

import asyncio
import logging

import pytest
from aiohttp import ClientError
from conftest import running
from fake_engine import FakeEngine

from jaxserve_server.config import ServerConfig
from jaxserve_server.sse import EventStream

ROUTES = [
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/startup"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]


def assert_error(body):
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]


@pytest.mark.parametrize("path", [path for _, path in ROUTES])
async def test_another_method_is_a_405(api, path):
    allowed = {method for method, route in ROUTES if route == path}
    for method in METHODS:
        if method not in allowed:
            async with api.http.request(method, path) as response:
                assert response.status == 405
                assert set(response.headers["Allow"].split(",")) - {"HEAD"} == allowed
                assert_error(await response.json())


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/nothing", "/v1/completions/", "/static/../health2"])
async def test_an_unknown_path_is_a_404(api, path):
    async with api.http.get(path) as response:
        assert response.status == 404
        assert_error(await response.json())


async def test_a_request_id_comes_back(api):
    async with api.http.get("/health", headers={"X-Request-Id": "my-id"}) as response:
        assert response.headers["X-Request-Id"] == "my-id"
    async with api.http.get("/nothing") as response:
        made = response.headers["X-Request-Id"]
    async with api.http.get("/health", headers={"X-Request-Id": "x" * 200}) as response:
        assert len(response.headers["X-Request-Id"]) == len(made) == 32


async def test_one_request_id_twice_at_once(api, engine):
    engine.pause()
    headers = {"X-Request-Id": "same"}
    body = {"prompt": "hi", "stream": True}
    async with (
        api.http.post("/v1/completions", json=body, headers=headers) as one,
        api.http.post("/v1/completions", json=body, headers=headers) as two,
    ):
        engine.resume()
        texts = [(await response.text()).count("data: ") for response in (one, two)]
        assert one.headers["X-Request-Id"] == two.headers["X-Request-Id"] == "same"
    assert texts == [17, 17]


async def test_a_bad_host_is_a_400(api):
    async with api.http.get("/health", headers={"Host": "a/b@c"}) as response:
        assert response.status == 400
        assert_error(await response.json())


async def test_a_full_queue_is_a_429_with_retry_after(engine):
    engine.max_queue = 0
    async with running(engine) as api:
        for stream in (False, True):
            body = {"prompt": "hi", "stream": stream}
            async with api.http.post("/v1/completions", json=body) as response:
                assert response.status == 429
                assert int(response.headers["Retry-After"]) >= 1
                assert_error(await response.json())


async def test_all_prompts_of_a_request_are_admitted_or_none(engine):
    engine.max_queue = 2
    engine.pause()
    async with running(engine) as api:
        first = asyncio.create_task(api.post("/v1/completions", prompt=["a", "b", "c"], n=2))
        while len(engine.streams) < 3:
            await asyncio.sleep(0.01)
        status, _ = await api.post("/v1/completions", prompt=["d", "e"])
        assert status == 429
        assert len(engine.seen) == 3
        engine.resume()
        status, answer = await first
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
    assert engine.streams == {}
    assert engine.aborted == []


async def test_an_unforeseen_failure_tells_nothing(engine, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("/secret/path")

    engine.add_request = fail
    async with running(engine) as api:
        status, answer = await api.post("/v1/completions", prompt="hi")
    assert status == 500
    assert_error(answer)
    assert "secret" not in str(answer)
    assert "/secret/path" in caplog.text


async def test_models(engine):
    async with running(engine, names=("one", "org/two")) as api:
        async with api.http.get("/v1/models") as response:
            cards = (await response.json())["data"]
        async with api.http.get("/v1/models/org/two") as response:
            card = await response.json()
        async with api.http.get("/v1/models/three") as response:
            assert response.status == 404
            assert_error(await response.json())
        assert (await api.complete("hi", model="org/two"))["model"] == "org/two"
    assert [c["id"] for c in cards] == ["one", "org/two"]
    assert card == cards[1]
    assert card.keys() >= {"id", "object", "created", "owned_by", "root", "parent", "permission"}
    assert (card["max_model_len"], card["object"], card["root"]) == (512, "model", "org/fake")


async def test_the_root_path_is_a_prefix_of_every_route():
    async with running(FakeEngine(), ServerConfig(root_path="/llm/")) as api:
        for path in ("/llm/health", "/health", "/llm/v1/models"):
            async with api.http.get(path) as response:
                assert response.status == 200


async def test_version(api):
    import jaxserve

    async with api.http.get("/version") as response:
        assert await response.json() == {"version": jaxserve.__version__}


async def test_the_request_log_has_counts_and_no_texts(engine, caplog):
    caplog.set_level(logging.INFO)
    async with running(engine, ServerConfig(log_requests=True)) as api:
        await api.complete("a secret prompt", max_tokens=3)
    (record,) = [record for record in caplog.records if record.name == "jaxserve_server.access"]
    assert record.fields["completion_tokens"] == 3
    assert record.fields["finish_reasons"] == "length"
    assert (record.fields["route"], record.fields["status"]) == ("/v1/completions", 200)
    assert "secret" not in caplog.text


async def test_an_answer_that_fails_when_it_is_half_out_is_broken_off(api, monkeypatch, caplog):
    async def fail(stream):
        raise RuntimeError("late")

    monkeypatch.setattr(EventStream, "done", fail)
    caplog.set_level(logging.INFO)
    async with api.http.post("/v1/completions", json={"prompt": "hi", "stream": True}) as response:
        assert response.status == 200
        with pytest.raises(ClientError):
            await response.read()
    assert "an answer was broken off: late" in caplog.text
    assert (await api.complete("hi"))["choices"]
