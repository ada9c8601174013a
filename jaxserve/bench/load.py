"""Closed and open loops: when requests begin, whatever it is that answers them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from jaxserve.bench.measure import RequestRecord
from jaxserve.bench.trace import TraceItem

Send = Callable[[TraceItem], Awaitable[RequestRecord]]


async def closed_loop(
    send: Send, items: Sequence[TraceItem], concurrency: int, done: Callable[[], None]
) -> tuple[list[RequestRecord], float]:
    """Keep `concurrency` requests open until all are answered. Returns records in order, and wall seconds."""
    gate = asyncio.Semaphore(concurrency)

    async def run(item: TraceItem) -> RequestRecord:
        async with gate:
            record = await send(item)
        done()
        return record

    start = time.perf_counter()
    records = await asyncio.gather(*[run(item) for item in items])
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
    send: Send, items: Sequence[TraceItem], times: Sequence[float], done: Callable[[], None]
) -> tuple[list[RequestRecord], float]:
    """Send each request at its time, whatever is still open. Returns records in order, and wall seconds."""

    async def run(item: TraceItem, at: float) -> RequestRecord:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        record = await send(item)
        done()
        return record

    start = time.perf_counter()
    records = await asyncio.gather(*[run(item, at) for item, at in zip(items, times, strict=True)])
    return list(records), time.perf_counter() - start
