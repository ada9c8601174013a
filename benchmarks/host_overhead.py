"""What a decode step costs the host: everything but the model.

The engine is real (scheduler, pages, packing, dispatch with all its weights, text, streams read by an event
loop on another thread); only its compiled program is replaced by one that makes up the next tokens without a
model. So what a step takes here, a step takes beside the model's own time; how much of it is hidden behind
the step under way is another question.

    python benchmarks/host_overhead.py [--model MODEL] [--rows 32] [--steps 300]

Prints the engine thread's time a step, wall and processor, without any instrument (the fastest and the median
of the steps), then where it goes, with a clock around each part (which costs a little itself). A first run
that is not measured has learnt the tokens' texts, as a server that is in use has; a new one costs 3 us.

The event loop needs the interpreter's lock to read a step's outputs, and takes it where the engine's thread
lets go of it, in `streams` or the next `dispatch`: without a model to wait for, that is in the wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxserve import EngineArgs, SamplingParams
from jaxserve.async_engine import RequestStream
from jaxserve.batch import Bucket
from jaxserve.engine import LLMEngine
from jaxserve.engine_args import DEFAULT_MODEL
from jaxserve.engine_loop import EngineLoop, Sink, deliver
from jaxserve.loading import load_engine
from jaxserve.sampler import MAX_LOGPROBS, Sampled

TEXT = "The quick brown fox jumps over the lazy dog. "


def without_model(engine: LLMEngine) -> None:
    """Put programs into the engine's table that take and give what a step does, and compute nothing of it."""
    runner, vocab = engine.runner, engine.config.model.vocab_size
    lower = runner._step.lower

    def compile_bucket(bucket: Bucket) -> Any:
        real = lower(bucket)
        avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), real.in_avals[0])

        def step(weights: Any, pool: Any, tokens: Any, bias: Any, packed: jax.Array) -> Any:
            ids = (packed[:, 1] * 31 + packed[:, 0] * 7) % vocab  # of the length and the slot
            rows, top = bucket.num_rows, (bucket.num_rows, MAX_LOGPROBS)
            sampled = Sampled(
                ids, jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.zeros(top, jnp.int32), jnp.zeros(top)
            )
            return pool, tokens, jnp.zeros((bucket.num_tokens, 1)), sampled

        return jax.jit(step, donate_argnums=(1, 2), keep_unused=True).lower(*avals).compile()

    runner.programs._compile_bucket = compile_bucket


class Streams:
    """Streams of all requests, read on an event loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.of: dict[str, Sink] = {}
        self.num_characters = 0
        self._tasks: list[asyncio.Task[None]] = []

    def close(self) -> None:
        """Until every stream has been read to its end."""
        asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _ended(self) -> None:
        await asyncio.gather(*self._tasks)

    def processor_seconds(self) -> float:
        """What the event loop's thread has taken so far."""

        async def now() -> float:
            return time.thread_time()

        return asyncio.run_coroutine_threadsafe(now(), self._loop).result()

    def open(self, request_id: str) -> None:
        asyncio.run_coroutine_threadsafe(self._open(request_id), self._loop).result()

    async def _open(self, request_id: str) -> None:
        stream = RequestStream(cast(EngineLoop, None), request_id, final_only=False)
        self.of[request_id] = stream
        self._tasks.append(asyncio.create_task(self._read(stream)))

    async def _read(self, stream: RequestStream) -> None:
        shown = 0
        async for output in stream:
            text = output.outputs[0].text
            self.num_characters += len(text[shown:])
            shown = len(text)


class Clocks:
    """Time spent in functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def on(self, owner: Any, name: str, label: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - started

        setattr(owner, name, timed)


def run(engine: LLMEngine, streams: Streams, rows: int, steps: int, clocks: Clocks | None) -> list[float]:
    """Seconds of each step of `rows` decoding requests, by the wall; last the processor's means, of the
    engine's thread and of the event loop's."""
    params = SamplingParams(temperature=0, max_tokens=steps + 50, ignore_eos=True)
    ids = [str(i) for i in range(rows)]
    for i, request_id in enumerate(ids):
        streams.open(request_id)
        engine.add(engine.prepare(TEXT * 3 + str(i), params, request_id))

    def step() -> None:
        outputs = engine.step(lambda request_id: True)
        started = time.perf_counter()
        deliver(outputs, streams.of)
        if clocks is not None:
            clocks.seconds["streams"] = clocks.seconds.get("streams", 0.0) + time.perf_counter() - started

    while engine.scheduler.num_running < rows:
        step()
    for _ in range(20):
        step()
    if clocks is not None:
        clocks.seconds.clear()
    walls, processor, reading = [], time.thread_time(), streams.processor_seconds()
    for _ in range(steps):
        started = time.perf_counter()
        step()
        walls.append(time.perf_counter() - started)
    processor = (time.thread_time() - processor) / steps
    reading = (streams.processor_seconds() - reading) / steps
    for request_id in ids:
        last = engine.abort(request_id)
        assert last is not None
        deliver([last], streams.of)
    while engine.has_work:
        engine.step()
    return [*walls, processor, reading]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    settings = EngineArgs(
        model=args.model, max_num_seqs=args.rows, max_model_len=2048, num_pages=4097, warmup="none"
    )
    engine = load_engine(settings)
    without_model(engine)
    streams = Streams()
    run(engine, streams, args.rows, args.steps, None)
    *walls, processor, reading = run(engine, streams, args.rows, args.steps, None)
    print(f"{args.rows} rows, {len(engine.runner.weights)} arrays of weights; engine thread, ms a step:")
    print(f"  wall: least {1e3 * min(walls):.3f}, median {1e3 * statistics.median(walls):.3f}")
    print(f"  processor: mean {1e3 * processor:.3f}, and {1e3 * reading:.3f} of the event loop's thread")
    clocks, runner = Clocks(), engine.runner
    clocks.on(engine.scheduler, "schedule", "schedule")
    clocks.on(runner, "execute", "execute, of which")
    clocks.on(runner.packer, "pack", "  pack")
    clocks.on(runner, "_run", "  dispatch")
    clocks.on(engine, "_take_results", "take results, of which")
    clocks.on(engine.scheduler, "update", "  update")
    clocks.on(engine.processor, "process", "  text")
    clocks.on(engine.processor, "snapshot", "  snapshots")
    *walls, processor, _ = run(engine, streams, args.rows, args.steps, clocks)
    print(f"with clocks: wall median {1e3 * statistics.median(walls):.3f}, processor {1e3 * processor:.3f}")
    for label, seconds in clocks.seconds.items():
        print(f"  {label:24}{1e3 * seconds / args.steps:8.3f}")
    streams.close()
    assert streams.num_characters > 0
    engine.close()


if __name__ == "__main__":
    main()
