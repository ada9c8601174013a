"""langchain-openai: the chat model, the legacy completion model, embeddings."""

from __future__ import annotations

import openai
import pytest
import tiktoken
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.clients.served import Served


@pytest.fixture
def chat(tiny: Served):
    return ChatOpenAI(
        model="tiny", base_url=tiny.base_url, api_key="none", temperature=0, max_tokens=12, max_retries=0
    )


def content_of(answer):
    return answer["choices"][0]["message"]["content"]


def test_invoke_sends_max_completion_tokens_and_an_explicit_no_to_streaming(chat, tiny):
    answer = chat.invoke([SystemMessage("Be short."), HumanMessage("Hello")])
    sent = tiny.sent[0].body
    assert sent["stream"] is False
    assert sent["max_completion_tokens"] == 12
    assert "max_tokens" not in sent
    expected = tiny.again()
    assert answer.content == content_of(expected)
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == "tiny"
    assert answer.usage_metadata["output_tokens"] == expected["usage"]["completion_tokens"] == 12
    assert answer.usage_metadata["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_a_stream_joins_to_the_whole_and_brings_the_usage(tiny):
    chat = ChatOpenAI(
        model="tiny", base_url=tiny.base_url, api_key="none", temperature=0, max_tokens=12, stream_usage=True
    )
    chunks = list(chat.stream("Hello"))
    assert tiny.sent[0].body["stream_options"] == {"include_usage": True}
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    expected = tiny.again()
    assert joined.content == content_of(expected)
    assert joined.usage_metadata["total_tokens"] == expected["usage"]["total_tokens"]
    assert joined.response_metadata["finish_reason"] == "length"


def test_a_batch(chat, tiny):
    answers = chat.batch(["Hello", "there", "again"])
    for prompt, answer in zip(("Hello", "there", "again"), answers, strict=True):
        asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 12, "temperature": 0}
        assert answer.content == content_of(tiny.raw("/v1/chat/completions", asked))


async def test_ainvoke_and_astream(chat, tiny):
    answer = await chat.ainvoke("Hello")
    pieces = [chunk.content async for chunk in chat.astream("Hello")]
    assert answer.content == "".join(pieces) == content_of(tiny.again(0))


def test_logprobs(chat, tiny):
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    shown = answer.response_metadata["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in shown).decode(errors="replace") == answer.content
    assert all(len(entry["top_logprobs"]) == 2 for entry in shown)


def test_a_history_with_tool_turns_is_rendered(chat, tiny):
    call = {"name": "weather", "args": {"city": "Oslo"}, "id": "call-1"}
    history = [
        HumanMessage("How is the weather?", name="ann"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("rain", tool_call_id="call-1", name="weather"),
        HumanMessage("And now?"),
    ]
    answer = chat.invoke(history)
    person, assistant, tool, _ = tiny.sent[0].body["messages"]
    assert person["name"] == "ann"
    assert assistant["content"] is None
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert tool["role"] == "tool"
    assert answer.content == content_of(tiny.again())


class Person(BaseModel):
    """Somebody."""

    name: str


def test_tools_and_structured_output_are_refused_by_name(chat, tiny):
    cases = {
        "json_schema": ("response_format", {"strict": True}),
        "function_calling": ("tools", {}),
        "json_mode": ("response_format", {}),
    }
    for method, (field, options) in cases.items():
        with pytest.raises(openai.BadRequestError) as refused:
            chat.with_structured_output(Person, method=method, **options).invoke("Who?")
        assert refused.value.param == field, method
    schema = tiny.sent[0].body["response_format"]
    assert schema["type"] == "json_schema"
    assert schema["json_schema"]["strict"] is True
    assert tiny.sent[1].body["tool_choice"] == {"type": "function", "function": {"name": "Person"}}
    assert tiny.sent[1].body["parallel_tool_calls"] is False
    with pytest.raises(openai.BadRequestError) as refused:
        chat.bind_tools([Person]).invoke("Who?")
    assert refused.value.param == "tools"


def test_a_prompt_over_the_context_is_the_error_that_langchain_knows(chat):
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError, match="maximum context length is 512 tokens"):
        chat.invoke("Hello " * 600)


def test_the_legacy_model_sends_nulls_penalties_and_best_of(tiny):
    llm = OpenAI(
        model="tiny", base_url=tiny.base_url, api_key="none", temperature=0, max_tokens=8, n=2, best_of=3,
        presence_penalty=0.1, frequency_penalty=0.1,
    )  # fmt: skip
    generations = llm.generate(["Hello", "there"], stop=["zzzz"]).generations
    sent = tiny.sent[0].body
    assert sent["prompt"] == ["Hello", "there"]
    assert (sent["n"], sent["best_of"], sent["stop"]) == (2, 3, ["zzzz"])
    assert (sent["presence_penalty"], sent["frequency_penalty"]) == (0.1, 0.1)
    assert sent["seed"] is None
    assert sent["logprobs"] is None
    choices = tiny.again()["choices"]
    assert [g.text for row in generations for g in row] == [choice["text"] for choice in choices]


async def test_the_legacy_model_streams(tiny):
    llm = OpenAI(model="tiny", base_url=tiny.base_url, api_key="none", temperature=0, max_tokens=8)
    text = llm.invoke("Hello")
    assert "".join(llm.stream("Hello")) == text == tiny.again(0)["choices"][0]["text"]
    assert "".join([piece async for piece in llm.astream("Hello")]) == text


@pytest.fixture
def tiktoken_of_bytes(monkeypatch):
    """The model `tiny` gets an encoding of one id for a byte: tiktoken's own are downloads."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "bytes", encoding)
    monkeypatch.setitem(tiktoken.model.MODEL_TO_ENCODING, "tiny", "bytes")
    return encoding


async def test_embeddings_are_of_arrays_of_token_ids(tiny, tiktoken_of_bytes):
    embeddings = OpenAIEmbeddings(model="tiny", base_url=tiny.base_url, api_key="none")
    vectors = embeddings.embed_documents(["Hello", "there, you"])
    assert tiny.sent[0].body["input"] == [list(b"Hello"), list(b"there, you")]
    expected = tiny.raw("/v1/embeddings", {**tiny.sent[0].body, "encoding_format": "float"})["data"]
    assert [len(vector) for vector in vectors] == [len(item["embedding"]) for item in expected]
    for vector, item in zip(vectors, expected, strict=True):
        assert vector == pytest.approx(item["embedding"], rel=1e-4, abs=1e-6)
    assert await embeddings.aembed_query("Hello") == pytest.approx(vectors[0], rel=1e-4, abs=1e-6)


def test_embeddings_are_of_strings_where_the_length_check_is_off(tiny):
    embeddings = OpenAIEmbeddings(
        model="tiny", base_url=tiny.base_url, api_key="none", check_embedding_ctx_length=False
    )
    (vector,) = embeddings.embed_documents(["Hello"])
    assert tiny.sent[0].body["input"] == ["Hello"]
    asked = {"input": "Hello", "encoding_format": "float"}
    expected = tiny.raw("/v1/embeddings", asked)["data"][0]["embedding"]
    assert vector == pytest.approx(expected, rel=1e-4, abs=1e-6)
