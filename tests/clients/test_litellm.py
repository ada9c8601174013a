"""litellm: the providers that gateways use for servers of their own."""

from __future__ import annotations

import litellm
import pytest

from tests.clients.served import Served

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def asked(tiny: Served):
    return {
        "model": "hosted_vllm/tiny",
        "api_base": tiny.base_url,
        "max_tokens": 10,
        "temperature": 0,
        "num_retries": 0,
    }


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_a_chat(asked, tiny, provider):
    answer = litellm.completion(
        **{**asked, "model": f"{provider}/tiny"}, messages=MESSAGES, api_key="fake-api-key"
    )
    assert tiny.sent[0].headers["authorization"] == "Bearer fake-api-key"
    assert tiny.sent[0].body["model"] == "tiny"
    expected = tiny.again()
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert answer.usage.total_tokens == expected["usage"]["total_tokens"]
    assert answer.choices[0].finish_reason == "length"


def test_without_a_key_it_sends_a_fake_one(asked, tiny):
    litellm.completion(**asked, messages=MESSAGES)
    assert tiny.sent[0].headers["authorization"] == "Bearer fake-api-key"
    assert tiny.sent[0].status == 200


def test_a_stream(asked, tiny):
    chunks = list(
        litellm.completion(**asked, messages=MESSAGES, stream=True, stream_options={"include_usage": True})
    )
    expected = tiny.again()
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == expected["choices"][0]["message"]["content"]
    (usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usage.total_tokens == expected["usage"]["total_tokens"]
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == text


async def test_acompletion_whole_and_streamed(asked, tiny):
    answer = await litellm.acompletion(**asked, messages=MESSAGES)
    stream = await litellm.acompletion(**asked, messages=MESSAGES, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == answer.choices[0].message.content == tiny.again(0)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("provider", ["hosted_vllm", "text-completion-openai"])
def test_a_text_completion_whole_and_streamed(asked, tiny, provider):
    asked |= {"model": f"{provider}/tiny", "api_key": "fake-api-key"}
    answer = litellm.text_completion(**asked, prompt="Hello", logprobs=1)
    assert tiny.sent[0].path == "/v1/completions"
    expected = tiny.again()["choices"][0]
    assert answer.choices[0].text == expected["text"]
    assert answer.choices[0].logprobs.tokens == expected["logprobs"]["tokens"]
    pieces = litellm.text_completion(**asked, prompt="Hello", stream=True)
    assert "".join(piece.choices[0].text or "" for piece in pieces) == answer.choices[0].text


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_an_embedding(asked, tiny, provider):
    answer = litellm.embedding(
        model=f"{provider}/tiny", api_base=asked["api_base"], api_key="fake-api-key", input=["Hello", "there"]
    )
    expected = tiny.raw("/v1/embeddings", {"input": ["Hello", "there"], "encoding_format": "float"})
    for item, other in zip(answer.data, expected["data"], strict=True):
        assert item["embedding"] == pytest.approx(other["embedding"], rel=1e-4, abs=1e-6)
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_errors_are_litellms_own(asked, tiny, provider):
    asked |= {"model": f"{provider}/tiny", "api_key": "fake-api-key", "max_retries": 0}
    with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length is 512 tokens"):
        litellm.completion(**asked, messages=[{"role": "user", "content": "Hello " * 600}])
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**asked, messages=MESSAGES, top_p=2)
    with pytest.raises(litellm.NotFoundError, match="other"):
        litellm.completion(**{**asked, "model": f"{provider}/other"}, messages=MESSAGES)
    assert [sent.status for sent in tiny.sent] == [400, 400, 404]


def test_a_wrong_key_is_an_authentication_error(asked, strict):
    asked |= {"api_base": strict.base_url, "max_retries": 0}
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asked, messages=MESSAGES)
    assert litellm.completion(**asked, messages=MESSAGES, api_key="right").choices[0].message.content


def test_strict_does_not_reach_the_server(asked, tiny):
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
    with pytest.raises(litellm.BadRequestError, match="tools is not s"):
        litellm.completion(**asked, messages=MESSAGES, tools=[tool])
    assert "strict" not in tiny.sent[0].body["tools"][0]["function"]


async def test_a_gateway_reads_the_context_from_the_model_card(tiny):
    from litellm.caching.in_memory_cache import InMemoryCache
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler
    from litellm.llms.openai_like.model_info import get_openai_compatible_model_info

    client = AsyncHTTPHandler()
    info = await get_openai_compatible_model_info(
        model="tiny", api_base=tiny.base_url, headers={}, client=client, cache=InMemoryCache()
    )
    await client.close()
    assert info["max_input_tokens"] == info["max_tokens"] == 512
