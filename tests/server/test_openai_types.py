"""Every body and every chunk is what the official client's types say; the client itself does not check."""

import pytest
from conftest import messages
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COMMON = [
    {},
    {"n": 2, "stop": "fg"},
    {"max_tokens": 2},
    {"return_token_ids": True, "return_tokens_as_token_ids": True},
]
WITH_LOGPROBS = {CHAT: {"logprobs": True, "top_logprobs": 2}, COMPLETIONS: {"logprobs": 2}}
ASKED = [
    (path, {**more, **logprobs})
    for path in WITH_LOGPROBS
    for more in COMMON
    for logprobs in ({}, WITH_LOGPROBS[path])
]


@pytest.mark.parametrize(("path", "asked"), ASKED)
async def test_answers_and_chunks_are_of_the_official_types(api, path, asked):
    is_chat = path == CHAT
    body = {"max_tokens": 9, **asked} | (
        {"messages": messages("hi")} if is_chat else {"prompt": ["hi", "ho"]}
    )
    status, answer = await api.post(path, **body)
    assert status == 200
    whole = (ChatCompletion if is_chat else Completion).model_validate(answer)
    assert len(whole.choices) == body.get("n", 1) * (1 if is_chat else 2)
    assert whole.choices[0].finish_reason in ("stop", "length")
    events = await api.events(path, **body, stream_options={"include_usage": True})
    chunk = ChatCompletionChunk if is_chat else Completion
    if not is_chat:  # the type has no null, though the real service sends it until the end
        for event in events:
            for choice in event["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
    chunks = [chunk.model_validate(event) for event in events]
    assert chunks[-1].usage == whole.usage
