"""Systems that peers.py runs: each is started, answers levels of requests, and is gone before the next.

Servers are driven over HTTP by the client of `jaxserve bench serve`; the others run a script of
`peer_scripts/` in an environment of their own under `.venvs/`, made when it is not there.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from jaxserve.bench.client import Target, new_session, send, served_models
from jaxserve.bench.load import closed_loop
from jaxserve.bench.measure import RequestRecord
from jaxserve.bench.trace import TraceItem

HERE = Path(__file__).parent
FIRST = TraceItem("The capital of France is", 1)  # what a start is measured with
START_SECONDS = 900.0  # a start that takes longer has failed


@dataclass(frozen=True)
class Level:
    """Requests of which `concurrency` are always open."""

    name: str
    concurrency: int
    items: Sequence[TraceItem]


@dataclass(frozen=True)
class Session:
    """One process of a contestant. Seconds from its start; bytes, 0 where the system does not tell."""

    first_token: float  # to the end of a request for one token
    rss_loaded: int  # before the first request
    rss_peak: int
    levels: dict[str, tuple[list[RequestRecord], float]]  # by name: records and wall seconds


class Contestant(Protocol):
    """`run` starts the system, runs the levels in turn, and ends it."""

    @property
    def name(self) -> str: ...

    def run(self, levels: Sequence[Level], *, prefix_caching: bool, cache: Path, lazy: bool) -> Session:
        """`cache`: where compiled programs are kept. `lazy`: start as users do, not ready for measuring."""
        ...


def environment(name: str, *requirements: str) -> Path:
    """The Python of `.venvs/name`, made and filled when it is not there."""
    directory = HERE / ".venvs" / name
    python = directory / "bin" / "python"
    if not (directory / ".ready").exists():
        print(f"making {directory} with {', '.join(requirements)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *requirements]
        subprocess.run(install, check=True)
        (directory / ".ready").touch()
    return python


def _clean_environment(**more: str) -> dict[str, str]:
    """Ours without settings of jaxserve, which would be settings of the server."""
    return {k: v for k, v in os.environ.items() if not k.startswith("JAXSERVE_")} | more


def _memory(pid: int, key: str) -> int:
    """Bytes of a process: VmRSS now, VmHWM at most so far."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Server:
    """A server of OpenAI's API. `command(port, prefix_caching, lazy)` is its command line."""

    name: str
    command: Callable[[int, bool, bool], list[str]]
    ready_path: str

    def run(self, levels: Sequence[Level], *, prefix_caching: bool, cache: Path, lazy: bool) -> Session:
        started = time.time()
        with self.running(prefix_caching=prefix_caching, cache=cache, lazy=lazy) as (pid, url):
            return asyncio.run(self._drive(pid, f"{url}/v1", levels, started))

    @contextmanager
    def running(self, *, prefix_caching: bool, cache: Path, lazy: bool) -> Iterator[tuple[int, str]]:
        """The process id and the address of a server that is ready; it is stopped at the end."""
        port = _free_port()
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                self.command(port, prefix_caching, lazy),
                env=_clean_environment(JAXSERVE_CACHE=str(cache)),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                self._wait(process, f"http://127.0.0.1:{port}{self.ready_path}")
                yield process.pid, f"http://127.0.0.1:{port}"
            except BaseException:
                log.seek(0)
                print(f"the log of {self.name}:\n{log.read()[-4000:]}", file=sys.stderr)
                raise
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _wait(self, process: subprocess.Popen[bytes], url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5):
                return
            time.sleep(0.02)
        raise RuntimeError(f"{self.name} did not become ready")

    async def _drive(self, pid: int, url: str, levels: Sequence[Level], started: float) -> Session:
        loaded = _memory(pid, "VmRSS")
        done: dict[str, tuple[list[RequestRecord], float]] = {}
        async with new_session() as session:
            target = Target(url, (await served_models(session, url))[0])
            request = partial(send, session, target)
            first = await request(FIRST)
            first_token = time.time() - started
            if first.error:
                raise RuntimeError(f"{self.name}: the first request failed: {first.error}")
            for level in levels:
                done[level.name] = await closed_loop(request, level.items, level.concurrency, lambda: None)
        return Session(first_token, loaded, _memory(pid, "VmHWM"), done)


@dataclass(frozen=True)
class Script:
    """A script of peer_scripts/ in an environment of its own."""

    name: str
    script: str
    venv: str
    requirements: tuple[str, ...]
    model: Path
    flags: tuple[str, ...] = ()

    def run(self, levels: Sequence[Level], *, prefix_caching: bool, cache: Path, lazy: bool) -> Session:
        del lazy  # it has no other way to start
        python = environment(self.venv, *self.requirements)
        warmup = Level("warmup", 1, [FIRST])
        work = {"warmup": asdict(warmup), "levels": [asdict(level) for level in levels]}
        with tempfile.TemporaryDirectory() as folder:
            asked, results = Path(folder) / "work.json", Path(folder) / "results.json"
            asked.write_text(json.dumps(work))
            command = [str(python), str(HERE / "peer_scripts" / self.script), str(self.model)]
            command += [str(asked), str(results), "--cache-dir", str(cache), *self.flags]
            command += ["--prefix-caching"] if prefix_caching else []
            started = time.time()
            run = subprocess.run(
                command,
                env=_clean_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if run.returncode:
                raise RuntimeError(f"{self.name} ended with {run.returncode}:\n{run.stdout[-4000:]}")
            data: dict[str, Any] = json.loads(results.read_text())
        done = {
            level["name"]: ([RequestRecord(**record) for record in level["records"]], level["wall"])
            for level in data["levels"]
        }
        return Session(data["first_answer_at"] - started, data["rss_loaded"], data["rss_peak"], done)


def jaxserve(model: Path, flags: Sequence[str]) -> Server:
    """`jaxserve serve` of this clone. For measuring, everything is compiled before the first request."""

    def command(port: int, prefix_caching: bool, lazy: bool) -> list[str]:
        base = [sys.executable, "-m", "jaxserve.cli.main", "serve", str(model), "--port", str(port)]
        base += ["--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"]
        return [*base, "--warmup", "lazy" if lazy else "full", *flags]

    return Server("jaxserve", command, "/ready")


def llama_cpp(model: Path, binary: Path) -> Server:
    """The server of llama.cpp: any build of it that knows these flags."""

    def command(port: int, prefix_caching: bool, lazy: bool) -> list[str]:
        flags = ["-m", str(model), "--port", str(port), "--parallel", "32", "--ctx-size", "65536"]
        return [str(binary), *flags, "--cache-prompt" if prefix_caching else "--no-cache-prompt"]

    return Server("llama.cpp", command, "/health")


def peer(name: str, model: Path, binary: Path | None) -> Contestant:
    """By the name that --peer takes. Raises ValueError for llama.cpp without a binary."""
    if name == "llama.cpp":
        if binary is None:
            raise ValueError("--peer llama.cpp needs --binary, the path of its server")
        return llama_cpp(model, binary)
    if name == "transformers":
        torch = os.environ.get("TORCH", "torch")
        requirements = (torch, "transformers", "accelerate", "gguf", "sentencepiece")
        return Script(name, "transformers_levels.py", name, requirements, model)
    flags = ("--float32",) if name == "openvino-f32" else ()
    return Script(name, "openvino_levels.py", "openvino", ("openvino-genai",), model, flags)


PEERS = ("openvino", "openvino-f32", "transformers", "llama.cpp")
