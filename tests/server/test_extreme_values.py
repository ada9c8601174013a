"""Sampling fields at the ends of their ranges, many at once, on a real engine: answers, never failures."""

import asyncio
import json
import random

from live import is_idle, live

EVERY_ID = list(range(400))
ENDS = {
    "temperature": [0, 5e-324, 1e-30, 1, 2],
    "top_p": [5e-324, 1e-7, 0.5, 1],
    "top_k": [-1, 0, 1, 399, 400, 401, 2**31 - 1],
    "min_p": [0, 1e-300, 0.5, 1],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [5e-324, 0.5, 1, 2, 1.7e308],
    "seed": [-(2**63), -1, 0, 2**32 - 1, 2**63 - 1],
    "n": [1, 2, 3, 16],
    "stop": [["a", "ab", "b"], "\0", "\ufffd", ["😀"]],
    "stop_token_ids": [[0], [399], EVERY_ID],
    "allowed_token_ids": [[0], [2], [1, 2, 3, 4], EVERY_ID],
    "bad_words": [["a"], [" "], ["\ufffd"], ["<|end|>"], ["日本"], ["a " * 500]],
    "logit_bias": [{"2": 1e308}, {"5": 5e-324}, *({str(i): b for i in range(300)} for b in (-1e300, 100))],
    "min_tokens": [0, 1, 5],
    "max_tokens": [5, 6],
    "prompt_logprobs": [0, 20],
    "logprobs": [0, 20],
    "priority": [-(2**63), 2**63 - 1],
    "truncate_prompt_tokens": [-1, 1, 2**63 - 1],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "echo": [True],
    "return_token_ids": [True],
}
PROMPTS = ["x", [0], [399, 1, 2], "日本" * 20, ["a", "b"]]


def no_number(name):
    raise AssertionError(f"{name} is not JSON")


async def test_values_at_the_ends_of_their_ranges():
    async with live("llama") as api:
        numbers = iter(range(200))

        async def client():
            for number in numbers:
                rng = random.Random(number)
                fields = rng.sample(sorted(ENDS), rng.randint(2, 9))
                body = {"max_tokens": 5} | {name: rng.choice(ENDS[name]) for name in fields}
                body |= {"prompt": rng.choice(PROMPTS)}
                body["stream"] = rng.random() < 0.4 and "prompt_logprobs" not in body
                async with api.http.post("/v1/completions", json=body) as response:
                    raw = await response.text()
                assert response.status == 200, (raw, body)
                frames = [line[6:] for line in raw.split("\n\n")[:-2]] if body["stream"] else [raw]
                for frame in frames:
                    answer = json.loads(frame, parse_constant=no_number)
                    assert "error" not in answer, body

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(client())
        assert await is_idle(api.engine)
