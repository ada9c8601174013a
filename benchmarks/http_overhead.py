"""What serving over HTTP costs of the engine's throughput: both in one run, on one engine.

The same trace runs alternately on the engine itself and through the server with streams, from a client
process of its own. The engine, its compiled programs and its settings are the same object, so the difference
is HTTP: parsing, tokenising, JSON, sockets. On a machine whose cores the engine fills it is also the client's
own work, whose processor time is shown beside it (a server's clients run elsewhere).

    python benchmarks/http_overhead.py [--model MODEL] [--concurrency 32] [--repeats 3] [--n 48]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from jaxserve import AsyncLLMEngine, EngineArgs
from jaxserve.bench.load import closed_loop
from jaxserve.bench.offline import sender
from jaxserve.bench.trace import TraceItem, make_trace
from jaxserve.engine_args import DEFAULT_MODEL
from jaxserve_server.app import create_app
from jaxserve_server.config import ServerConfig
from jaxserve_server.connection import create_runner
from jaxserve_server.lifecycle import Lifecycle
from jaxserve_server.state import STATE


@dataclass(frozen=True)
class Run:
    """One pass over the trace."""

    output_rate: float  # output tokens per second
    server_cpu: float  # seconds of this process, engine included
    client_cpu: float  # seconds of the client process


def _cpu(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


async def on_engine(engine: AsyncLLMEngine, trace: Sequence[TraceItem], concurrency: int) -> Run:
    before = _cpu(resource.RUSAGE_SELF)
    records, wall = await closed_loop(sender(engine), trace, concurrency, lambda: None)
    assert all(record.error is None for record in records), records
    tokens = sum(record.output_tokens for record in records)
    return Run(tokens / wall, _cpu(resource.RUSAGE_SELF) - before, 0.0)


async def over_http(url: str, count: int, concurrency: int) -> Run:
    before, children = _cpu(resource.RUSAGE_SELF), _cpu(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = ["-m", "jaxserve.cli.main", "bench", "serve", "--url", url, "--n", str(count)]
        command += ["--concurrency", str(concurrency), "--json", str(figures)]
        client = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.DEVNULL
        )
        assert await client.wait() == 0
        (level,) = json.loads(figures.read_text())["levels"]
    cpu = _cpu(resource.RUSAGE_SELF) - before, _cpu(resource.RUSAGE_CHILDREN) - children
    return Run(level["output_rate"], *cpu)


async def measure(args: argparse.Namespace) -> None:
    # Without the prefix cache: the second pass over a trace would find its prompts there.
    settings = EngineArgs(
        model=args.model, max_num_seqs=args.concurrency, enable_prefix_caching=False, warmup="full"
    )
    engine = await asyncio.to_thread(AsyncLLMEngine.from_engine_args, settings)
    lifecycle = Lifecycle(lambda: engine)
    app = create_app(ServerConfig(), lifecycle, (args.model,))
    runner = create_runner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    app[STATE].metrics.engine = await lifecycle.load()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    trace = make_trace(args.n)
    await on_engine(engine, trace[: args.concurrency], args.concurrency)  # first runs of every program
    pairs: list[tuple[Run, Run]] = []
    for number in range(args.repeats):
        started = time.perf_counter()
        alone = await on_engine(engine, trace, args.concurrency)
        served = await over_http(url, args.n, args.concurrency)
        pairs.append((alone, served))
        print(
            f"{number + 1}: engine {alone.output_rate:.1f} tok/s, served {served.output_rate:.1f} tok/s "
            f"({served.output_rate / alone.output_rate:.3f}); process {alone.server_cpu:.1f} s and "
            f"{served.server_cpu:.1f} s of processor, client {served.client_cpu:.1f} s, "
            f"{time.perf_counter() - started:.0f} s in all",
            flush=True,
        )
    ratios = [served.output_rate / alone.output_rate for alone, served in pairs]
    cpu = [served.server_cpu / alone.server_cpu for alone, served in pairs]
    print(
        f"median of {args.repeats}: served / engine {statistics.median(ratios):.3f} in throughput, "
        f"{statistics.median(cpu):.3f} in processor time of the serving process"
    )
    await runner.cleanup()
    await asyncio.to_thread(engine.shutdown)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--n", type=int, default=48, help="requests in the trace")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
