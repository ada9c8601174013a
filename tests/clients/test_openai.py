"""The official SDK: every field it knows, both interfaces, its errors and its retries."""

from __future__ import annotations

import asyncio
import base64
import struct
import threading
from itertools import pairwise

import openai
import pytest

from tests.clients.served import Served, assert_same

MESSAGES = [{"role": "user", "content": "Hello there"}]


@pytest.fixture
def client(tiny: Served):
    with openai.OpenAI(base_url=tiny.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(tiny: Served):
    async with openai.AsyncOpenAI(base_url=tiny.base_url, api_key="none", max_retries=0) as client:
        yield client


def texts_of(chunks):
    """Choice index to its joined text, of a stream of either kind."""
    texts = {}
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
    return texts


def test_a_completion_with_every_common_field(client, tiny):
    sampling = {"temperature": 0, "seed": 7, "stop": ["zzzz"], "logit_bias": {"40": 2.5}, "user": "someone"}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    shape = {"max_tokens": 12, "n": 2, "best_of": 3, "logprobs": 3, "echo": True}
    answer = client.completions.create(model="tiny", prompt="Hello there", **sampling, **penalties, **shape)
    expected = tiny.again()
    assert [choice.text for choice in answer.choices] == [choice["text"] for choice in expected["choices"]]
    assert answer.choices[0].text.startswith("Hello there")
    shown = answer.choices[0].logprobs
    assert_same(shown.model_dump(), expected["choices"][0]["logprobs"])
    assert shown.token_logprobs[0] is None
    assert all(len(top) >= 3 for top in shown.top_logprobs[1:])
    assert answer.usage.completion_tokens == expected["usage"]["completion_tokens"] == 36
    assert tiny.sent[0].body["logit_bias"] == {"40": 2.5}


def test_the_log_likelihood_of_a_text_alone(client, tiny):
    asked = {"model": "tiny", "prompt": ["Hello there", "Hi"], "echo": True, "logprobs": 0}
    alone = client.completions.create(**asked, max_tokens=0)
    followed = client.completions.create(**asked, max_tokens=1)
    assert alone.usage.completion_tokens == 0
    for one, other in zip(alone.choices, followed.choices, strict=True):
        assert one.logprobs.tokens == other.logprobs.tokens[:-1]
        assert_same(one.logprobs.token_logprobs, other.logprobs.token_logprobs[:-1])
    assert [choice.text for choice in alone.choices] == ["Hello there", "Hi"]


def test_a_seed_repeats_and_another_differs(client):
    def sample(seed):
        return client.completions.create(model="tiny", prompt="Hi", max_tokens=12, seed=seed).choices[0].text

    assert sample(1) == sample(1) != sample(2)


def test_a_stop_string_ends_the_text_before_it(client):
    whole = (
        client.completions.create(model="tiny", prompt="Hello", max_tokens=40, temperature=0).choices[0].text
    )
    stop = whole[9:11]
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=40, temperature=0, stop=stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", ["Hello", ["Hello", "there"], [40, 41, 42], [[40, 41], [50]]])
def test_prompts_of_every_type_streamed_and_not(client, tiny, prompt):
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 10, "temperature": 0}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert tiny.sent[1].body["stream_options"] == {"include_usage": True}
    assert texts_of(chunks) == {choice.index: choice.text for choice in whole.choices}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_chat_streamed_and_not(client, tiny):
    asked = {
        "model": "tiny", "messages": MESSAGES, "max_completion_tokens": 16, "temperature": 0, "n": 2,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    expected = tiny.again()
    assert whole.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert_same(whole.choices[0].logprobs.model_dump(), expected["choices"][0]["logprobs"])
    assert whole.usage.completion_tokens == expected["usage"]["completion_tokens"]
    assert whole.usage.total_tokens == expected["usage"]["total_tokens"]
    assert whole.usage.prompt_tokens_details.cached_tokens is not None
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert texts_of(chunks) == {choice.index: choice.message.content for choice in whole.choices}
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    shown = [
        e
        for chunk in chunks
        for c in chunk.choices
        if c.index == 0 and c.logprobs
        for e in c.logprobs.content
    ]
    expected_tokens = [entry.model_dump() for entry in whole.choices[0].logprobs.content]
    assert_same([entry.model_dump() for entry in shown], expected_tokens)


def test_the_stream_helper_of_the_sdk_gathers_the_same_chat(client):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    text = client.chat.completions.create(**asked).choices[0].message.content
    asked["stop"] = text[-3:]  # the helper takes a text that was cut for an error
    with client.chat.completions.stream(**asked) as stream:
        done = [event for event in stream if event.type == "content.done"]
        final = stream.get_final_completion()
    assert done[0].content == final.choices[0].message.content == text[: text.index(text[-3:])]
    assert final.choices[0].finish_reason == "stop"


def test_an_explicit_none_goes_out_as_null_and_is_as_if_absent(client, tiny):
    nothing = dict.fromkeys(
        (
            "temperature",
            "top_p",
            "n",
            "seed",
            "stop",
            "logit_bias",
            "logprobs",
            "presence_penalty",
            "frequency_penalty",
        )
    )
    client.completions.create(
        model="tiny", prompt="Hi", max_tokens=3, best_of=None, suffix=None, echo=None, **nothing
    )
    client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, top_logprobs=None, tools=None, tool_choice=None,
        response_format=None, stream_options=None, metadata=None, store=None, stream=None, **nothing,
    )  # fmt: skip
    assert [sent.status for sent in tiny.sent] == [200, 200]
    for body in tiny.bodies():
        assert all(body[name] is None for name in nothing)
    assert tiny.sent[1].body["tools"] is None


def test_fields_of_other_servers_through_extra_body(client, tiny):
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 8}
    greedy = client.completions.create(**asked, temperature=0).choices[0].text
    assert client.completions.create(**asked, extra_body={"top_k": 1}).choices[0].text == greedy
    assert client.completions.create(**asked, extra_body={"min_p": 1.0}).choices[0].text == greedy
    client.completions.create(
        **asked, extra_body={"ignore_eos": True, "min_tokens": 8, "repetition_penalty": 1.1}
    )
    assert tiny.sent[-1].body["ignore_eos"] is True
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**asked, extra_body={"top_k": 0.5})
    assert refused.value.param == "top_k"


async def test_the_async_client_runs_many_at_once(async_client, tiny):
    def ask(i):
        return async_client.completions.create(
            model="tiny", prompt=f"Number {i}", max_tokens=8, temperature=0
        )

    answers = await asyncio.gather(*map(ask, range(12)))
    for i, answer in enumerate(answers):
        asked = {"prompt": f"Number {i}", "max_tokens": 8, "temperature": 0}
        assert answer.choices[0].text == tiny.raw("/v1/completions", asked)["choices"][0]["text"]


async def test_an_async_chat_streams(async_client):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = await async_client.chat.completions.create(**asked)
    chunks = [chunk async for chunk in await async_client.chat.completions.create(**asked, stream=True)]
    assert texts_of(chunks) == {0: whole.choices[0].message.content}


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")


def test_embeddings_come_as_base64_by_default(client, tiny):
    answer = client.embeddings.create(model="tiny", input=["Hello", "there"])
    sent = tiny.sent[0].body
    assert sent["encoding_format"] == "base64"
    expected = tiny.raw("/v1/embeddings", {**sent, "encoding_format": "float"})
    packed = tiny.raw("/v1/embeddings", sent)
    for item, plain, packed_item in zip(answer.data, expected["data"], packed["data"], strict=True):
        assert item.embedding == pytest.approx(plain["embedding"], rel=1e-6)
        raw = base64.b64decode(packed_item["embedding"])
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(plain["embedding"], rel=1e-6)
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"] > 0
    by_id = client.embeddings.create(model="tiny", input=[[40, 41, 42]], encoding_format="float")
    assert len(by_id.data[0].embedding) == len(answer.data[0].embedding)


def test_the_request_id_is_the_clients_or_made(client):
    given = client.completions.with_raw_response.create(
        model="tiny", prompt="Hi", max_tokens=2, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert given.headers["x-request-id"] == "mine-1"
    assert given.parse()._request_id == "mine-1"
    made = client.completions.create(model="tiny", prompt="Hi", max_tokens=2)._request_id
    assert made
    assert made != "mine-1"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="Hi", temperature=9)
    assert refused.value.request_id


def test_errors_are_the_classes_of_the_sdk(client, tiny, strict):
    cases = [
        (openai.BadRequestError, "prompt", {"prompt": ""}),
        (openai.BadRequestError, "temperature", {"prompt": "Hi", "temperature": 3}),
        (openai.BadRequestError, "prompt", {"prompt": "Hi " * 600}),
        (openai.NotFoundError, "model", {"prompt": "Hi", "model": "other"}),
    ]
    for kind, param, body in cases:
        with pytest.raises(kind) as refused:
            client.completions.create(**{"model": "tiny", **body})
        assert refused.value.param == param
        assert refused.value.body["message"]
    with (
        openai.OpenAI(base_url=strict.base_url, api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    assert len(strict.sent) == 1
    with openai.OpenAI(base_url=strict.base_url, api_key="right") as friend:
        assert len(friend.models.list().data) == 1


def test_a_bad_request_is_sent_once(tiny):
    with (
        openai.OpenAI(base_url=tiny.base_url, api_key="none") as client,
        pytest.raises(openai.BadRequestError),
    ):
        client.chat.completions.create(model="tiny", messages=[], max_tokens=2)
    assert [sent.status for sent in tiny.sent] == [400]


def test_a_full_queue_is_retried_when_the_server_says(strict):
    with openai.OpenAI(base_url=strict.base_url, api_key="right", max_retries=0) as client:
        asked = {
            "model": "tiny",
            "prompt": "Hi",
            "max_tokens": 500,
            "stream": True,
            "extra_body": {"ignore_eos": True},
        }
        running = client.completions.create(**asked)
        next(iter(running))
        waiting = threading.Thread(target=lambda: client.completions.create(**{**asked, "stream": False}))
        waiting.start()
        strict.wait_until("vllm:num_requests_waiting", 1)
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(model="tiny", prompt="Hi", max_tokens=2)
        retry_after = float(full.value.response.headers["retry-after"])
        strict.sent.clear()
        answer = client.with_options(max_retries=20).completions.create(
            model="tiny", prompt="Hi", max_tokens=2
        )
        assert answer.usage.completion_tokens == 2
        running.close()
        waiting.join()
    mine = [sent for sent in strict.sent if sent.body["max_tokens"] == 2]
    assert [sent.status for sent in mine] == [429] * (len(mine) - 1) + [200]
    assert len(mine) > 1
    gaps = [later.time - earlier.time for earlier, later in pairwise(mine)]
    assert min(gaps) >= retry_after


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_pages(client, tiny, streams):
    asked = {"model": "tiny", "prompt": ["Hello"] * 8, "max_tokens": 500, "extra_body": {"ignore_eos": True}}
    if streams:
        stream = client.completions.create(**asked, stream=True)
        next(iter(stream))
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.2).completions.create(**asked)
    tiny.wait_until("vllm:num_requests_running", 0)
    tiny.wait_until("vllm:kv_cache_usage_perc", 0)
    assert tiny.metric("vllm:num_requests_waiting") == 0


def test_what_is_not_there_yet_is_refused_by_name(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    cases = {
        "tools": [tool],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object"}},
        },
    }
    for name, value in cases.items():
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=MESSAGES, **{name: value})
        assert refused.value.param == name
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="Hi")


@pytest.mark.real
def test_the_default_model_knows_the_capital_of_france(real):
    with openai.OpenAI(base_url=real.base_url, api_key="none") as client:
        answer = client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": "What is the capital of France? One word."}],
            temperature=0,
        )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 60
