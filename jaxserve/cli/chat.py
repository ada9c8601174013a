"""`jaxserve chat`: a conversation in the terminal, with a model of one's own or a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxserve.cli.command import Command, Values
from jaxserve.cli.generate import SamplingOptions, loaded_engine
from jaxserve.cli.options import UsageError
from jaxserve.cli.terminal import note, show
from jaxserve.errors import JaxserveError

if TYPE_CHECKING:
    import aiohttp

    from jaxserve.async_engine import AsyncLLMEngine

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class ChatOptions(SamplingOptions):
    max_tokens: int = field(default=1024, metadata={"help": "at most this many tokens in an answer"})
    url: str | None = field(default=None, metadata={"help": "talk to this server instead of loading a model"})
    api_key: str | None = field(default=None, metadata={"help": "the server's key", "metavar": "KEY"})
    system: str | None = field(default=None, metadata={"help": "a system message", "metavar": "TEXT"})


class ChatError(JaxserveError):
    """The server's answer is an error."""


class Partner(ABC):
    """Whoever answers."""

    @abstractmethod
    def reply(self, messages: Messages) -> AsyncGenerator[str]:
        """The pieces of the answer; closing the generator stops it."""


class LocalModel(Partner):
    def __init__(self, engine: AsyncLLMEngine, options: ChatOptions) -> None:
        self._engine = engine
        self._params = options.params(engine.default_sampling_params)

    async def reply(self, messages: Messages) -> AsyncGenerator[str]:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise ChatError("the model has no tokenizer")
        stream = self._engine.add_request(tokenizer.apply_chat_template(list(messages)), self._params)
        shown = 0
        try:
            async for output in stream:
                text = output.outputs[0].text
                yield text[shown:]
                shown = len(text)
        finally:
            stream.abort()


class Server(Partner):
    def __init__(
        self, http: aiohttp.ClientSession, url: str, model: str | None, options: ChatOptions
    ) -> None:
        self._http = http
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._body: dict[str, Any] = {"stream": True, "max_tokens": options.max_tokens}
        if model is not None:
            self._body["model"] = model
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            if getattr(options, name) is not None:
                self._body[name] = getattr(options, name)
        if options.stop:
            self._body["stop"] = list(options.stop)

    async def reply(self, messages: Messages) -> AsyncGenerator[str]:
        import aiohttp

        if "model" not in self._body:  # other servers than ours want a name
            self._body["model"] = await self._first_model()
        try:
            async with self._http.post(
                f"{self._url}/chat/completions", json={**self._body, "messages": messages}
            ) as response:
                if response.status != 200:
                    raise ChatError(_error_text(await response.read(), response.status))
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line.removeprefix(b"data: "))
                        if "error" in event:
                            raise ChatError(event["error"].get("message", "the server failed"))
                        for choice in event["choices"]:
                            yield choice["delta"].get("content") or ""
        except aiohttp.ClientError as error:
            raise ChatError(f"{self._url}: {error}") from error

    async def _first_model(self) -> str:
        import aiohttp

        try:
            async with self._http.get(f"{self._url}/models") as response:
                body = await response.read()
                if response.status != 200:
                    raise ChatError(_error_text(body, response.status))
                return str(json.loads(body)["data"][0]["id"])
        except (aiohttp.ClientError, ValueError, LookupError) as error:
            raise ChatError(f"{self._url}: {error}") from error


def _error_text(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered {status}"


async def converse(partner: Partner, system: str | None) -> None:
    """Read, answer, repeat, until end of input or /exit."""
    opening: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if sys.stdin.isatty():
        note("/reset forgets the conversation, /exit ends; Ctrl-C stops an answer")
    while (line := await asyncio.to_thread(_read_line)) is not None:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                messages = list(opening)
                note("forgotten")
                continue
        messages.append({"role": "user", "content": line})
        answer = await _answer(partner, messages)
        if answer is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


async def _answer(partner: Partner, messages: Messages) -> str | None:
    """Print an answer; None where there was an error. Ctrl-C keeps what there is."""
    pieces: list[str] = []

    async def listen() -> None:
        async with aclosing(partner.reply(messages)) as reply:
            async for piece in reply:
                pieces.append(piece)
                show(piece)

    listening = asyncio.ensure_future(listen())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, listening.cancel)
    try:
        await listening
    except asyncio.CancelledError:
        note(" (stopped)", end="")
    except JaxserveError as error:
        if not sys.stdin.isatty():
            raise
        show("\n")
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return None
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    show("\n")
    return "".join(pieces)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _groups() -> Mapping[str, type]:
    from jaxserve.engine_args import EngineArgs

    return {"conversation": ChatOptions, "engine": EngineArgs}


def run(values: Values) -> int:
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and a history
    options = values.make(ChatOptions)
    if options.url is not None:
        if not options.url.startswith(("http://", "https://")):
            raise UsageError(f"--url must begin with http:// or https://, got {options.url!r}")
        return asyncio.run(with_server(options.url, values.given.get("model"), options))
    with loaded_engine(values) as engine:
        asyncio.run(converse(LocalModel(engine, options), options.system))
    return 0


async def with_server(url: str, model: str | None, options: ChatOptions) -> int:
    import aiohttp

    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
        await converse(Server(http, url, model, options), options.system)
    return 0


COMMAND = Command(
    name="chat",
    help="talk with a model, or with a server by --url",
    examples="""\
  jaxserve chat
  jaxserve chat org/name --system "You answer in one sentence."
  jaxserve chat --url http://127.0.0.1:8000
  echo "What is JAX?" | jaxserve chat --temperature 0""",
    run=run,
    groups=_groups,
)
