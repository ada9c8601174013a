"""What a body may hold, how it must arrive, and what never happens on the event loop."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from conftest import longest_turn, messages, post_blocking, running
from fake_engine import FakeEngine, FakeStream

from jaxserve.sampling_params import SamplingParams
from jaxserve_server import answer as answer_module
from jaxserve_server import body as body_module
from jaxserve_server import workers
from jaxserve_server.body import MAX_BODY_BYTES, MAX_DEPTH, MAX_PARTS, MAX_VALUES, check_shape
from jaxserve_server.chat import ChatAnswer
from jaxserve_server.completions import CompletionAnswer
from jaxserve_server.errors import ApiError
from jaxserve_server.generation import Prompt, Work, submitted

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def refusal(raw: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        check_shape(raw)
    assert caught.value.status == 400
    return str(caught.value)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_depth_is_counted_outside_of_strings_only():
    check_shape(nested(MAX_DEPTH))
    assert "nested" in refusal(nested(MAX_DEPTH + 1))
    assert "nested" in refusal(b'{"a":' * 100_000)
    check_shape(b'{"a": "' + b"[" * 100_000 + b'"}')
    check_shape(b'["' + b'\\"[' * 50_000 + b'"]')
    check_shape(b'["' + b"\\\\" * 50_001 + b'", "[[["]')
    assert "nested" in refusal(b'["\\\\", ' + b"[" * MAX_DEPTH)


@pytest.mark.parametrize("pad", range(5))
def test_an_escape_over_the_end_of_a_piece_stays_an_escape(pad):
    piece = body_module._PIECE_BYTES
    for inside in (b"\\\\", b'\\"'):
        text = b'"' + b"x" * (piece - 4 + pad) + inside * 4 + b"[" * 100 + b'"'
        check_shape(b"[" + text + b"]")
        assert "nested" in refusal(b"[" + text + b"," + b"[" * MAX_DEPTH)


def test_values_and_parts_are_counted_outside_of_strings_only():
    check_shape(b"[" + b",".join([b"1"] * MAX_VALUES) + b"]")
    assert "at most" in refusal(b"[" + b",".join([b"1"] * (MAX_VALUES + 1)) + b"]")
    check_shape(b"[" + b",".join([b'""'] * (MAX_PARTS - 200)) + b"]")
    for part in (b'""', b"[]", b"{}", b'{"a":1}'):
        assert "at most" in refusal(b"[" + b",".join([part] * MAX_PARTS) + b"]")
    check_shape(b'["' + b",[]{}" * 1_000_000 + b'"]')


async def raw_answer(api, *pieces, pause=0.0) -> tuple[int, str]:
    """Status and body of what comes back for these bytes, sent with pauses."""
    reader, writer = await asyncio.open_connection(api.http.host, api.http.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        async with asyncio.timeout(10):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            return int(head.split()[1]), (await reader.readexactly(length)).decode()
    finally:
        writer.close()


async def test_a_body_that_stops_coming_is_a_408(monkeypatch):
    monkeypatch.setattr(body_module, "IDLE_SECONDS", 0.2)
    async with running(FakeEngine()) as api:
        status, answer = await raw_answer(api, (HEAD + "Content-Length: 30\r\n\r\n").encode(), b'{"prompt"')
    assert status == 408
    assert json.loads(answer)["error"]["code"] == "body_timeout"


async def test_a_body_that_trickles_is_a_408(monkeypatch):
    monkeypatch.setattr(body_module, "READ_SECONDS", 0.5)
    async with running(FakeEngine()) as api:
        pieces = [(HEAD + "Content-Length: 300\r\n\r\n").encode(), *([b" "] * 12)]
        status, _ = await raw_answer(api, *pieces, pause=0.06)
    assert status == 408


async def test_a_body_that_keeps_coming_may_take_longer_than_one_pause(monkeypatch):
    monkeypatch.setattr(body_module, "IDLE_SECONDS", 0.5)
    async with running(FakeEngine()) as api:
        raw = b'{"prompt": "hi", "max_tokens": 2}'
        pieces = [
            (HEAD + f"Content-Length: {len(raw)}\r\n\r\n").encode(),
            *(raw[i : i + 6] for i in range(0, 33, 6)),
        ]
        status, _ = await raw_answer(api, *pieces, pause=0.12)
    assert status == 200


async def test_a_body_in_chunks_of_one_byte_is_read_and_one_without_an_end_is_a_413():
    async with running(FakeEngine()) as api:
        raw = b'{"prompt": "' + b"x" * 400 + b'", "max_tokens": 2}'
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in raw)
        head = (HEAD + "Transfer-Encoding: chunked\r\n\r\n").encode()
        assert (await raw_answer(api, head, chunks, b"0\r\n\r\n"))[0] == 200

        async def endless():
            for _ in range(MAX_BODY_BYTES // 2**20 + 1):
                yield b" " * 2**20

        headers = {"Content-Type": "application/json"}
        async with api.http.post("/v1/completions", data=endless(), headers=headers) as response:
            assert response.status == 413
            assert "larger than" in (await response.json())["error"]["message"]
        # The server is as good as new.
        assert (await api.complete("hi", max_tokens=2))["choices"][0]["finish_reason"] == "length"


@pytest.fixture
def threads(monkeypatch):
    """{what: names of the threads that did it}, of the work that grows with the body."""
    seen: dict[str, set[str]] = {}

    def watch(owner, name):
        function = getattr(owner, name)

        def watched(*args, **kwargs):
            seen.setdefault(name, set()).add(threading.current_thread().name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(body_module, "_decode")
    return seen, watch


LONG = "word " * 30_000
LONG_BODIES = {
    "a text": ("/v1/completions", {"prompt": LONG}),
    "token ids": ("/v1/completions", {"prompt": [65] * 80_000}),
    "many prompts": ("/v1/completions", {"prompt": [[65] * 100] * 1000, "max_tokens": 1}),
    "a conversation": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "tokenize": ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    "tokenize a conversation": ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    "detokenize": ("/detokenize", {"tokens": [65] * 80_000}),
}


@pytest.mark.parametrize(("path", "body"), LONG_BODIES.values(), ids=LONG_BODIES)
async def test_a_long_body_is_decoded_checked_and_encoded_on_threads_of_its_own(threads, path, body):
    seen, watch = threads
    engine = FakeEngine(max_model_len=10**6)
    for name in ("encode", "decode", "apply_chat_template"):
        watch(engine.tokenizer, name)
    async with running(engine) as api:
        status, _ = await api.post(path, **({"max_tokens": 1, **body} if path.startswith("/v1") else body))
        assert status == 200
    assert "_decode" in seen
    assert all(name.startswith("long-work") for names in seen.values() for name in names)


async def test_a_short_body_is_decoded_where_it_is_and_encoded_by_short_work(threads):
    seen, watch = threads
    engine = FakeEngine()
    watch(engine.tokenizer, "encode")
    async with running(engine) as api:
        await api.complete("hi", max_tokens=1)
    assert seen["_decode"] == {threading.current_thread().name}
    assert all(name.startswith("short-work") for name in seen["encode"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_answer_with_many_logprobs_is_made_on_a_thread_and_is_the_same(threads, monkeypatch, path):
    seen, watch = threads
    given = {"prompt": "hello", "logprobs": 20, "echo": True}
    if "chat" in path:
        given = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    async with running(FakeEngine(max_model_len=4096)) as api:
        answers = []
        for few in (2**30, 1000):
            monkeypatch.setattr(answer_module, "_FEW_ITEMS", few)
            status, answer = await api.post(path, **given, max_tokens=100, prompt_logprobs=5)
            assert status == 200
            answers.append({key: value for key, value in answer.items() if key not in ("id", "created")})
            watch(CompletionAnswer if "chat" not in path else ChatAnswer, "choices")
    assert answers[0] == answers[1]
    assert threading.current_thread().name not in seen["choices"]


async def only_the_last(stream):
    while not (output := await stream._next()).finished:
        pass
    return output


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"echo": True, "return_token_ids": True, "n": 16}),
        ("/v1/completions", {"return_token_ids": True, "n": 16}),
        ("/v1/completions", {"echo": True, "n": 16}),
        ("/v1/completions", {"echo": True, "logprobs": 5}),
        ("/v1/completions", {"logprobs": 20, "max_tokens": 300}),
        ("/v1/chat/completions", {"return_token_ids": True, "n": 16}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 20, "max_tokens": 300}),
    ],
)
async def test_an_answer_that_shows_much_is_made_on_threads_and_is_the_same(
    threads, monkeypatch, stream, path, asked
):
    seen, watch = threads
    watch(CompletionAnswer if path == "/v1/completions" else ChatAnswer, "choices" if not stream else "chunk")
    given = {"prompt": ["x" * 300] * 3} if path == "/v1/completions" else {"messages": messages("x" * 300)}
    # The stream's outputs come together, as they do for a reader who was slow.
    monkeypatch.setattr(FakeStream, "__anext__", only_the_last)
    answers = []
    engine = FakeEngine(max_model_len=4096)
    async with running(engine) as api:
        for few in (2**30, 1000):
            monkeypatch.setattr(answer_module, "_FEW_ITEMS", few)
            seen.clear()
            body = {"max_tokens": 4, **given, **asked}
            if stream:
                answer = await api.events(path, **body)
            else:
                status, answer = await api.post(path, **body)
                assert status == 200
                answer = [answer]
            answers.append([{k: v for k, v in part.items() if k not in ("id", "created")} for part in answer])
            names = seen["chunk" if stream else "choices"]
            if few == 1000:
                assert any(name.startswith("answers") for name in names)
                assert stream or threading.current_thread().name not in names
    assert answers[0] == answers[1]
    assert not engine.streams


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_every_choice_repeats_never_holds_up_the_event_loop(stream):
    asked = {"prompt": [[i % 250 for i in range(4000)]] * 40, "n": 16, "max_tokens": 1, "stream": stream}
    async with running(FakeEngine(max_model_len=8192)) as api:
        url = str(api.http.make_url("/v1/completions"))
        async with longest_turn() as longest:
            body = {**asked, "echo": True, "return_token_ids": True}
            received = await asyncio.to_thread(post_blocking, url, body)
    assert len(received) > 15_000_000
    assert longest() < 0.15  # at once it is half a second


async def test_prompts_are_checked_by_the_servers_own_threads():
    names = []

    class Engine:
        async def add_requests(self, prompts, params, *, in_thread, **options):
            await in_thread(lambda: names.append(threading.current_thread().name))
            return []

    work = Work([Prompt([1] * 50_000)], SamplingParams(), 0, None, final_only=True)
    async with submitted(Engine(), work, 0.0):
        assert names[0].startswith("long-work")


async def test_a_flood_of_long_inputs_leaves_short_ones_alone_and_is_bounded(monkeypatch):
    monkeypatch.setattr(workers, "_MAX_LONG", 6)
    engine = FakeEngine()
    blocked = threading.Event()
    encode = engine.tokenizer.encode

    def slow(text, *args, **kwargs):
        if len(text) > 1000:
            assert blocked.wait(20)
            text = "short"
        return encode(text, *args, **kwargs)

    engine.tokenizer.encode = slow
    async with running(engine) as api:
        flood = [
            asyncio.create_task(api.post("/v1/completions", prompt=LONG, max_tokens=1)) for _ in range(12)
        ]
        while sum(task.done() for task in flood) < 6:  # those over the bound are refused at once
            await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            await api.complete("hi", max_tokens=1)
        blocked.set()
        statuses = sorted([(await task)[0] for task in flood])
    assert statuses == [200] * 6 + [429] * 6


async def test_work_that_waits_for_a_thread_is_dropped_when_its_client_leaves():
    blocked, done = threading.Event(), []
    count = workers._LONG_THREADS
    first = [asyncio.create_task(workers.off_loop(10**6, blocked.wait, 20)) for _ in range(count)]
    await asyncio.sleep(0.05)
    late = asyncio.create_task(workers.off_loop(10**6, done.append, 1))
    await asyncio.sleep(0.05)
    late.cancel()
    await asyncio.sleep(0.05)
    blocked.set()
    await asyncio.gather(*first, late, return_exceptions=True)
    await workers.off_loop(10**6, int)
    assert done == []
