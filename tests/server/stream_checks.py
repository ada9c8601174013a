"""Reading a stream as a strict client does, and putting its chunks together to one answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

HEAD = ("id", "object", "created", "model")


@dataclass
class Joined:
    """The choices by index, as they would be in a whole answer, and the usage where there was one."""

    is_chat: bool
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Takes the choice of one chunk; its keys and its place in the stream are checked."""
        delta = choice["delta"] if self.is_chat else {"content": choice["text"]}
        assert {"index", "logprobs", "finish_reason"} <= choice.keys()
        if self.is_chat and choice["index"] not in self.choices:
            assert delta == {"role": "assistant", "content": ""}
            assert choice["finish_reason"] is choice["logprobs"] is None
            self.choices[choice["index"]] = _empty()
            return
        assert "role" not in delta, "the role comes once"
        mine = self.choices.setdefault(choice["index"], _empty())
        assert mine["finish_reason"] is None, "a chunk after the last one of its index"
        text, logprobs = delta.get("content", ""), choice["logprobs"]
        ends = choice["finish_reason"] is not None
        if not text and not ends:
            assert logprobs is not None, "a chunk that says nothing"
            assert logprobs["content" if self.is_chat else "tokens"], "a chunk that says nothing"
        mine["text"] += text
        mine["token_ids"] += choice.get("token_ids", [])
        if logprobs is not None:
            mine["logprobs"] = mine["logprobs"] or {}
            for name, values in logprobs.items():
                joined = mine["logprobs"].setdefault(name, None if values is None else [])
                if values is not None:
                    joined.extend(values)
        if ends:
            mine["finish_reason"] = choice["finish_reason"]
            mine["stop_reason"] = choice["stop_reason"]


def _empty() -> dict[str, Any]:
    return {"text": "", "token_ids": [], "logprobs": None, "finish_reason": None, "stop_reason": None}


def joined_stream(raw: bytes, *, is_chat: bool, wants_usage: bool, every_usage: bool = False) -> Joined:
    """The answer that the frames of a stream make; every rule of framing is checked on the way."""
    frames = raw.decode("utf-8").split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    events = []
    for frame in frames[:-2]:
        assert frame.startswith("data: {")
        assert "\n" not in frame
        events.append(json.loads(frame.removeprefix("data: ")))
    assert len({tuple(event[name] for name in HEAD) for event in events}) == 1
    assert events[0]["object"] == ("chat.completion.chunk" if is_chat else "text_completion")
    joined = Joined(is_chat)
    if wants_usage:
        last = events.pop()
        assert last["choices"] == []
        joined.usage = last["usage"]
    counted = 0
    for event in events:
        (choice,) = event["choices"]
        joined.add(choice)
        assert ("usage" in event) == wants_usage
        if wants_usage and every_usage:
            assert counted <= event["usage"]["completion_tokens"]
            counted = event["usage"]["completion_tokens"]
        elif wants_usage:
            assert event["usage"] is None
    assert all(choice["finish_reason"] is not None for choice in joined.choices.values())
    if wants_usage:
        assert joined.usage is not None
        assert counted in (0, joined.usage["completion_tokens"])
    joined.choices = dict(sorted(joined.choices.items()))
    return joined


def assert_same(streamed: dict[str, Any], whole: dict[str, Any], text: str) -> None:
    """A joined choice is the whole answer's; log-probabilities may differ by rounding."""
    assert streamed["text"] == text
    for name in ("finish_reason", "stop_reason", "token_ids"):
        assert streamed[name] == whole[name]
    assert_same_logprobs(streamed["logprobs"], whole["logprobs"])


def assert_same_logprobs(one: Any, other: Any) -> None:
    """Equal, numbers up to rounding."""
    assert type(one) is type(other)
    match one:
        case dict():
            assert list(one) == list(other)
            for name in one:
                assert_same_logprobs(one[name], other[name])
        case list():
            assert len(one) == len(other)
            for left, right in zip(one, other, strict=True):
                assert_same_logprobs(left, right)
        case float():
            assert one == pytest.approx(other, abs=1e-4)
        case _:
            assert one == other
