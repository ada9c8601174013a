"""Simon Willison's `llm`: its command line and its Python interface, over a model of a YAML file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import llm
import pytest

from tests.clients.served import Served


@pytest.fixture
def user_path(tiny: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of settings in which `tiny` is a chat model and `tiny-text` one of completions."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- {{model_id: tiny, model_name: tiny, api_base: '{tiny.base_url}'}}\n"
        f"- {{model_id: tiny-text, model_name: tiny, api_base: '{tiny.base_url}', completion: true}}\n"
    )
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return tmp_path


def run(*arguments: str) -> str:
    """The standard output of the command."""
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens", "8")


def content_of(answer):
    return answer["choices"][0]["message"]["content"]


def test_the_command_streams_and_logs_the_usage(user_path, tiny):
    shown = run("-m", "tiny", *OPTIONS, "Hello")
    sent = tiny.sent[0].body
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}
    expected = tiny.again()
    assert shown == content_of(expected) + "\n"
    (logged,) = json.loads(run("logs", "--json"))
    assert logged["response"] == content_of(expected)
    assert logged["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert logged["output_tokens"] == expected["usage"]["completion_tokens"] == 8


def test_the_command_goes_on_with_a_conversation(user_path, tiny):
    first = run("-m", "tiny", *OPTIONS, "-s", "Be short.", "Hello")
    second = run("-c", *OPTIONS, "--no-stream", "Again")
    history = tiny.sent[1].body["messages"]
    assert [(m["role"], m["content"]) for m in history[:3]] == [
        ("system", "Be short."),
        ("user", "Hello"),
        ("assistant", first.removesuffix("\n")),
    ]
    assert second == content_of(tiny.again()) + "\n"


def test_the_python_interface(user_path, tiny):
    model = llm.get_model("tiny")
    response = model.prompt("Hello", temperature=0, max_tokens=8, stream=False)
    assert response.text() == content_of(tiny.again())
    assert response.usage().output == 8
    pieces = list(model.prompt("Hello", temperature=0, max_tokens=8))
    assert "".join(pieces) == response.text()
    conversation = model.conversation()
    conversation.prompt("Hello", temperature=0, max_tokens=8).text()
    assert conversation.prompt("Again", temperature=0, max_tokens=8).text() == content_of(tiny.again())
    assert [message["role"] for message in tiny.sent[-1].body["messages"]] == ["user", "assistant", "user"]


async def test_the_async_interface(user_path, tiny):
    response = llm.get_async_model("tiny").prompt("Hello", temperature=0, max_tokens=8)
    assert await response.text() == content_of(tiny.again())
    assert (await response.usage()).output == 8


def test_a_model_of_completions(user_path, tiny):
    text = llm.get_model("tiny-text").prompt("Hello", temperature=0, max_tokens=8).text()
    assert tiny.sent[0].path == "/v1/completions"
    assert text == tiny.again()["choices"][0]["text"]
