"""The engine under asyncio: streams, aborts, many at once, failure of a step."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from jaxserve import AsyncLLMEngine, SamplingParams
from jaxserve.async_engine import RequestStream
from jaxserve.engine import NewRequest
from jaxserve.engine_args import EngineArgs
from jaxserve.engine_loop import EngineLoop, Sink, deliver
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxserve.loading import Live, load_engine
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tests.jaxserve.tiny import TINY, TINY_ARGS, is_idle, random_arrays, tiny_llm

pytestmark = pytest.mark.quick
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def make_engine(**args: Any) -> AsyncLLMEngine:
    live = Live(random_arrays(), TINY, None)
    return AsyncLLMEngine(load_engine(EngineArgs(**{**TINY_ARGS, "max_num_seqs": 4, **args}), live))


@pytest.fixture
async def engine() -> AsyncIterator[AsyncLLMEngine]:
    made = make_engine()
    yield made
    made.shutdown()


async def test_outputs_are_cumulative_and_end_with_the_finished_one(engine: AsyncLLMEngine) -> None:
    seen = [output async for output in engine.generate([5, 6, 7], SHORT)]
    lengths = [len(o.outputs[0].token_ids) for o in seen]
    assert lengths == sorted(lengths)
    assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
    for earlier, later in itertools.pairwise(seen):
        assert later.outputs[0].token_ids[: len(earlier.outputs[0].token_ids)] == earlier.outputs[0].token_ids
    assert seen[-1].metrics.first_token_time is not None


async def test_leaving_the_iterator_frees_the_pages(engine: AsyncLLMEngine) -> None:
    iterator = engine.generate([5, 6, 7], LONG)
    await anext(iterator)
    await iterator.aclose()
    assert await is_idle(engine)
    assert engine.stats().generation_tokens < 200


async def test_cancelling_a_task_ends_its_request_and_no_other(engine: AsyncLLMEngine) -> None:
    async def collect(ids: list[int]) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        outputs = [output async for output in engine.generate(ids, params)]
        return outputs[-1].outputs[0].token_ids

    tasks = [asyncio.create_task(collect([5 + i, 6, 7])) for i in range(6)]  # two of them wait for a slot
    await asyncio.sleep(0.05)
    for i in (1, 5):
        tasks[i].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(r, asyncio.CancelledError) for r in results] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    assert await is_idle(engine)
    for i in (0, 2, 3, 4):
        assert results[i] == await collect([5 + i, 6, 7])


async def test_an_id_may_be_used_again_right_after_an_abort(engine: AsyncLLMEngine) -> None:
    expected = (await engine.add_request([9, 9, 9], SHORT).final()).outputs[0].token_ids
    for _ in range(20):
        stream = engine.add_request([5, 6, 7], LONG, "same")
        await anext(stream)
        stream.abort()
        again = engine.add_request([9, 9, 9], SHORT, "same")
        assert (await again.final()).outputs[0].token_ids == expected
        assert (await stream.final()).outputs[0].finish_reason == "abort"
    assert await is_idle(engine)


async def test_a_duplicate_id_is_refused_and_the_first_goes_on(engine: AsyncLLMEngine) -> None:
    first = engine.add_request([5, 6, 7], SHORT, "twin")
    second = engine.add_request([5, 6, 7], SHORT, "twin")
    with pytest.raises(InvalidRequestError, match="in use"):
        await second.final()
    assert len((await first.final()).outputs[0].token_ids) == 6


async def test_random_disconnects_leave_no_page_behind(engine: AsyncLLMEngine) -> None:
    rng = random.Random(0)

    async def client(i: int) -> None:
        ids = [rng.randrange(3, 200) for _ in range(rng.randint(1, 100))]
        stream = engine.add_request(ids, SamplingParams(max_tokens=rng.randint(1, 50), seed=i))
        for _ in range(rng.randint(0, 12)):
            try:
                await anext(stream)
            except StopAsyncIteration:
                return
        stream.abort()

    await asyncio.gather(*(client(i) for i in range(120)))
    assert await is_idle(engine)
    assert len((await engine.add_request([5, 6, 7], SHORT).final()).outputs[0].token_ids) == 6


async def test_a_full_queue_refuses_and_recovers() -> None:
    engine = make_engine(max_queue=1, max_num_seqs=1)
    try:
        streams = [engine.add_request([5, 6, 7], SHORT) for _ in range(2)]
        with pytest.raises(QueueFullError):
            engine.add_request([5, 6, 7], SHORT)
        for stream in streams:
            await stream.final()
        await engine.add_request([5, 6, 7], SHORT).final()
    finally:
        engine.shutdown()


async def test_a_queue_that_is_not_full_takes_all_that_comes_at_once() -> None:
    """Told to try again later, a client whose requests no queue could hold would try for ever."""
    engine = make_engine(max_queue=1, max_num_seqs=2)
    try:
        assert len((await engine.add_request([5, 6, 7], SHORT.replace(n=9)).final()).outputs) == 9
        prompts = [[5, 6, i] for i in range(20)]
        streams = await engine.add_requests(prompts, SHORT.replace(n=2))
        for late in (engine.add_requests([[1]], SHORT), engine.add_requests(prompts, SHORT)):
            with pytest.raises(QueueFullError):
                await late
        with pytest.raises(QueueFullError):
            engine.check_queue()
        finals = [await stream.final() for stream in streams]
        assert [output.prompt_token_ids for output in finals] == prompts
        assert all(len(choice.token_ids) == 6 for output in finals for choice in output.outputs)
        assert await is_idle(engine)
        engine.check_queue()
    finally:
        engine.shutdown()


async def test_a_request_counts_once_at_every_moment_on_its_way_to_the_queue() -> None:
    engine = make_engine(max_queue=1, max_num_seqs=1)
    loop, add = engine._loop, engine._engine.add
    counts = []

    def look() -> None:
        try:
            loop.check_queue()
            counts.append("room")
        except QueueFullError as error:
            counts.append(str(error).split()[0])

    def watched(*news: NewRequest) -> None:
        look()
        add(*news)
        look()

    engine._engine.add = watched  # type: ignore[method-assign]
    try:
        first = await engine.add_requests([[5, 6, 7]] * 4, SHORT)
        await asyncio.gather(*(stream.final() for stream in first))
        assert counts == ["4", "4"]
        assert await is_idle(engine)

        def fails(*news: NewRequest) -> None:
            look()
            raise InvalidRequestError("no")

        engine._engine.add = fails  # type: ignore[method-assign]
        with pytest.raises(InvalidRequestError):
            await engine.add_request([5, 6, 7], SHORT).final()
        assert counts == ["4", "4", "room"]
        for _ in range(100):
            await asyncio.sleep(0.01)
            if not loop.num_unfinished:
                break
        assert loop.num_unfinished == 0
        assert loop._num_pending == 0
        engine._engine.add = add  # type: ignore[method-assign]
        await engine.add_request([5, 6, 7], SHORT).final()
    finally:
        engine.shutdown()


async def test_no_output_is_lost_or_read_twice_between_the_two_threads() -> None:
    def output(count: int) -> RequestOutput:
        choice = CompletionOutput(0, token_ids=[1] * count)
        return RequestOutput("x", None, [1], [choice], count == 3000, RequestMetrics(0.0))

    outputs = [output(count) for count in range(1, 3001)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3):
            stream = RequestStream(cast(EngineLoop, None), "x", final_only=False)
            thread = threading.Thread(target=lambda to=stream: [deliver([one], {"x": to}) for one in outputs])
            thread.start()
            seen = [len(one.outputs[0].token_ids) async for one in stream]
            thread.join()
            assert seen == sorted(set(seen))
            assert seen[-1] == 3000
    finally:
        sys.setswitchinterval(interval)


def unfinished() -> RequestOutput:
    return RequestOutput("x", None, [1], [CompletionOutput(0)], False, RequestMetrics(0.0))


async def test_all_outputs_of_a_step_take_one_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {name: RequestStream(cast(EngineLoop, None), name, final_only=False) for name in "abc"}
    readers = [asyncio.create_task(anext(stream)) for stream in streams.values()]
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    calls, call = [], loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda fn, *args: (calls.append(fn), call(fn, *args)))
    outputs = [dataclasses.replace(unfinished(), request_id=name) for name in "abc"]
    deliver(outputs, cast(dict[str, Sink], streams))
    assert await asyncio.gather(*readers) == outputs
    assert len(calls) == 1


async def test_a_finished_output_is_the_last_that_its_sink_gets() -> None:
    stream = RequestStream(cast(EngineLoop, None), "x", final_only=False)
    sinks: dict[str, Sink] = {"x": stream}
    deliver([dataclasses.replace(unfinished(), finished=True), unfinished()], sinks)
    assert [output.finished async for output in stream] == [True]
    assert sinks == {}


async def test_a_reader_that_gives_up_takes_nothing_from_the_next() -> None:
    stream = RequestStream(cast(EngineLoop, None), "x", final_only=False)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.001)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    output = unfinished()
    deliver([output], {"x": stream})
    assert await asyncio.wait_for(reader, 5) is output


async def test_two_readers_of_a_stream_share_its_outputs() -> None:
    stream = RequestStream(cast(EngineLoop, None), "x", final_only=False)
    readers = [asyncio.create_task(anext(stream)) for _ in range(2)]
    await asyncio.sleep(0)
    outputs = [unfinished(), unfinished()]
    for number, output in enumerate(outputs, 1):
        deliver([output], {"x": stream})
        await asyncio.sleep(0.01)
        assert sum(reader.done() for reader in readers) == number
    assert {id(await reader) for reader in readers} == set(map(id, outputs))


async def test_long_prompts_are_checked_on_the_callers_threads(engine: AsyncLLMEngine) -> None:
    calls = []

    async def in_thread(fn: Callable[[], list[NewRequest]]) -> list[NewRequest]:
        calls.append(fn)
        return await asyncio.to_thread(fn)

    streams = await engine.add_requests([[1] * 200] * 100, SHORT, in_thread=in_thread)
    assert len(calls) == 1
    for stream in streams:
        stream.abort()
    (short,) = await engine.add_requests([[1] * 20], SHORT, in_thread=in_thread)
    await short.final()
    assert len(calls) == 1


async def test_of_several_prompts_all_are_taken_or_none(engine: AsyncLLMEngine) -> None:
    for wrong in ([], [-1], [10**9], [1] * 100_000, ["a"]):
        with pytest.raises(InvalidRequestError):
            await engine.add_requests([[5, 6], wrong, [7]], SHORT)
        assert engine.stats().num_running == engine.stats().num_waiting == 0
    assert await is_idle(engine)


@pytest.mark.parametrize("wrong", [{"priority": "high"}, {"priority": 0.5}, {"cache_salt": 5}], ids=repr)
async def test_wrong_priorities_and_salts_are_refused(engine: AsyncLLMEngine, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request([5, 6, 7], SHORT, **wrong)
    assert caught.value.param in wrong


async def test_scheduler_delay_batches_requests_that_arrive_apart() -> None:
    engine = make_engine(scheduler_delay=0.3)
    try:
        first = engine.add_request([5, 6, 7], SHORT)
        await asyncio.sleep(0.1)
        second = engine.add_request([8, 9], SHORT)
        await first.final()
        await second.final()
        assert engine.stats().num_steps == 6  # one prefill of both, five decodes of both
    finally:
        engine.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_step_that_fails_ends_the_engine_and_tells_everyone(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    execute, steps = engine._engine.runner.execute, 0

    def failing(output: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise RuntimeError("device lost")
        return execute(output)

    engine._engine.runner.execute = failing  # type: ignore[method-assign]
    streams = [engine.add_request([5, 6, 7 + i], LONG) for i in range(6)]
    for stream in streams:
        with pytest.raises(EngineDeadError):
            await stream.final()
    assert engine.is_dead
    assert str(engine.error) == "device lost"
    with pytest.raises(EngineDeadError):
        engine.add_request([5], SHORT)
    engine.shutdown()


async def test_llm_works_inside_a_running_event_loop() -> None:
    with tiny_llm() as llm:
        blocking = llm.generate([[5, 6, 7]], SHORT)[0]
        texts = await asyncio.gather(*(llm.async_generate([5, 6, i], SHORT) for i in range(10)))
        assert texts == [""] * 10  # no tokenizer, no text
        task = asyncio.create_task(llm.async_generate([5, 6, 7], LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(blocking.outputs[0].token_ids) == 6
        for _ in range(500):
            if llm.stats().pages_used == 0:
                break
            await asyncio.sleep(0.01)
        assert llm.stats().pages_used == 0
