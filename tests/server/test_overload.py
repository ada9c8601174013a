"""More than the server can do: refusals come at once, what was accepted ends well, who leaves frees all."""

import asyncio
import contextlib
import random
import statistics
import time

import pytest
from aiohttp import ClientError
from live import is_idle, live


@pytest.fixture
async def api():
    async with live("gpt2", max_num_seqs=4, max_queue=4) as api:
        await api.complete("warm up", max_tokens=4, ignore_eos=True)
        yield api


async def timed(api, path="/v1/completions", **body):
    """(seconds, status, Retry-After)"""
    start = time.monotonic()
    async with api.http.post(path, json=body) as response:
        await response.read()
        return time.monotonic() - start, response.status, response.headers.get("Retry-After")


async def test_refusals_and_probes_are_fast_while_the_queue_is_full(api):
    runner = api.engine._engine.runner
    execute = runner.execute

    def slowly(output):  # the engine is busy for as long as this test looks
        time.sleep(0.02)
        return execute(output)

    runner.execute = slowly
    body = {"prompt": "hi", "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    accepted = [asyncio.ensure_future(api.post("/v1/completions", **body)) for _ in range(8)]
    while api.engine.stats().num_running + api.engine.stats().num_waiting < 8:
        await asyncio.sleep(0.005)

    refusals, probes = [], []
    for i in range(72):  # ten times what fits, in all
        long = {"prompt": "a long prompt " * 2000} if i % 8 == 0 else {"prompt": "hi"}
        refusals.append(await timed(api, **{**body, **long, "stream": i % 2 == 0}))
        start = time.monotonic()
        async with api.http.get("/health") as response:
            assert response.status == 200
        probes.append(time.monotonic() - start)
    assert not any(request.done() for request in accepted)
    assert {status for _, status, _ in refusals} == {429}
    assert all(int(retry_after) >= 1 for _, _, retry_after in refusals)
    # They take milliseconds. Waiting for the engine would take seconds, on any machine.
    assert statistics.median(seconds for seconds, _, _ in refusals) < 0.05
    assert statistics.median(probes) < 0.05

    runner.execute = execute
    answers = await asyncio.gather(*accepted)
    assert {status for status, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
    assert await is_idle(api.engine)


async def test_clients_that_leave_at_any_moment_leave_nothing():
    """Half of the clients leave, streaming or not, waiting or running; the others get what they asked for."""
    chance = random.Random(5)
    async with live("gpt2", max_num_seqs=8) as api:
        body = {"prompt": "once upon", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
        expected = (await api.complete(**body))["choices"][0]["text"]

        async def stays():
            return (await api.complete(**body))["choices"][0]["text"]

        async def leaves(wait, stream):
            with contextlib.suppress(TimeoutError, ClientError):
                async with asyncio.timeout(wait):
                    longer = {**body, "max_tokens": 400, "stream": stream, "n": 2}
                    async with api.http.post("/v1/completions", json=longer) as response:
                        await response.read()

        async def client():
            for _ in range(5):
                if chance.random() < 0.5:
                    await leaves(chance.uniform(0, 0.15), stream=chance.random() < 0.5)
                else:
                    assert await stays() == expected

        await asyncio.gather(*(client() for _ in range(40)))
        start = time.monotonic()
        assert await is_idle(api.engine)
        assert time.monotonic() - start < 2
        assert await stays() == expected
