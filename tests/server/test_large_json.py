"""Large JSON: made, encoded and sent in pieces; and events, whose sender gives others their turn."""

import asyncio
import json
import random
import threading
import time

import pytest

from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve_server import large_json
from jaxserve_server.generation import Prompt, Usage
from jaxserve_server.large_json import encoded, made_on_threads
from jaxserve_server.sse import EventStream


def some_json(rng, depth=4):
    kind = rng.randrange(9 if depth else 6)
    if kind > 6:
        return {rng.choice('abé"\\'): some_json(rng, depth - 1) for _ in range(rng.randrange(5))}
    if kind == 6:
        return [some_json(rng, depth - 1) for _ in range(rng.choice([0, 1, 5, 64, 65, 128, 200]))]
    return rng.choice([None, True, 17, -0.5, "text é \ud83d", ""])


@pytest.mark.parametrize("seed", range(40))
def test_pieces_are_together_what_the_library_makes(seed):
    value = some_json(random.Random(seed))
    assert b"".join(encoded(value)).decode("ascii") == json.dumps(value, separators=(",", ":"))


def test_a_long_list_is_many_pieces_wherever_it_is():
    pieces = list(encoded({"choices": {"content": [[0.5] * 20] * 10_000}, "ids": [*range(10_000)]}))
    assert max(map(len, pieces)) < 10_000


async def test_pieces_are_made_in_batches_on_threads_that_take_turns():
    made = []

    def pieces(name):
        for _ in range(20):
            made.append((name, threading.current_thread().name))
            time.sleep(0.001)
            yield b"x" * (large_json._BATCH_BYTES // 2)

    async def take(name):
        return [batch async for batch in made_on_threads(pieces(name))]

    answers = await asyncio.gather(*map(take, range(8)))
    assert all(len(answer) == 10 and len(b"".join(answer)) == 10 * 2**16 for answer in answers)
    assert all(thread.startswith("answers") for _, thread in made)
    # All have begun before any has ended.
    begun = max(next(at for at, (who, _) in enumerate(made) if who == name) for name in range(8))
    ended = min(max(at for at, (who, _) in enumerate(made) if who == name) for name in range(8))
    assert begun < ended


async def test_a_failure_while_pieces_are_made_is_raised():
    def pieces():
        yield b"x"
        raise ArithmeticError("late")

    with pytest.raises(ArithmeticError, match="late"):
        [batch async for batch in made_on_threads(pieces())]


async def test_a_stream_whose_reader_keeps_up_gives_others_their_turn():
    class Socket:
        transport = None
        sent = 0

        async def write(self, data):
            self.sent += len(data)

    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    events = EventStream(Socket())
    events.response = socket = Socket()
    task = asyncio.ensure_future(others())
    for number in range(2000):
        await events.send({"choices": [{"index": number, "text": "word", "finish_reason": None}]})
    task.cancel()
    assert turns >= socket.sent / 2**15


def output_of(counts, cached):
    choices = [CompletionOutput(index, token_ids=[1] * count) for index, count in enumerate(counts)]
    return RequestOutput("x", None, [1, 2], choices, False, RequestMetrics(0.0), num_cached_tokens=cached)


def test_usage_is_the_sum_of_the_newest_outputs():
    rng = random.Random(5)
    usage = Usage([Prompt([1, 2])] * 3)
    newest = {index: ([0] * 4, 0) for index in range(3)}
    for _ in range(200):
        index = rng.randrange(3)
        before = sum(sum(counts) for counts, _ in newest.values())
        counts = [count + rng.randrange(3) for count in newest[index][0]]
        newest[index] = counts, rng.randrange(3)
        tokens, _ = usage.see(index, output_of(*newest[index]))
        completion = sum(sum(counts) for counts, _ in newest.values())
        assert tokens == completion - before
        assert usage.json() == {
            "prompt_tokens": 6,
            "completion_tokens": completion,
            "total_tokens": 6 + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in newest.values())},
        }


def test_the_usage_of_many_choices_costs_a_chunk_no_more_than_that_of_few():
    usage = Usage([Prompt([1])] * 1000)
    for index in range(1000):
        assert usage.see(index, output_of([1] * 100, 0)) == (100, 100)
    begin = time.thread_time()
    for _ in range(10_000):
        usage.json()
    assert time.thread_time() - begin < 1.0  # sums over all choices take a hundred
