"""Requests inside every bound whose sizes once hurt others: the engine lives on and nobody waits."""

from __future__ import annotations

import random
import re
import threading

import pytest
from live import is_idle, live

HUGE = 10**400  # no float has it


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_that_no_float_can_hold_is_cut_to_the_context(stream: bool) -> None:
    async with live() as api:
        for path, field, body in (
            ("/v1/completions", "max_tokens", {"prompt": [5] * 510}),
            ("/v1/chat/completions", "max_tokens", {"messages": [{"role": "user", "content": "a" * 440}]}),
            (
                "/v1/chat/completions",
                "max_completion_tokens",
                {"messages": [{"role": "user", "content": "a" * 440}]},
            ),
        ):
            request = {**body, field: HUGE, "ignore_eos": True, "stream": stream}
            async with api.http.post(path, json=request) as response:
                text = await response.text()
            assert response.status == 200, text
            assert '"finish_reason":"length"' in text.replace(" ", "")
        assert not api.engine.is_dead
        async with api.http.get("/metrics") as response:
            page = await response.text()
        assert [
            line for line in page.splitlines() if re.search(" (nan|[+-]?inf)$", line, re.IGNORECASE)
        ] == []
        assert await is_idle(api.engine)


async def test_long_bad_words_of_many_prompts_are_encoded_once_and_hold_nobody_up() -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij klmnop", k=1024)) for _ in range(256)]
    async with live() as api:
        encoded: list[str] = []
        threads: set[str] = set()
        encode = api.engine.tokenizer.bad_word_token_ids

        def counted(word: str) -> list[list[int]]:
            encoded.append(word)
            threads.add(threading.current_thread().name)
            return encode(word)

        api.engine.tokenizer.bad_word_token_ids = counted
        await api.complete([5], max_tokens=1)
        answer = await api.complete([[5]] * 200, max_tokens=1, bad_words=words)
        assert len(answer["choices"]) == 200
        assert encoded == words
        # Neither the event loop nor the engine waited for it.
        assert threads.isdisjoint({threading.current_thread().name, "engine"})
        assert await is_idle(api.engine)
