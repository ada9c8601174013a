"""Streams: their frames, and that they say what the whole answer says."""

import pytest
from conftest import messages, running
from fake_engine import FakeEngine
from test_metrics import counted, scrape

from jaxserve_server.config import ServerConfig

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MIXED = "aé€😀 stop".encode()
ASKED = [
    {"max_tokens": 12},
    {"max_tokens": 12, "n": 3},
    {"max_tokens": 30, "stop": ["stop"]},
    {"max_tokens": 30, "stop": ["😀 s", "zzz"]},
    {"max_tokens": 30, "stop": "top", "include_stop_str_in_output": True},
    {"max_tokens": 5},  # ends inside a character
    {"max_tokens": 30, "min_tokens": 20, "stop": "stop"},
    {"max_tokens": 40, "ignore_eos": False},
]


def joined(events, key):
    """{index: (text, finish reason, stop reason)} of a stream's chunks."""
    texts, ends = {}, {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if key == "text" else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            if choice["finish_reason"] is not None:
                assert choice["index"] not in ends
                ends[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
    return {index: (text, *ends[index]) for index, text in texts.items()}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("eos_after", [None, 7])
async def test_a_stream_joins_to_the_whole_answer(asked, eos_after):
    async with running(FakeEngine(alphabet=MIXED, eos_after=eos_after)) as api:
        whole = await api.complete("some prompt", **asked)
        events = await api.events(COMPLETIONS, prompt="some prompt", **asked)
        chat_whole = await api.chat("hi", **asked)
        chat_events = await api.events(CHAT, messages=messages("hi"), **asked)
    assert joined(events, "text") == {
        c["index"]: (c["text"], c["finish_reason"], c["stop_reason"]) for c in whole["choices"]
    }
    assert joined(chat_events, "content") == {
        c["index"]: (c["message"]["content"], c["finish_reason"], c["stop_reason"])
        for c in chat_whole["choices"]
    }


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("echo", [False, True])
async def test_logprobs_of_a_stream_join_to_those_of_the_whole_answer(asked, echo):
    asked = {**asked, "logprobs": 2, "echo": echo}
    async with running(FakeEngine(alphabet=MIXED)) as api:
        whole = await api.complete(["one", "another"], **asked)
        events = await api.events(COMPLETIONS, prompt=["one", "another"], **asked)
    lists = {}
    for event in events:
        for choice in event["choices"]:
            mine = lists.setdefault(choice["index"], {})
            for name, values in (choice["logprobs"] or {}).items():
                mine.setdefault(name, []).extend(values)
    assert lists == {choice["index"]: choice["logprobs"] for choice in whole["choices"]}


async def test_the_frames_of_a_chat_stream(api):
    events = await api.events(CHAT, messages=messages("hi"), n=2, max_tokens=3)
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    roles = [c["index"] for e in events for c in e["choices"] if "role" in c["delta"]]
    assert roles == [0, 1]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in event for event in events)
    for event in events:
        for choice in event["choices"]:
            assert {"index", "delta", "logprobs", "finish_reason"} <= choice.keys()


async def test_no_chunk_without_text():
    async with running(FakeEngine(alphabet="😀".encode())) as api:
        events = await api.events(COMPLETIONS, prompt=[1, 2, 3, 4], max_tokens=8)
        chat_events = await api.events(CHAT, messages=messages("x" * 19), max_tokens=8)  # 36 tokens
    assert [event["choices"][0]["text"] for event in events] == ["😀", "😀"]
    assert [event["choices"][0]["delta"]["content"] for event in chat_events] == ["", "😀", "😀"]


async def test_usage_comes_last_and_only_when_asked_for(api):
    asked = {"messages": messages("hi"), "n": 2, "max_tokens": 3}
    whole = await api.post(CHAT, **asked)
    events = await api.events(CHAT, **asked, stream_options={"include_usage": True})
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"] == whole[1]["usage"]
    assert all(event["usage"] is None and event["choices"] for event in chunks)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_keys_come_in_the_order_of_openais(api, path):
    asked = {"prompt": "hi", "messages": messages("hi"), "max_tokens": 2, "return_token_ids": True}
    order = ["id", "object", "created", "model", "choices", "usage"]
    status, whole = await api.post(path, **asked)
    assert (status, list(whole)[:6]) == (200, order)
    for event in await api.events(path, **asked, stream_options={"include_usage": True}):
        assert list(event)[:6] == order


async def test_usage_may_be_on_every_chunk(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await api.events(COMPLETIONS, prompt="hi", max_tokens=3, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_error_in_the_middle_is_an_event_before_done(path):
    async with running(FakeEngine(fail_after=2)) as api:
        events = await api.events(path, prompt="hi", messages=messages("hi"), max_tokens=9)
    *chunks, last = events
    assert len(chunks) >= 2
    assert last["error"]["code"] == "engine_dead"
    assert last["error"]["type"] == "server_error"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_failure_in_the_middle_counts_as_a_rejection(path):
    asked = {"prompt": "hi", "messages": messages("hi"), "max_tokens": 9}
    async with running(FakeEngine(fail_after=2)) as api:
        await api.events(path, **asked)
        samples = await scrape(api)
        assert counted(samples, "request_rejections_total", reason="engine_dead", api_key="") == 1
    async with running(FakeEngine(pause_after=2), ServerConfig(request_timeout=0.3)) as api:
        *_, last = await api.events(path, **asked)
        assert last["error"]["code"] == "request_timeout"
        samples = await scrape(api)
        assert counted(samples, "request_rejections_total", reason="request_timeout", api_key="") == 1


async def test_a_failure_before_a_whole_answer_is_a_500():
    async with running(FakeEngine(fail_after=2)) as api:
        status, answer = await api.post(COMPLETIONS, prompt="hi", max_tokens=9)
    assert (status, answer["error"]["code"]) == (500, "engine_dead")


async def test_a_stream_with_a_wrong_parameter_is_a_plain_400(api, engine):
    status, answer = await api.post(COMPLETIONS, prompt="hi", stream=True, stop_token_ids=[10**6])
    assert (status, answer["error"]["param"]) == (400, "stop_token_ids")
    assert engine.seen == []


async def test_random_bytes_stream_as_valid_json():
    async with running(FakeEngine(alphabet=bytes(range(0, 256, 7)))) as api:
        events = await api.events(COMPLETIONS, prompt="hi", max_tokens=200, logprobs=5)
        whole = await api.complete("hi", max_tokens=200, logprobs=5)
    assert joined(events, "text")[0][0] == whole["choices"][0]["text"]


async def test_a_thousand_prompts_share_one_stream(engine):
    async with running(engine) as api:
        events = await api.events("/v1/completions", prompt=["hi"] * 1000, max_tokens=3)
    texts: dict[int, str] = {}
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert sorted(texts) == [*range(1000)]
    assert len(set(texts.values())) == 1
    assert sum(event["choices"][0]["finish_reason"] == "length" for event in events) == 1000
    assert engine.streams == {}
