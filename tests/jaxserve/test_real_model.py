"""SmolLM2-135M-Instruct itself: greedy tokens, log-probabilities, chat."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from jaxserve import LLM, SamplingParams
from tests.jaxserve.tiny import GOLDENS

pytestmark = pytest.mark.real
GOLDEN = json.loads((GOLDENS / "real" / "smollm2" / "generation.json").read_text())


def engine(quantization: str) -> LLM:
    return LLM(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
        warmup="none",
        quantization=quantization,
    )


@pytest.fixture(scope="module")
def exact() -> Iterator[LLM]:
    with engine("none") as made:
        yield made
        made.check_integrity()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """As it is served: with packed weights, where this machine has native kernels."""
    with engine("auto") as made:
        yield made
        made.check_integrity()


@pytest.mark.parametrize("index", range(len(GOLDEN)))
def test_greedy_tokens_and_top_20_logprobs_equal_the_golden_ones(exact: LLM, index: int) -> None:
    golden = GOLDEN[index]
    params = SamplingParams(
        temperature=0, max_tokens=len(golden["greedy"]), ignore_eos=True, logprobs=20, prompt_logprobs=0
    )
    output = exact.generate([golden["input_ids"]], params)[0]
    choice = output.outputs[0]
    assert choice.token_ids == golden["greedy"]
    assert choice.logprobs is not None
    assert output.prompt_logprobs is not None
    for step, found in enumerate(choice.logprobs):
        expected = dict(zip(golden["top_ids"][step], golden["top_logprobs"][step], strict=True))
        assert len(found) == 20
        for token_id, logprob in expected.items():
            assert found[token_id].logprob == pytest.approx(logprob, abs=1e-3)
    for position in range(1, len(golden["input_ids"])):
        entry = output.prompt_logprobs[position]
        assert entry is not None
        logprob = entry[golden["input_ids"][position]].logprob
        assert logprob == pytest.approx(golden["prompt_logprobs"][position], abs=1e-3)


def test_the_capital_of_france(llm: LLM) -> None:
    output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))[0]
    assert output.outputs[0].text.startswith(" Paris")


def test_chat_answers_and_ends_by_itself(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    output = llm.chat([{"role": "user", "content": "What is the capital of France? One word."}], params)[0]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text
