"""A streaming client of OpenAI-compatible servers that records when text arrives."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from jaxserve.bench.measure import RequestRecord
from jaxserve.bench.trace import TraceItem


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `url` ends before `/completions`, for example http://localhost:8000/v1."""

    url: str
    model: str
    chat: bool = False
    ignore_eos: bool = True  # an extension that some servers refuse
    api_key: str | None = None

    def body(self, item: TraceItem) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.chat:
            return body | {"messages": [{"role": "user", "content": item.prompt}]}
        return body | {"prompt": item.prompt}

    @property
    def endpoint(self) -> str:
        return f"{self.url}/chat/completions" if self.chat else f"{self.url}/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def base_url(url: str) -> str:
    """The address with `/v1`, whether it was given or not."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def new_session(target: Target) -> aiohttp.ClientSession:
    """A session without a connection limit: the benchmark decides how many requests are open."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=1800),
        connector=aiohttp.TCPConnector(limit=0),
        headers=target.headers,
    )


async def served_models(session: aiohttp.ClientSession, url: str) -> list[str]:
    """Names the server answers to. Raises aiohttp.ClientError when it cannot be reached."""
    async with session.get(f"{url}/models") as response:
        response.raise_for_status()
        return [model["id"] for model in (await response.json())["data"]]


def _pieces(event: dict[str, Any]) -> Iterator[str]:
    for choice in event.get("choices") or ():
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            yield text


async def send(session: aiohttp.ClientSession, target: Target, item: TraceItem) -> RequestRecord:
    """Run one request to its end. Never raises for what the server does: the record has the error."""
    record = RequestRecord(wanted_tokens=item.max_tokens)
    start = time.perf_counter()
    try:
        async with session.post(target.endpoint, json=target.body(item)) as response:
            if response.status != 200:
                record.error = f"{response.status} {(await response.text())[:200]}"
                return record
            ended = False
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    ended = True
                    break
                event = json.loads(data)
                if event.get("error"):
                    record.error = str(event["error"])[:200]
                if usage := event.get("usage"):
                    record.prompt_tokens = usage["prompt_tokens"]
                    record.output_tokens = usage["completion_tokens"]
                now = time.perf_counter() - start
                record.arrivals += [now for _ in _pieces(event)]
            if not ended and record.error is None:
                record.error = "the stream ended without [DONE]"
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"
    finally:
        record.latency = time.perf_counter() - start
    return record


async def closed_loop(
    target: Target, items: Sequence[TraceItem], concurrency: int, done: Callable[[], None]
) -> tuple[list[RequestRecord], float]:
    """Keep `concurrency` requests open until all are answered. Returns records and wall seconds."""
    gate = asyncio.Semaphore(concurrency)

    async def run(session: aiohttp.ClientSession, item: TraceItem) -> RequestRecord:
        async with gate:
            record = await send(session, target, item)
        done()
        return record

    async with new_session(target) as session:
        start = time.perf_counter()
        records = await asyncio.gather(*[run(session, item) for item in items])
        return list(records), time.perf_counter() - start


def arrival_times(n: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which `n` requests of a Poisson process of `rate` per second arrive."""
    rng = random.Random(f"arrivals {seed}")  # apart from the trace's own stream
    now, times = 0.0, []
    for _ in range(n):
        times.append(now)
        now += rng.expovariate(rate)
    return times


async def open_loop(
    target: Target, items: Sequence[TraceItem], times: Sequence[float], done: Callable[[], None]
) -> tuple[list[RequestRecord], float]:
    """Send each request at its time, whatever is still open. Returns records and wall seconds."""

    async def run(session: aiohttp.ClientSession, item: TraceItem, at: float) -> RequestRecord:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        record = await send(session, target, item)
        done()
        return record

    async with new_session(target) as session:
        start = time.perf_counter()
        jobs = [run(session, item, at) for item, at in zip(items, times, strict=True)]
        records = await asyncio.gather(*jobs)
        return list(records), time.perf_counter() - start
