"""How long the server's event loop is kept from its work, by the worst bodies and 64 streams at once.

A real server runs in this process; a heartbeat on its event loop asks to be woken every 5 ms and notes how
late it is. A client in a process of its own keeps the streams going and sends the cases one after the other.
What is late is the loop itself, a C call on another thread that keeps the interpreter's lock, or, on a
machine whose cores the engine fills, the operating system: the first row, streams alone, shows how much.

    python benchmarks/event_loop.py [--model MODEL] [--streams 64] [--max-model-len 2048]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import web

from jaxserve import AsyncLLMEngine, EngineArgs
from jaxserve.engine_args import DEFAULT_MODEL
from jaxserve_server.app import create_app
from jaxserve_server.body import MAX_BODY_BYTES
from jaxserve_server.config import ServerConfig
from jaxserve_server.connection import create_runner
from jaxserve_server.lifecycle import Lifecycle
from jaxserve_server.state import STATE

BEAT_SECONDS = 0.005
GOAL_SECONDS = 0.1
TEXT = "The quick brown fox jumps over the lazy dog. "
ROOM = MAX_BODY_BYTES - 1024  # for what is around a body's content


class Heartbeat:
    """The worst lateness of a wake-up on this event loop, in seconds."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            due = time.perf_counter() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            self.worst = max(self.worst, time.perf_counter() - due)


def cases(max_model_len: int) -> Iterator[tuple[str, str, bytes]]:
    """(name, path, body); what cannot be answered is to be refused as fast."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    long = (TEXT * (ROOM // len(TEXT)))[:ROOM]

    def case(name: str, path: str, **body: Any) -> tuple[str, str, bytes]:
        separators = (",", ":")
        raw = json.dumps(body, separators=separators, ensure_ascii=False).encode()
        assert len(raw) <= MAX_BODY_BYTES, (name, len(raw))
        return name, path, raw

    words = max_model_len * 8 // 10 // 10 * len(TEXT)
    yield case("a prompt that fills the context", completions, prompt=(TEXT * max_model_len)[:words])
    yield case("8 MiB of text", completions, prompt=long)
    yield case("8 MiB of text in a message", chat, messages=[{"role": "user", "content": long}])
    yield case("half a million token ids", completions, prompt=[12345] * 524_000)
    prompts = [[12345] * (max_model_len // 2)] * min(1024, 1_000_000 // max_model_len)
    yield case("many prompts of ids", completions, prompt=prompts, max_tokens=1)
    yield case("8 MiB of token ids", completions, prompt=[123] * (ROOM // 4))
    yield case("26,000 messages", chat, messages=[{"role": "user", "content": "hi"}] * 26_000)
    yield case("8 MiB of '<|im_'", chat, messages=[{"role": "user", "content": "<|im_" * (ROOM // 6)}])
    yield case("8 MiB of escapes", completions, prompt="\n" * (ROOM // 2))
    yield case("tokenize 2 MiB", "/tokenize", prompt=long[: ROOM // 4], return_token_strs=True)
    yield case("detokenize 2,048 ids", "/detokenize", tokens=[12345] * 2048)
    yield case("detokenize half a million ids", "/detokenize", tokens=[12345] * 524_000)
    yield "8 MiB of '['", chat, b"[" * MAX_BODY_BYTES
    yield "8 MiB of '{}'", chat, b"[" + b"{}," * (ROOM // 3) + b"{}]"


async def stream(session: aiohttp.ClientSession, number: int) -> None:
    body = {
        "prompt": f"{number}: " + TEXT,
        "stream": True,
        "max_tokens": 200,
        "ignore_eos": True,
        "logprobs": 5 if number % 8 == 0 else None,
    }
    while True:
        async with session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for _ in response.content.iter_any():
                pass


async def client(args: argparse.Namespace) -> None:
    """Runs the cases; one line to stdout where each begins and ends."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(args.client, timeout=timeout, connector=connector) as session:
        streams = [asyncio.create_task(stream(session, number)) for number in range(args.streams)]
        await asyncio.sleep(args.settle)
        print("begin\tstreams alone", flush=True)
        await asyncio.sleep(args.settle)
        print("end\t", flush=True)
        headers = {"Content-Type": "application/json"}
        for name, path, raw in cases(args.max_model_len):
            print(f"begin\t{name}", flush=True)
            async with session.post(path, data=raw, headers=headers) as response:
                await response.read()
                status = response.status
            await asyncio.sleep(0.2)  # freeing the body is a part of it
            print(f"end\t{status}", flush=True)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def measure(args: argparse.Namespace) -> bool:
    settings = EngineArgs(
        model=args.model,
        max_num_seqs=args.streams,
        max_model_len=args.max_model_len,
        warmup="full",
    )
    engine = await asyncio.to_thread(AsyncLLMEngine.from_engine_args, settings)
    lifecycle = Lifecycle(lambda: engine)
    app = create_app(ServerConfig(), lifecycle, (args.model,))
    runner = create_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    app[STATE].metrics.engine = await lifecycle.load()
    gc.collect()
    gc.freeze()  # as `jaxserve serve` does
    heartbeat = Heartbeat()
    command = [*sys.argv, "--client", f"http://127.0.0.1:{runner.addresses[0][1]}"]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    is_good, name, begun = True, "", 0.0
    print(f"{'worst lag':>10}  {'took':>8}  status  case")
    async for line in process.stdout:
        what, _, value = line.decode().rstrip("\n").partition("\t")
        if what == "begin":
            name, begun, heartbeat.worst = value, time.perf_counter(), 0.0
        else:
            took = time.perf_counter() - begun
            is_good &= heartbeat.worst < GOAL_SECONDS
            print(f"{heartbeat.worst * 1e3:7.1f} ms  {took:6.2f} s  {value or '-':>6}  {name}", flush=True)
    assert await process.wait() == 0
    heartbeat.task.cancel()
    with suppress(asyncio.CancelledError):
        await heartbeat.task
    await runner.cleanup()
    await asyncio.to_thread(engine.shutdown)
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--settle", type=float, default=5.0, help="seconds of streams alone, twice")
    parser.add_argument("--client", help=argparse.SUPPRESS)  # the server's address: be the client
    args = parser.parse_args()
    if args.client:
        asyncio.run(client(args))
        return 0
    return 0 if asyncio.run(measure(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
