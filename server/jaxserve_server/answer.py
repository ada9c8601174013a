"""From the engine's outputs to the client: one way for both generation routes, streamed or not."""

from __future__ import annotations

import asyncio
import json
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
from jaxserve_server.access import cache_salt_of
from jaxserve_server.deadline import rest_of_time
from jaxserve_server.errors import to_api_error
from jaxserve_server.generation import Usage, Work, outputs_of, submitted
from jaxserve_server.limits import charge_tokens, counts_tokens
from jaxserve_server.middleware import arrival_time_of, log_fields, request_id_of, route_of
from jaxserve_server.observation import Observation, trace_headers
from jaxserve_server.protocol import GenerationBody
from jaxserve_server.sse import EventStream
from jaxserve_server.state import STATE

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine

logger = logging.getLogger(__name__)

_BYTES_PER_LOGPROB = 64  # of JSON, about
_SHORT_ANSWER = 512 * 1024  # bytes: some hundredths of a second


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
            return web.Response(body=await _whole_json(answer, finished), content_type="application/json")


async def _whole_json(answer: Answer, outputs: Sequence[RequestOutput]) -> str:
    """The body of an answer that is not streamed; one with many log-probabilities is made on a thread."""
    size = _BYTES_PER_LOGPROB * sum(_num_logprobs(output) for output in outputs)
    if size <= _SHORT_ANSWER:
        return json.dumps(answer.whole_body(outputs))
    # `iterencode` is Python: unlike `dumps` it lets other threads run.
    encode = json.JSONEncoder().iterencode
    return await asyncio.to_thread(lambda: "".join(encode(answer.whole_body(outputs))))


def _num_logprobs(output: RequestOutput) -> int:
    lists = [output.prompt_logprobs, *(choice.logprobs for choice in output.outputs)]
    return sum(len(positions) * len(positions[-1] or ()) for positions in lists if positions)


async def _watched(
    request: web.Request, outputs: AsyncGenerator[tuple[int, RequestOutput]], answer: Answer, work: Work
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The outputs, counted for the usage, the log and the trace."""
    seen = Observation(
        request_id=request_id_of(request),
        operation=answer.operation,
        route=route_of(request) or "",
        model=answer.model,
        params=work.params,
        arrival_time=arrival_time_of(request),
        trace_headers=trace_headers(request),
    )
    try:
        async with aclosing(outputs), aclosing(seen.watch(outputs)) as watched:
            async for index, output in watched:
                answer.usage.see(index, output)
                yield index, output
    finally:
        charge_tokens(request, answer.usage.completion_tokens)
        tracer = request.app[STATE].tracer
        seen.trace_id = seen.trace_id if tracer is None else tracer.record(seen)
        log_fields(request, **seen.log_fields())


async def _stream(
    request: web.Request, outputs: AsyncIterator[tuple[int, RequestOutput]], answer: Answer
) -> web.StreamResponse:
    events = EventStream(request)
    try:
        await events.open()
        try:
            async with rest_of_time(request):
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
