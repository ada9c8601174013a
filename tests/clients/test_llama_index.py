"""llama-index's OpenAILike: completions by default, chat where it is told so."""

from __future__ import annotations

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from tests.clients.served import Served


@pytest.fixture
def llm(tiny: Served):
    return OpenAILike(model="tiny", api_base=tiny.base_url, api_key="fake", max_tokens=10, max_retries=0)


@pytest.fixture
def chat_llm(tiny: Served):
    return OpenAILike(
        model="tiny", api_base=tiny.base_url, api_key="fake", max_tokens=10, is_chat_model=True, temperature=0
    )


GREEDY = {"temperature": 0}
HISTORY = [ChatMessage("Be short.", role="system"), ChatMessage("Hello", role="user")]


def test_complete_goes_to_completions_with_temperature_a_tenth(llm, tiny):
    assert len(llm.complete("Hello").text) > 0
    sent = tiny.sent[0]
    assert sent.path == "/v1/completions"
    assert sent.body["temperature"] == 0.1
    assert (sent.body["prompt"], sent.body["max_tokens"]) == ("Hello", 10)


async def test_completions_of_all_four_kinds_agree(llm, tiny):
    text = llm.complete("Hello", **GREEDY).text
    assert text == tiny.again()["choices"][0]["text"]
    assert list(llm.stream_complete("Hello", **GREEDY))[-1].text == text
    assert (await llm.acomplete("Hello", **GREEDY)).text == text
    assert [part async for part in await llm.astream_complete("Hello", **GREEDY)][-1].text == text
    assert all(sent.path == "/v1/completions" for sent in tiny.sent)
    assert tiny.sent[1].body["stream"] is True


def test_a_model_not_for_chat_sends_a_conversation_as_one_prompt(llm, tiny):
    answer = llm.chat(HISTORY, **GREEDY)
    assert tiny.sent[0].path == "/v1/completions"
    assert answer.message.content == tiny.again()["choices"][0]["text"]


async def test_chats_of_all_four_kinds_agree(chat_llm, tiny):
    answer = chat_llm.chat(HISTORY)
    text = answer.message.content
    expected = tiny.again()
    assert text == expected["choices"][0]["message"]["content"]
    assert answer.raw.usage.completion_tokens == expected["usage"]["completion_tokens"]
    parts = list(chat_llm.stream_chat(HISTORY))
    assert "".join(part.delta or "" for part in parts) == parts[-1].message.content == text
    assert (await chat_llm.achat(HISTORY)).message.content == text
    assert [part async for part in await chat_llm.astream_chat(HISTORY)][-1].message.content == text
    assert all(sent.path == "/v1/chat/completions" for sent in tiny.sent)


def test_nulls_for_tools_are_as_if_absent(chat_llm, tiny):
    answer = chat_llm.chat(HISTORY, tools=None, tool_choice=None)
    sent = tiny.sent[0].body
    assert sent["tools"] is None
    assert sent["tool_choice"] is None
    assert answer.message.content == tiny.again()["choices"][0]["message"]["content"]


def test_chat_with_tools_and_none_given_is_answered(tiny):
    llm = OpenAILike(
        model="tiny", api_base=tiny.base_url, api_key="fake", max_tokens=10, is_chat_model=True,
        is_function_calling_model=True, temperature=0,
    )  # fmt: skip
    answer = llm.chat_with_tools([], "Hello")
    assert answer.message.content == tiny.again()["choices"][0]["message"]["content"]


def test_an_error_is_the_sdks(llm, tiny):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        llm.complete("Hello " * 600)
    assert len(tiny.sent) == 1
