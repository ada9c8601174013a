"""Gaps between the tokens of running requests while long prompts arrive, on a real engine.

Some requests run; prompts of 2,000 tokens arrive one after the other, each when the one before has its first
token, with a rest between. Printed for each number of running requests: gaps without long prompts and with
them, their ratio to the median, and how long a prompt waits for its first token.

    python benchmarks/token_gaps.py [--running 8 1 32] [--prompts 6] [--rest 1.0] [--model MODEL] ...
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence

import numpy as np

from jaxserve import AsyncLLMEngine, EngineArgs, SamplingParams
from jaxserve.cli.options import options_of

PROMPT_TOKENS = 2000


class Load:
    """Running requests, started anew when they end, and the times of their tokens."""

    def __init__(self, engine: AsyncLLMEngine, draw: random.Random) -> None:
        self.engine = engine
        self.gaps: list[float] = []
        self._draw = draw

    def prompt(self, length: int) -> list[int]:
        """Tokens that no other prompt shares."""
        return [self._draw.randrange(1000, self.engine.vocab_size) for _ in range(length)]

    async def keep_running(self, length: int) -> None:
        while True:
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            last = None
            async for _output in self.engine.generate(self.prompt(50), params):
                now = time.perf_counter()
                if last is not None:
                    self.gaps.append(now - last)  # outputs that nobody read in time are one: the longer gap
                last = now

    async def first_token(self) -> float:
        """Seconds from a long prompt to its token."""
        start = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        async for _ in self.engine.generate(self.prompt(PROMPT_TOKENS), params):
            pass
        return time.perf_counter() - start


def show(label: str, gaps: Sequence[float]) -> None:
    p50, p99 = np.percentile(gaps, [50, 99]) * 1e3
    print(
        f"{label:>28}: median {p50:7.1f} ms, p99 {p99:7.1f} ms, max {max(gaps) * 1e3:7.1f} ms, "
        f"p99 / median {p99 / p50:5.2f} ({len(gaps)} gaps)",
        flush=True,
    )


async def measure(load: Load, num_running: int, args: argparse.Namespace) -> None:
    running = [asyncio.create_task(load.keep_running(args.tokens)) for _ in range(num_running)]
    try:
        await asyncio.sleep(args.calm / 2)  # all prompts are computed
        load.gaps.clear()
        await asyncio.sleep(args.calm)
        show(f"{num_running} running, no prompts", load.gaps)
        load.gaps.clear()
        waits = []
        for _ in range(args.prompts):
            waits.append(await load.first_token())
            await asyncio.sleep(args.rest)
        show(f"{num_running} running, {args.prompts} prompts", load.gaps)
        print(f"{'':>28}  first token of a prompt: median {np.median(waits):.2f} s, max {max(waits):.2f} s")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def main(args: argparse.Namespace, engine_args: EngineArgs) -> None:
    engine = AsyncLLMEngine.from_engine_args(engine_args, report=print)
    try:
        load = Load(engine, random.Random(0))
        for _ in range(2):  # first runs of programs, and measurements of steps
            await load.first_token()
        for num_running in args.running:
            await measure(load, num_running, args)
        stats = engine.stats()
        print(f"compilations: {stats.num_compilations}, preemptions: {stats.num_preemptions}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[8, 1, 32], help="running requests")
    parser.add_argument("--prompts", type=int, default=6, help="long prompts for each")
    parser.add_argument("--rest", type=float, default=1.0, help="seconds between two prompts")
    parser.add_argument("--calm", type=float, default=8.0, help="seconds without prompts")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of a running request")
    group = parser.add_argument_group("engine")
    options = options_of(EngineArgs)
    for option in options:
        option.add_to(group)
    parsed = parser.parse_args()
    given = {o.name: getattr(parsed, o.name) for o in options if hasattr(parsed, o.name)}
    defaults = {
        "warmup": "full",
        "max_num_seqs": max(parsed.running) + 1,
        "max_model_len": PROMPT_TOKENS + 100,
    }
    asyncio.run(main(parsed, EngineArgs.from_mapping(defaults | given)))
