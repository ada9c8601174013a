"""`generate` and `chat` over the fake engine of the server's tests, and chat with a live server."""

import asyncio
import importlib.util
import io
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxserve.cli import chat, generate
from jaxserve.cli.main import main

SERVER_TESTS = Path(__file__).parent.parent / "server"


def _load(name):
    spec = importlib.util.spec_from_file_location(name, SERVER_TESTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


fake_engine = _load("fake_engine")


@pytest.fixture
def engine(monkeypatch):
    async def make():
        return fake_engine.FakeEngine(max_model_len=4096)

    engine = asyncio.run(make())

    @contextmanager
    def loaded(values):
        yield engine

    monkeypatch.setattr(generate, "loaded_engine", loaded)
    monkeypatch.setattr(chat, "loaded_engine", loaded)
    return engine


def rule(num_prompt_tokens, num_tokens):
    return "".join(chr(ord("a") + (num_prompt_tokens + i) % 26) for i in range(num_tokens))


def test_generate_prints_prompt_and_continuation(engine, capsys):
    engine.add_request = _encoding(engine)
    assert main(["generate", "-p", "hi", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "hi" + rule(3, 4) + "\n"


def test_generate_reads_standard_input(engine, capsys, monkeypatch):
    engine.add_request = _encoding(engine)
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    assert main(["generate", "-p", "-", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "abc" + rule(4, 2) + "\n"


def test_generate_prints_several_prompts_in_order(engine, capsys):
    engine.add_request = _encoding(engine)
    assert main(["generate", "-p", "a", "-p", "bcd", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == f"--- 1 ---\na{rule(2, 2)}\n--- 2 ---\nbcd{rule(4, 2)}\n"


def test_generate_uses_the_models_defaults_where_nothing_is_asked(engine):
    engine.default_sampling_params = {"temperature": 0.3, "top_k": 9}
    engine.add_request = _encoding(engine)
    main(["generate", "-p", "a", "--max-tokens", "1", "--top-k", "4", "--stop", "z", "--min-p", "0.1"])
    params = engine.seen[-1][1]
    assert (params.temperature, params.top_k, params.stop, params.min_p) == (0.3, 4, ("z",), 0.1)


def _encoding(engine):
    """The real engine takes texts too."""
    add = type(engine).add_request

    def add_request(prompt, params, **more):
        return add(engine, engine.tokenizer.encode(prompt), params, **more)

    return add_request


def test_chat_keeps_the_conversation(engine, capsys, monkeypatch):
    engine.eos_after = 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nfour\n"))
    assert main(["chat", "--system", "S"]) == 0
    prompts = [bytes(prompt).decode() for prompt, _, _ in engine.seen]
    first = capsys.readouterr().out.splitlines()[0]
    assert prompts == [
        "[system]S[user]one[assistant]",
        f"[system]S[user]one[assistant]{first}[user]two[assistant]",
        "[system]S[user]three[assistant]",
    ]
    assert first == rule(len(prompts[0]), 2)


def test_an_error_ends_a_chat_that_nobody_types(engine, capsys, monkeypatch):
    engine.max_queue = 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert main(["chat"]) == 1
    assert "requests wait" in capsys.readouterr().err


@pytest.fixture
async def server():
    sys.path.insert(0, str(SERVER_TESTS))
    from conftest import running

    from jaxserve_server.config import ServerConfig

    async with running(fake_engine.FakeEngine(eos_after=3), ServerConfig(api_key=("k",))) as api:
        yield api


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
async def test_chat_talks_to_a_server(server, capsys, monkeypatch, suffix):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    url = server.base_url.removesuffix("/v1") + suffix
    assert await chat.with_server(url, None, chat.ChatOptions(api_key="k", max_tokens=9)) == 0
    assert capsys.readouterr().out == rule(19, 3) + "\n"


async def test_a_servers_refusal_has_its_words(server, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    with pytest.raises(chat.ChatError, match="a valid API key is needed"):
        await chat.with_server(server.base_url, None, chat.ChatOptions(api_key="wrong"))
