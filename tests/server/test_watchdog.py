"""A step that hangs is noticed; a step that waits for the compiler is not one."""

import asyncio
import threading
import time

import pytest
from conftest import messages
from live import live
from test_lifecycle import eventually, probes

from jaxserve_server.lifecycle import Phase

STEP_TIMEOUT = 3.0  # the first run of a program may take a second, on a busy machine two


@pytest.fixture
async def api():
    async with live("gpt2") as api:
        yield api


async def test_a_step_that_hangs_ends_every_request_with_an_error_and_fails_liveness(api, capfd):
    runner = api.engine._engine.runner
    released = threading.Event()
    execute = runner.execute

    def hang(output):
        released.wait(60)
        return execute(output)

    await api.complete("hi", max_tokens=2)
    await eventually(lambda: not api.engine.stats().num_running)
    runner.execute = hang
    died = asyncio.ensure_future(api.lifecycle.died(step_timeout=1.0))
    try:
        requests = [
            asyncio.ensure_future(api.post("/v1/completions", prompt="hi")),
            asyncio.ensure_future(api.post("/v1/chat/completions", messages=messages("hi"))),
        ]
        stream = asyncio.ensure_future(api.events("/v1/completions", prompt="hi"))
        await asyncio.sleep(0.3)
        requests.append(asyncio.ensure_future(api.post("/v1/completions", prompt="late")))
        start = time.monotonic()
        await asyncio.wait_for(died, 20)
        assert time.monotonic() - start > 0.5
        assert await probes(api) == [503, 503, 503]
        answers = await asyncio.gather(*requests)
        assert {(status, answer["error"]["code"]) for status, answer in answers} == {(500, "engine_dead")}
        assert (await stream)[-1]["error"]["code"] == "engine_dead"
        status, answer = await api.post("/v1/completions", prompt="hi")
        assert (status, answer["error"]["code"]) == (503, "dead")
        shown = capfd.readouterr().err
        assert "in hang" in shown
        assert "most recent call first" in shown
    finally:
        released.set()


async def test_a_long_compilation_is_no_step_that_hangs(api):
    programs = api.engine._engine.runner.programs
    compile_bucket = programs._compile_bucket
    ages = []

    def compile_slowly(bucket):
        until = time.monotonic() + 2 * STEP_TIMEOUT
        while time.monotonic() < until:
            ages.append(api.engine.stats().last_step_age)
            time.sleep(0.01)
        return compile_bucket(bucket)

    programs._compile_bucket = compile_slowly
    died = asyncio.ensure_future(api.lifecycle.died(STEP_TIMEOUT))
    await api.complete("hi", max_tokens=3)  # the first of this engine: nothing is compiled
    assert api.lifecycle.phase is Phase.READY
    assert not died.done()
    assert None in ages
    assert all(age is None or age < STEP_TIMEOUT for age in ages)
    died.cancel()
