"""`jaxserve bench serve` against a small server whose answers are known."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web

from jaxserve.bench.serve import main


class FakeServer:
    """Streams `max_tokens` pieces of text; refuses or breaks off when told to."""

    def __init__(self):
        self.bodies: list[dict] = []
        self.open = self.most_open = 0
        self.status = 200
        self.break_off = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(data: dict) -> None:
            await response.write(f"data: {json.dumps(data)}\n\n".encode())

        for _ in range(body["max_tokens"]):
            await event({"choices": [{"text": "x"} if "prompt" in body else {"delta": {"content": "x"}}]})
        await asyncio.sleep(0.001)
        usage = {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}
        if not self.break_off:
            await event({"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        self.open -= 1
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})


@contextmanager
def running(server: FakeServer):
    """Serve in a thread with its own event loop (the benchmark makes one itself). Gives the address."""
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    app.router.add_get("/v1/models", server.models)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner.addresses[0][1]

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_every_level_runs_the_trace_and_is_reported(tmp_path, capsys):
    server = FakeServer()
    with running(server) as url:
        code = main(["--url", url, "--n", "8", "--concurrency", "1,4", "--json", str(tmp_path / "out.json")])
    assert code == 0
    one, four = json.loads((tmp_path / "out.json").read_text())["levels"]
    assert (one["requests"], four["requests"]) == (4, 8)
    assert (one["failed"], one["short"], four["failed"], four["short"]) == (0, 0, 0, 0)
    # Four at once arrive in any order.
    asked = sorted(b["max_tokens"] for b in server.bodies[-8:])
    assert sorted(r["output_tokens"] for r in four["records"]) == asked
    assert all(len(r["arrivals"]) == r["output_tokens"] for r in four["records"])
    assert server.most_open <= 4
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["ignore_eos"]) == ("tiny", 0, True)
    assert "output tok/s" in capsys.readouterr().out


def test_chat_sends_messages_and_reads_deltas(tmp_path):
    server = FakeServer()
    with running(server) as url:
        args = [
            "--url",
            f"{url}/v1",
            "--model",
            "m",
            "--n",
            "2",
            "--concurrency",
            "2",
            "--chat",
            "--respect-eos",
        ]
        assert main([*args, "--json", str(tmp_path / "out.json")]) == 0
    assert server.bodies[0]["messages"][0]["role"] == "user"
    assert "ignore_eos" not in server.bodies[0]
    level = json.loads((tmp_path / "out.json").read_text())["levels"][0]
    assert level["short"] == 0
    assert level["ttft_p50"] > 0


def test_requests_that_arrive_by_rate_all_run(tmp_path):
    server = FakeServer()
    with running(server) as url:
        args = ["--url", url, "--n", "5", "--request-rate", "200", "--goodput", "ttft:60000"]
        assert main([*args, "--json", str(tmp_path / "out.json")]) == 0
    level = json.loads((tmp_path / "out.json").read_text())["levels"][0]
    assert level["requests"] == 5
    assert level["goodput"] == pytest.approx(5 / level["wall"])


def test_refused_requests_are_counted_and_the_first_reason_told(capsys):
    server = FakeServer()
    server.status = 429
    with running(server) as url:
        assert main(["--url", url, "--n", "3", "--concurrency", "3"]) == 1
    assert "3 requests failed, the first with: 429" in capsys.readouterr().err


def test_an_answer_that_breaks_off_is_a_failure(capsys):
    server = FakeServer()
    server.break_off = True
    with running(server) as url:
        assert main(["--url", url, "--n", "2", "--concurrency", "2"]) == 1
    assert "ended without [DONE]" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(capsys, unused_tcp_port):
    assert main(["--url", f"http://127.0.0.1:{unused_tcp_port}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jaxserve: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "flags", [["--concurrency", "0"], ["--goodput", "speed:1"], ["--request-rate", "-1"]]
)
def test_wrong_flags_are_a_usage_error(flags):
    with pytest.raises(SystemExit) as exit_info:
        main(["--url", "http://h", *flags])
    assert exit_info.value.code == 2
