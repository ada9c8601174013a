"""From the engine's outputs to the client: one way for both generation routes, streamed or not."""

from __future__ import annotations

import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from aiohttp import web

from jaxserve.errors import EngineDeadError
from jaxserve.outputs import RequestOutput
from jaxserve_server.errors import to_api_error
from jaxserve_server.generation import Usage, Work, outputs_of, submitted
from jaxserve_server.middleware import log_fields
from jaxserve_server.protocol import GenerationBody
from jaxserve_server.sse import EventStream
from jaxserve_server.state import STATE

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine

logger = logging.getLogger(__name__)


class Answer(ABC):
    """What one HTTP request gets back: the JSON around the choices, and how a choice looks."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: GenerationBody, model: str, work: Work) -> None:
        self.body = body
        self.usage = Usage(work.prompts)
        self._head = {
            "id": f"{self.id_prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that go out before the first token."""
        yield from ()

    @abstractmethod
    def pieces(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Choices of the chunks for what `output` of prompt `index` adds."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """`choices`, and whatever else the body has, from the final outputs of all prompts."""

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": [choice]}
        if self.body.include_usage:
            chunk["usage"] = self.usage.json() if self.body.continuous_usage else None
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": self.usage.json()}

    def whole_body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        body = {**self._head, "object": self.whole_object, "usage": self.usage.json()}
        return {**body, **self.whole(outputs)}


async def respond(
    request: web.Request, engine: AsyncLLMEngine, work: Work, answer: Answer
) -> web.StreamResponse:
    """Submit the work and answer, streamed or not. However this ends, nothing is left in the engine."""
    metrics = request.app[STATE].metrics
    with submitted(engine, work) as streams:
        async with aclosing(_watched(request, outputs_of(streams, metrics), answer)) as outputs:
            if answer.body.stream:
                return await _stream(request, outputs, answer)
            finals: list[RequestOutput | None] = [None] * len(streams)
            async for index, output in outputs:
                finals[index] = output
            finished = [output for output in finals if output is not None and output.finished]
            if len(finished) < len(finals):
                raise EngineDeadError("a request ended without an end")
            return web.Response(body=json.dumps(answer.whole_body(finished)), content_type="application/json")


async def _watched(
    request: web.Request, outputs: AsyncGenerator[tuple[int, RequestOutput]], answer: Answer
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The outputs, counted for the usage and the log."""
    reasons: dict[tuple[int, int], str] = {}
    try:
        async for index, output in outputs:
            answer.usage.see(index, output)
            for choice in output.outputs:
                if choice.finish_reason is not None:
                    reasons[index, choice.index] = choice.finish_reason
            yield index, output
    finally:
        log_fields(
            request,
            prompt_tokens=answer.usage.prompt_tokens,
            completion_tokens=answer.usage.completion_tokens,
            finish_reasons=",".join(reasons.values()),
        )


async def _stream(
    request: web.Request, outputs: AsyncIterator[tuple[int, RequestOutput]], answer: Answer
) -> web.StreamResponse:
    events = EventStream(request)
    try:
        await events.open()
        try:
            for choice in answer.opening():
                await events.send(answer.chunk(choice))
            async for index, output in outputs:
                for choice in answer.pieces(index, output):
                    await events.send(answer.chunk(choice))
            if answer.body.include_usage:
                await events.send(answer.usage_chunk())
        except ConnectionError:
            raise
        except Exception as error:
            # The 200 is out: the error is an event.
            await events.send(to_api_error(error).body())
        await events.done()
    except ConnectionError as error:
        logger.info("a stream ended early: %s", error)
        request.app[STATE].metrics.disconnected()
    return events.response
