"""Budgets of a key: what they let through, what a client is told, what is charged however a request ends."""

import asyncio
import contextlib
import json
import math
import re

import pytest
from conftest import messages, running
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve_server.access import ApiKey
from jaxserve_server.config import ServerConfig
from jaxserve_server.errors import ApiError
from jaxserve_server.limits import Bucket, KeyLimits, _duration


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def limits(clock, **fields):
    return KeyLimits(ApiKey("k", b"", **fields), clock)


pauses = st.floats(0, 90, allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 100), st.lists(pauses, max_size=60))
def test_no_window_lets_more_through_than_a_burst_and_the_rate(per_minute, waits):
    clock = Clock()
    key = limits(clock, requests_per_minute=per_minute)
    admitted = []
    for wait in waits:
        clock.now += wait
        try:
            key.admit(spends_tokens=True)
        except ApiError as error:
            retry_after = int(error.headers["Retry-After"])
            assert 1 <= retry_after <= 61
            assert key.requests.seconds_until(1) <= retry_after
        else:
            admitted.append(clock.now)
    for i, start in enumerate(admitted):
        for j in range(i, len(admitted)):
            most = per_minute + (admitted[j] - start) * per_minute / 60
            assert j - i + 1 <= most + 1e-6


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 1000), st.lists(st.tuples(pauses, st.integers(0, 500)), max_size=60))
def test_tokens_stay_within_the_rate_but_for_the_last_request(per_minute, steps):
    clock = Clock()
    key = limits(clock, tokens_per_minute=per_minute)
    start, used, largest = clock.now, 0, 0
    for wait, tokens in steps:
        clock.now += wait
        try:
            key.admit(spends_tokens=True)
        except ApiError as error:
            clock.now += int(error.headers["Retry-After"])
            key.admit(spends_tokens=True)  # the time that a client is told suffices
        key.release()
        key.tokens.take(tokens)
        used, largest = used + tokens, max(largest, tokens)
        assert used - largest <= per_minute + (clock.now - start) * per_minute / 60 + 1e-6


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10**6), st.lists(st.tuples(pauses, st.floats(0, 1e6)), max_size=20))
def test_a_bucket_is_never_over_full_and_fills_when_it_says(per_minute, steps):
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    for wait, amount in steps:
        clock.now += wait
        bucket.take(amount)
        assert bucket.level <= per_minute
        clock.now += bucket.seconds_until(per_minute)
        assert math.isclose(bucket.level, per_minute, rel_tol=1e-6, abs_tol=1e-6)


def test_a_refused_request_costs_nothing():
    clock = Clock()
    key = limits(clock, requests_per_minute=2, tokens_per_minute=10, concurrency=1)
    key.admit(spends_tokens=True)
    for _ in range(5):
        with pytest.raises(ApiError, match="1 request running"):
            key.admit(spends_tokens=True)
    key.release()
    key.tokens.take(10)
    for _ in range(5):
        with pytest.raises(ApiError, match="10 tokens a minute are spent"):
            key.admit(spends_tokens=True)
    key.admit(spends_tokens=False)
    key.release()
    with pytest.raises(ApiError, match="2 requests a minute are spent") as caught:
        key.admit(spends_tokens=False)
    assert caught.value.headers == {"Retry-After": "31"}
    clock.now += 31
    key.admit(spends_tokens=True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.02, "20ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (61.25, "1m1.25s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds, text):
    assert _duration(seconds) == text


# ---- over HTTP


@pytest.fixture
def taken_tokens(monkeypatch):
    """What was taken from each bucket in all; what comes back meanwhile is not subtracted."""
    taken = {}
    take = Bucket.take

    def counting(self, amount):
        taken[id(self)] = taken.get(id(self), 0) + amount
        take(self, amount)

    monkeypatch.setattr(Bucket, "take", counting)
    return taken


@contextlib.asynccontextmanager
async def limited(tmp_path, fields, engine=None, **config):
    (tmp_path / "keys").write_text(f"sk-a name=alice {fields}\nsk-b name=bob {fields}\nsk-free\n")
    config = ServerConfig(api_keys_file=str(tmp_path / "keys"), **config)
    async with running(engine or FakeEngine(), config) as api:
        yield api


@contextlib.asynccontextmanager
async def send(api, path="/v1/completions", key="sk-a", **body):
    own = {"/v1/chat/completions": {"messages": messages("ab")}, "/detokenize": {"tokens": [1]}}
    body = {"max_tokens": 5, **own.get(path, {"prompt": "abcd"}), **body}
    async with api.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        yield response


async def test_requests_a_minute(tmp_path):
    async with limited(tmp_path, "requests-per-minute=3") as api:
        for left in (2, 1, 0):
            async with send(api, stream=left == 1) as response:
                assert response.status == 200
                assert response.headers["x-ratelimit-limit-requests"] == "3"
                assert response.headers["x-ratelimit-remaining-requests"] == str(left)
                assert re.fullmatch(r"(\dm)?[\d.]+m?s", response.headers["x-ratelimit-reset-requests"])
                assert "x-ratelimit-limit-tokens" not in response.headers
                await response.read()
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            async with send(api, path) as response:
                assert response.status == 429
                assert 1 <= int(response.headers["Retry-After"]) <= 21
                assert response.headers["x-ratelimit-remaining-requests"] == "0"
                error = (await response.json())["error"]
                assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        for key in ("sk-b", "sk-free"):
            async with send(api, key=key) as response:
                assert response.status == 200
        assert not any(name.startswith("x-ratelimit") for name in response.headers)
        for path in ("/v1/models", "/metrics", "/health", "/version"):
            async with api.http.get(path, headers={"Authorization": "Bearer sk-a"}) as response:
                assert response.status == 200


async def test_a_refusal_does_not_wait_for_the_body(tmp_path):
    async with limited(tmp_path, "requests-per-minute=1") as api:
        async with send(api) as response:
            assert response.status == 200
        reader, writer = await asyncio.open_connection(api.http.host, api.http.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-a\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        )
        async with asyncio.timeout(2):
            assert b" 429 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "cost"),
    [
        ("/v1/completions", {}, 5 + 5),
        ("/v1/completions", {"prompt": ["ab", "abc"]}, 3 + 4 + 2 * 5),
        ("/v1/completions", {"n": 3}, 5 + 3 * 5),
        ("/v1/completions", {"stop": "h"}, 5 + 3),
        ("/v1/chat/completions", {"max_tokens": 7}, 19 + 7),
    ],
)
async def test_prompts_and_outputs_are_charged(tmp_path, path, body, cost, stream, taken_tokens):
    async with (
        limited(tmp_path, "tokens-per-minute=100000") as api,
        send(api, path, stream=stream, **body) as response,
    ):
        assert response.status == 200
        assert int(response.headers["x-ratelimit-limit-tokens"]) == 100000
        await response.read()
    assert list(taken_tokens.values()) == [cost]


async def test_embedded_tokens_are_charged(tmp_path, taken_tokens):
    async with limited(tmp_path, "tokens-per-minute=8") as api:
        async with send(api, "/v1/embeddings", input=["ab", "abcde"]) as response:
            assert response.status == 200, await response.text()
        assert list(taken_tokens.values()) == [3 + 6]
        async with send(api, "/v1/embeddings", input="ab") as response:
            assert response.status == 429


async def test_a_spent_budget_refuses_generation_and_not_counting(tmp_path):
    async with limited(tmp_path, "tokens-per-minute=20") as api:
        async with send(api, max_tokens=40, stream=True) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
        async with send(api) as response:
            assert response.status == 429
            assert 60 < int(response.headers["Retry-After"]) <= 80
            assert response.headers["x-ratelimit-remaining-tokens"] == "0"
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        for path in ("/tokenize", "/detokenize"):
            async with send(api, path) as response:
                assert response.status == 200
        async with send(api, key="sk-b") as response:
            assert response.status == 200


async def test_requests_at_once(tmp_path):
    engine = FakeEngine()
    async with limited(tmp_path, "concurrency=2", engine) as api:
        engine.pause()

        async def run(stream):
            async with send(api, stream=stream) as response:
                return response.status, await response.text()

        running_requests = [asyncio.ensure_future(run(stream)) for stream in (False, True)]
        while len(engine.streams) < 2:
            await asyncio.sleep(0.005)
        async with send(api) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
        async with send(api, key="sk-b", prompt="") as response:
            assert response.status == 400
        engine.resume()
        assert [status for status, _ in await asyncio.gather(*running_requests)] == [200, 200]
        async with send(api) as response:
            assert response.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_pays_for_what_it_had_and_gives_its_place_back(
    tmp_path, stream, taken_tokens
):
    engine = FakeEngine(max_model_len=10**9)
    async with limited(tmp_path, "tokens-per-minute=1000000 concurrency=1", engine) as api:
        request = asyncio.ensure_future(send_and_read(api, stream))
        while engine.counts.generation_tokens < 50:
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        while engine.streams:
            await asyncio.sleep(0.005)
        async with send(api, max_tokens=1) as response:
            assert response.status == 200
    (taken,) = taken_tokens.values()
    assert taken >= 5 + 49 + 5 + 1


async def send_and_read(api, stream):
    async with send(api, stream=stream, max_tokens=10**8) as response:
        await response.read()


async def test_invalid_requests_count_as_requests_and_cost_no_tokens(tmp_path, taken_tokens):
    async with limited(tmp_path, "requests-per-minute=2 tokens-per-minute=1000") as api:
        for prompt in ([], [-1]):
            async with send(api, prompt=prompt) as response:
                assert response.status == 400
        async with send(api) as response:
            assert response.status == 429
    assert list(taken_tokens.values()) == [2]


async def test_what_no_route_takes_costs_nothing_and_says_so(tmp_path):
    async with limited(tmp_path, "requests-per-minute=1") as api:
        for _ in range(2):
            for path, status in (("/nope", 404), ("/version", 405)):
                async with send(api, path) as response:
                    assert response.status == status
        async with send(api) as response:
            assert response.status == 200
        for path, status in (("/nope", 404), ("/version", 405)):
            async with send(api, path) as response:
                assert response.status == status


async def test_rejections_are_counted_with_the_keys_name(tmp_path):
    async with limited(tmp_path, "requests-per-minute=1", metrics_without_key=True) as api:
        for _ in range(3):
            async with send(api) as response:
                await response.read()
        async with api.http.get("/metrics") as response:
            page = await response.text()
    assert re.search(
        r'request_rejections_total\{api_key="alice",[^}]*reason="rate_limit_exceeded"} 2\.0', page
    )
    assert "sk-a" not in page


async def test_a_server_wide_key_has_no_limits():
    async with running(FakeEngine(), ServerConfig(api_key=("k",))) as api:
        for _ in range(20):
            async with send(api, key="k", max_tokens=1) as response:
                assert response.status == 200
                json.loads(await response.text())
