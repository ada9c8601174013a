"""The same request gives the same tokens whatever happens around it.

200 random requests of all sampling kinds run alone first; then together, in a pool so small that they are
preempted, with the prefix cache on and off, and in other chunk sizes.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxserve import LLM, RequestOutput, SamplingParams
from tests.jaxserve.tiny import TINY, random_arrays, tiny_llm

NUM_REQUESTS = 200
PREFIXES = 5  # many prompts begin alike, so that the prefix cache has something to find


def sampling(rng: random.Random) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 0.9},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.8, "frequency_penalty": -0.2},
        {"temperature": 1.0, "logit_bias": {5: 3.0, 7: -100.0}},
        {"temperature": 0.0, "allowed_token_ids": list(range(3, 40))},
        {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": list(range(20, 60))},
        {"temperature": 1.0, "stop_token_ids": list(range(20, 30))},
        {"temperature": 0.9, "logprobs": 3},
    ]
    return SamplingParams(max_tokens=rng.randint(6, 100), seed=rng.getrandbits(62), **rng.choice(kinds))


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(7)
    prefixes = [[rng.randrange(3, TINY.vocab_size) for _ in range(150)] for _ in range(PREFIXES)]
    prompts = []
    for _ in range(NUM_REQUESTS):
        length = round(600 ** rng.random())  # 1 to 600, short ones as likely as long ones
        prompt = [rng.randrange(3, TINY.vocab_size) for _ in range(length)]
        if rng.random() < 0.5:
            prefix = rng.choice(prefixes)
            prompt[: len(prefix)] = prefix[: len(prompt)]
        prompts.append(prompt)
    return prompts, [sampling(rng) for _ in prompts]


def engine(**args: Any) -> LLM:
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 704, "page_size": 16}
    return tiny_llm(**{**defaults, "num_pages": 16 * 44 + 1, **args})


def summary(output: RequestOutput) -> tuple[list[int], str | None, object]:
    choice = output.outputs[0]
    return choice.token_ids, choice.finish_reason, choice.stop_reason


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], str | None, object]]:
    prompts, params = requests()
    with engine(max_num_seqs=1, enable_prefix_caching=False) as llm:
        return [summary(llm.generate([p], s)[0]) for p, s in zip(prompts, params, strict=True)]


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"num_pages": 46, "enable_prefix_caching": False},
        {"num_pages": 46},
        {"num_pages": 46, "max_num_batched_tokens": 16, "page_size": 8, "scheduling_policy": "priority"},
    ],
    ids=[
        "batched",
        "no cache",
        "chunks of 16",
        "small pool, no cache",
        "small pool",
        "small pool, chunks of 16",
    ],
)
def test_tokens_are_those_of_the_request_alone(args: dict[str, Any], alone: list[Any]) -> None:
    prompts, params = requests()
    if args.get("page_size") == 8:
        args = {**args, "num_pages": 2 * args["num_pages"]}
    with engine(**args) as llm:
        outputs = llm.generate(prompts, params)
        llm.check_integrity()
        stats = llm.stats()
    assert [summary(o) for o in outputs] == alone
    assert stats.pages_used == 0
    if "num_pages" in args:
        assert stats.num_preemptions >= (20 if "max_num_batched_tokens" in args else 50)
    if args.get("enable_prefix_caching", True):
        assert stats.prefix_hits > 0
    else:
        assert stats.prefix_hits == 0


def test_logprobs_and_text_lengths_survive_preemption() -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, TINY.vocab_size) for _ in range(40)] for _ in range(12)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    with engine(num_pages=41, max_num_seqs=12) as small, engine(max_num_seqs=12) as large:
        tight, roomy = small.generate(prompts, params), large.generate(prompts, params)
        assert small.stats().num_preemptions > 0
    for a, b in zip(tight, roomy, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].logprobs is not None
        assert len(a.outputs[0].logprobs) == 60
        assert a.prompt_logprobs is not None
        assert b.prompt_logprobs is not None
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
            assert x is not None
            assert y is not None
            assert {k: v.logprob for k, v in x.items()} == pytest.approx(
                {k: v.logprob for k, v in y.items()}, abs=1e-4
            )


def test_a_seeded_request_repeats_and_unseeded_ones_differ() -> None:
    prompt = list(range(3, 20))
    with engine() as llm:
        seeded = SamplingParams(temperature=1.0, max_tokens=20, seed=5, n=3, ignore_eos=True)
        first, second = llm.generate([prompt, prompt], seeded)
        free = llm.generate([prompt] * 2, SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True))
    texts = [[c.token_ids for c in o.outputs] for o in (first, second)]
    assert texts[0] == texts[1]
    assert len({tuple(t) for t in texts[0]}) == 3
    assert free[0].outputs[0].token_ids != free[1].outputs[0].token_ids


def test_weights_are_those_of_the_arrays_given() -> None:
    """An engine of other weights answers otherwise: the comparison above compares something."""
    prompt = list(range(3, 30))
    greedy = SamplingParams(temperature=0, max_tokens=10)
    with engine() as llm:
        first = llm.generate([prompt], greedy)[0].outputs[0].token_ids
        llm.update_weights(random_arrays(seed=1))
        assert llm.generate([prompt], greedy)[0].outputs[0].token_ids != first
