"""A streaming client of OpenAI-compatible servers that records when text arrives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from jaxserve.bench.measure import RequestRecord
from jaxserve.bench.trace import TraceItem


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `url` ends before `/completions`, for example http://localhost:8000/v1."""

    url: str
    model: str
    chat: bool = False
    ignore_eos: bool = True  # an extension that some servers refuse

    def body(self, item: TraceItem) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.chat:
            return body | {"messages": [{"role": "user", "content": item.prompt}]}
        return body | {"prompt": item.prompt}

    @property
    def endpoint(self) -> str:
        return f"{self.url}/chat/completions" if self.chat else f"{self.url}/completions"


def base_url(url: str) -> str:
    """The address with `/v1`, whether it was given or not."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def new_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """A session without a connection limit: the benchmark decides how many requests are open."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=1800),
        connector=aiohttp.TCPConnector(limit=0),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


async def served_models(session: aiohttp.ClientSession, url: str) -> list[str]:
    """Names the server answers to. Raises aiohttp.ClientError when it cannot be reached."""
    async with session.get(f"{url}/models") as response:
        response.raise_for_status()
        return [model["id"] for model in (await response.json())["data"]]


def _pieces(event: dict[str, Any]) -> Iterator[str]:
    for choice in event.get("choices") or ():
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            yield text


async def send(session: aiohttp.ClientSession, target: Target, item: TraceItem) -> RequestRecord:
    """Run one request to its end. Never raises for what the server does: the record has the error."""
    record = RequestRecord(wanted_tokens=item.max_tokens)
    start = time.perf_counter()
    try:
        async with session.post(target.endpoint, json=target.body(item)) as response:
            if response.status != 200:
                record.error = f"{response.status} {(await response.text())[:200]}"
                return record
            ended = False
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    ended = True
                    break
                event = json.loads(data)
                if event.get("error"):
                    record.error = str(event["error"])[:200]
                if usage := event.get("usage"):
                    record.prompt_tokens = usage["prompt_tokens"]
                    record.output_tokens = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    record.cached_tokens = details.get("cached_tokens") or 0
                now = time.perf_counter() - start
                record.arrivals += [now for _ in _pieces(event)]
            if not ended and record.error is None:
                record.error = "the stream ended without [DONE]"
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"
    finally:
        record.latency = time.perf_counter() - start
    return record
