"""From the engine's outputs to the client: one way for both generation routes, streamed or not."""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from jaxserve.errors import EngineDeadError
from jaxserve.outputs import RequestOutput
from jaxserve_server.access import API_KEY, cache_salt_of
from jaxserve_server.deadline import rest_of_time
from jaxserve_server.errors import to_api_error
from jaxserve_server.generation import Usage, Work, outputs_of, submitted
from jaxserve_server.large_json import answered, encoded, made_on_threads
from jaxserve_server.limits import charge_tokens, counts_tokens
from jaxserve_server.middleware import arrival_time_of
from jaxserve_server.observation import observed
from jaxserve_server.protocol import GenerationBody
from jaxserve_server.sse import EventStream, framed
from jaxserve_server.state import STATE

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine

logger = logging.getLogger(__name__)

_FEW_ITEMS = 4096  # tokens and log-probabilities: about a hundredth of a second


class Answer(ABC):
    """What one HTTP request gets back: the JSON around the choices, and how a choice looks."""

    operation: str  # as OpenTelemetry names it
    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: GenerationBody, model: str, work: Work) -> None:
        self.body = body
        self.model = model
        self.usage = Usage(work.prompts)
        self.unsent = 0  # tokens and log-probabilities that have been seen and not yet been shown, about
        params = work.params
        self._items_per_token = 1 + max(params.logprobs or 0, params.prompt_logprobs or 0)
        self._shows_prompt = (
            body.return_token_ids or params.prompt_logprobs is not None or getattr(body, "echo", False)
        )
        self._id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self._created = int(time.time())

    def see(self, index: int, output: RequestOutput) -> None:
        """Count an output of prompt `index`, which is not shown before."""
        tokens, choices = self.usage.see(index, output)
        if self._shows_prompt:
            tokens += choices * len(output.prompt_token_ids)
        self.unsent += tokens * self._items_per_token

    def opening(self) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that go out before the first token."""
        yield from ()

    @abstractmethod
    def pieces(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Choices of the chunks for what `output` of prompt `index` adds."""

    @abstractmethod
    def choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        """Those of the whole answer, from the final outputs of all prompts."""

    def rest(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """What the whole answer has besides its choices and what all answers have."""
        return {}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_object), "choices": [choice]}
        if self.body.include_usage:
            chunk["usage"] = self.usage.json() if self.body.continuous_usage else None
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": [], "usage": self.usage.json()}

    def whole_json(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """The whole answer in pieces, each quick to make once its choice is."""
        yield b"".join(encoded(self._head(self.whole_object)))[:-1]
        opening = b',"choices":['
        for choice in self.choices(outputs):
            yield opening
            yield from encoded(choice)
            opening = b","
        yield b"],"
        rest = encoded({"usage": self.usage.json()} | self.rest(outputs))
        yield next(rest)[1:]
        yield from rest

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}


async def respond(
    request: web.Request, engine: AsyncLLMEngine, work: Work, answer: Answer
) -> web.StreamResponse:
    """Submit the work and answer, streamed or not. However this ends, nothing is left in the engine."""
    work = replace(
        work,
        cache_salt=cache_salt_of(request, work.cache_salt),
        final_only=work.final_only and not counts_tokens(request),
    )
    async with submitted(engine, work, arrival_time_of(request)) as streams:
        charge_tokens(request, answer.usage.prompt_tokens)
        async with aclosing(_watched(request, outputs_of(streams), answer, work)) as outputs:
            if answer.body.stream:
                return await _stream(request, outputs, answer)
            finals: list[RequestOutput | None] = [None] * len(streams)
            async for index, output in outputs:
                finals[index] = output
    finished = [output for output in finals if output is not None and output.finished]
    if len(finished) < len(finals):
        raise EngineDeadError("a request ended without an end")
    pieces = answer.whole_json(finished)
    if answer.unsent > _FEW_ITEMS:
        return await answered(request, [piece async for piece in made_on_threads(pieces)])
    return await answered(request, list(pieces))


async def _watched(
    request: web.Request, outputs: AsyncGenerator[tuple[int, RequestOutput]], answer: Answer, work: Work
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The outputs, counted for the usage, the limits, the log and the trace."""
    with observed(request, answer.operation, answer.model, work.params) as seen:
        try:
            async with aclosing(outputs), aclosing(seen.watch(outputs)) as watched:
                async for index, output in watched:
                    answer.see(index, output)
                    yield index, output
        finally:
            charge_tokens(request, answer.usage.completion_tokens)


async def _stream(
    request: web.Request, outputs: AsyncIterator[tuple[int, RequestOutput]], answer: Answer
) -> web.StreamResponse:
    events = EventStream(request)
    try:
        await events.open()
        try:
            async with rest_of_time(request):
                await _send_chunks(events, answer, answer.opening())
                async for index, output in outputs:
                    await _send_chunks(events, answer, answer.pieces(index, output))
            if answer.body.include_usage:
                await events.send(answer.usage_chunk())
        except ConnectionError:
            raise
        except Exception as error:
            # The 200 is out: the error is an event.
            failure = to_api_error(error)
            key = request.get(API_KEY)
            reason = failure.code or str(failure.status)
            request.app[STATE].metrics.rejected(reason, "" if key is None else key.name)
            await events.send(failure.body())
        await events.done()
    except ConnectionError as error:
        logger.info("a stream ended early: %s", error)
        request.app[STATE].metrics.disconnected()
    return events.response


async def _send_chunks(events: EventStream, answer: Answer, choices: Iterator[dict[str, Any]]) -> None:
    """Send a chunk for each choice; where they show much, they are made on a thread."""
    chunks = map(answer.chunk, choices)
    if answer.unsent <= _FEW_ITEMS:
        for chunk in chunks:
            await events.send(chunk)
    else:
        async for frames in made_on_threads(framed(b"".join(encoded(chunk))) for chunk in chunks):
            await events.send_frames(frames)
    answer.unsent = 0
