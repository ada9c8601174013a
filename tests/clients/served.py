"""A `jaxserve serve` process, and a proxy before it that remembers what clients send."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

GGUF = Path(__file__).parents[1] / "goldens" / "gguf"
# The byte-level golden checkpoint: 400 tokens, 512 positions, random weights that never end by themselves.
TINY = str(GGUF / "f16_tok_gpt2" / "model.gguf")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_FAST = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--page-size", "8", "--num-pages", "257")
_HOP_BY_HOP = {"connection", "host", "content-length", "transfer-encoding", "date", "server"}


@dataclass(frozen=True)
class Sent:
    """One request as it came from a client."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: Any
    status: int
    time: float  # monotonic seconds


@dataclass
class Served:
    """A running server: `url` is the proxy's, `direct` the server's own; `sent` is cleared for each test."""

    direct: str
    url: str
    key: str = "none"
    sent: list[Sent] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def bodies(self) -> list[Any]:
        return [sent.body for sent in self.sent]

    def raw(self, path: str, body: Any) -> dict[str, Any]:
        """The server's own answer to a body, with no client library between; not remembered."""
        request = urllib.request.Request(
            self.direct + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def again(self, number: int = -1) -> dict[str, Any]:
        """The server's answer to a remembered request, posted raw and not as a stream."""
        sent = self.sent[number]
        whole = {k: v for k, v in sent.body.items() if k not in ("stream", "stream_options")}
        return self.raw(sent.path, whole)

    def metric(self, name: str) -> float:
        request = urllib.request.Request(
            f"{self.direct}/metrics", headers={"Authorization": f"Bearer {self.key}"}
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            page = response.read().decode()
        (value,) = re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE)
        return float(value)

    def wait_until(self, name: str, value: float) -> None:
        """Until a metric has a value; fails after 20 s."""
        deadline = time.monotonic() + 20
        while (found := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} stays at {found}"
            time.sleep(0.02)


def assert_same(found: Any, expected: Any) -> None:
    """Equal JSON but for rounding: a program for another batch size may add in another order."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-4, abs_tol=1e-5)
    else:
        assert found == expected


def tiny_flags(folder: Path) -> tuple[str, ...]:
    """The tiny checkpoint as the model `tiny`."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    return (TINY, "--served-model-name", "tiny", "--chat-template", str(template), *_FAST)


class ServerProcess:
    """The process, its log's last lines, and the URL it said it serves."""

    def __init__(self, *flags: str) -> None:
        command = [str(Path(sys.executable).with_name("jaxserve")), "serve", *flags, "--port", "0"]
        # One device, as a user has; programs compiled before are read back as in other tests.
        environment = {
            k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUMPY_RANK_PROMOTION")
        }
        self._child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._log: deque[str] = deque(maxlen=50)
        self._url: str | None = None
        self._told = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self._log.append(line)
            if match := re.search(r"ready: serving \S+ at (\S+)/v1", line):
                self._url = match[1]
                self._told.set()
        self._told.set()

    def url(self) -> str:
        """Where it serves, once it is ready."""
        self._told.wait(180)
        if self._url is None:
            self._child.kill()
            self._end()
            raise AssertionError("".join(self._log))
        return self._url

    def stop(self) -> None:
        self._child.terminate()
        killer = threading.Timer(60, self._child.kill)
        killer.start()
        code = self._end()
        killer.cancel()
        assert code == 0, "".join(self._log)

    def _end(self) -> int:
        code = self._child.wait()
        self._reader.join()
        assert self._child.stderr is not None
        self._child.stderr.close()
        return code


class Proxy:
    """Hands everything on, as it comes, and appends each request to `served.sent`. Runs in its own thread."""

    def __init__(self, upstream: str, key: str) -> None:
        self._upstream = upstream
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self.served = Served(upstream, "", key)
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _run(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.served.url = f"http://{host}:{port}"
        async with ClientSession(auto_decompress=False) as self._session:
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        data, came = await request.read(), time.monotonic()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        async with self._session.request(
            request.method, self._upstream + request.raw_path, data=data or None, headers=headers
        ) as answer:
            named = {name.lower(): value for name, value in request.headers.items()}
            body = json.loads(data) if data else None
            self.served.sent.append(Sent(request.method, request.path, named, body, answer.status, came))
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
