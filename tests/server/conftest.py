"""A server over the fake engine, and the ways to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine

from jaxserve_server.app import create_app
from jaxserve_server.config import ServerConfig
from jaxserve_server.connection import create_runner
from jaxserve_server.lifecycle import Lifecycle
from jaxserve_server.state import STATE


class Api:
    """A client of one running server, with its engine and lifecycle at hand."""

    def __init__(self, http, engine, lifecycle):
        self.http, self.engine, self.lifecycle = http, engine, lifecycle

    @property
    def base_url(self):
        return str(self.http.make_url("/v1"))

    async def post(self, path, **body):
        """(status, decoded body)"""
        async with self.http.post(path, json=body) as response:
            return response.status, await response.json()

    async def complete(self, prompt="hi", **body):
        status, answer = await self.post("/v1/completions", prompt=prompt, **body)
        assert status == 200, answer
        return answer

    async def chat(self, *contents, **body):
        status, answer = await self.post("/v1/chat/completions", messages=messages(*contents), **body)
        assert status == 200, answer
        return answer

    async def events(self, path, **body):
        """The decoded events of a stream, which ends with [DONE]."""
        async with self.http.post(path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream"
            raw = await response.read()
        frames = raw.decode().split("\n\n")
        assert frames.pop() == ""
        assert frames.pop() == "data: [DONE]"
        assert all(frame.startswith("data: ") for frame in frames)
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def messages(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


@contextlib.asynccontextmanager
async def running(engine, config=None, names=("fake",), load=None, **runner_settings):
    lifecycle = Lifecycle(load or (lambda: engine))
    app = create_app(config or ServerConfig(), lifecycle, names)
    server = TestServer(app)
    runner = create_runner(app, **runner_settings)

    async def make_runner(**_):
        return runner

    server._make_runner = make_runner  # the product's own runner settings, on a port of the test's
    async with TestClient(server) as http:
        if load is None:
            app[STATE].metrics.engine = await lifecycle.load()
        yield Api(http, engine, lifecycle)


@contextlib.asynccontextmanager
async def longest_turn():
    """Yields a function: the longest time in seconds that others have waited for the event loop so far.

    Of this thread alone: others may keep the processor busy. The client must be on another thread.
    """
    longest = 0.0

    async def watch():
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - before)

    # A collection of all that the test run has made takes longer than what is looked for.
    gc.collect()
    gc.freeze()
    watching = asyncio.ensure_future(watch())
    try:
        yield lambda: longest
    finally:
        watching.cancel()
        gc.unfreeze()


def post_blocking(url, body):
    """The answer's raw body, by a client that blocks."""
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as response:
        return response.read()


@pytest.fixture
async def engine():
    return FakeEngine()


@pytest.fixture
async def api(engine):
    async with running(engine) as api:
        yield api
