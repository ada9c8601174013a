"""`LLM` in wrong hands: wrong arguments, many threads, event loops that are gone, no `close`."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import jax
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.async_engine import RequestStream
from jaxserve.errors import EngineDeadError, InvalidRequestError
from tests.jaxserve.tiny import tiny_llm

pytestmark = pytest.mark.quick
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Any:
    with tiny_llm() as made:
        yield made


WRONG_PROMPTS = [
    *(None, 5, 5.5, b"abc", object(), {1, 2}, iter([1]), "", "text for a model without a tokenizer"),
    *([5.5], [b"x"], [None], [True], [2**70], [[]], {}, {"prompt": 5}),
    *({"prompt_token_ids": 5}, {"prompt_token_ids": "ab"}, {"prompt_token_ids": []}),
]


@pytest.mark.parametrize("prompt", WRONG_PROMPTS, ids=lambda prompt: type(prompt).__name__)
def test_a_wrong_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate(prompt, SHORT)
    with pytest.raises(InvalidRequestError):
        asyncio.run(llm.async_generate(prompt, SHORT))


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 5, "x", [None], [{}], [SHORT, SHORT], []], ids=repr)
def test_wrong_sampling_params_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([[1, 2]], params)
    assert caught.value.param == "sampling_params"


def test_many_threads_generate_at_once(llm: LLM) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate([[3, i] for i in range(10)], SHORT)]
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = llm.generate([3, i], SHORT)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(10)] == expected


def test_outputs_for_a_closed_event_loop_do_not_end_the_engine(llm: LLM) -> None:
    async def make() -> RequestStream:
        return RequestStream(llm._loop, "gone", final_only=False)

    stream = asyncio.run(make())
    (output,) = llm.generate([1, 2, 3], SHORT)
    stream.put(output)
    stream.wake()
    stream.fail(EngineDeadError("late"))


def test_no_request_is_lost_between_the_last_step_and_the_end() -> None:
    """Whoever submits while the engine ends gets an answer or an error, and does not wait for ever."""
    llm = tiny_llm()
    outcomes = []

    def work() -> None:
        try:
            while True:
                llm.generate([1, 2, 3], SHORT)
        except EngineDeadError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    llm.close()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 4


def device_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_close_frees_the_devices_memory() -> None:
    before = device_bytes()
    llm = tiny_llm()
    llm.generate([1, 2, 3], SHORT)
    assert device_bytes() > before
    llm.close()
    assert device_bytes() == before
    with pytest.raises(EngineDeadError):
        llm.named_weights()


def test_an_llm_that_is_dropped_closes_itself() -> None:
    before = device_bytes()
    llm = tiny_llm()
    engine_thread = llm._loop._thread
    del llm
    assert device_bytes() == before
    assert not engine_thread.is_alive()
