"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import pydantic_core
from aiohttp import web
from pydantic import ConfigDict, Field, WithJsonSchema, field_validator

from jaxserve.errors import ContextLengthError, InvalidRequestError, QueueFullError
from jaxserve.outputs import RequestOutput
from jaxserve.pooling import PoolingParams, embedding_of
from jaxserve_server import field_schemas as schemas
from jaxserve_server.access import cache_salt_of
from jaxserve_server.body import read_body
from jaxserve_server.limits import charge_tokens
from jaxserve_server.middleware import arrival_time_of, log_fields, request_id_of, route_of
from jaxserve_server.observation import Observation, trace_headers
from jaxserve_server.protocol import (
    Body,
    Int64,
    ModelName,
    TruncateTokens,
    TruncationSide,
    prompts_of,
)
from jaxserve_server.sse import SLOW_READER_SECONDS, write
from jaxserve_server.state import STATE
from jaxserve_server.tokens import check_vocabulary, tokenizer_of
from jaxserve_server.truncation import truncated
from jaxserve_server.workers import off_loop

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine, RequestStream

logger = logging.getLogger(__name__)

MAX_INPUTS = 2048  # as OpenAI
_AT_ONCE = 256  # inputs of one HTTP request that are in the engine


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["The sea.", "A ship."]}]})
    not_honoured: ClassVar[dict[str, tuple[Any, ...]]] = {
        "messages": (),
        "normalize": (),
        "use_activation": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "mm_processor_kwargs": ({},),
    }
    ignored = ("user",)

    model: ModelName = ""
    # Checked by hand, as a completion's prompt.
    input: Annotated[Any, WithJsonSchema(schemas.prompts(MAX_INPUTS))]
    """A text, a list of texts, a list of token ids, or a list of those."""
    encoding_format: Literal["float", "base64"] = "float"
    """Vectors as lists of numbers, or as the base64 of little-endian 32-bit floats."""
    dimensions: int | None = Field(None, ge=1, le=2**31 - 1)
    """Keep the first numbers of each vector, scaled again. Default and at most: the model's hidden size."""
    add_special_tokens: bool = True
    """Begin and end a text as the model's tokenizer does."""
    truncate_prompt_tokens: TruncateTokens = None
    truncation_side: TruncationSide = "left"
    priority: Int64 = 0
    """Lower goes first, where the server schedules by priority."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Cached prefixes are shared only between requests with the same salt."""

    @field_validator("input")
    @classmethod
    def _input(cls, value: Any) -> list[str] | list[list[int]]:
        return prompts_of(value, "input", MAX_INPUTS)


async def embeddings(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    state.lifecycle.check_admission()
    body = await read_body(request, EmbeddingBody)
    model = state.model_name(body.model)
    with state.lifecycle.admitted() as engine:
        prompts = await off_loop(sum(map(len, body.input)), _prompts, engine, body)
        work = Work(
            prompts, PoolingParams(body.dimensions), body.priority, cache_salt_of(request, body.cache_salt)
        )
        pieces = [b'{"id":"embd-%s","object":"list","data":[' % uuid.uuid4().hex.encode("ascii")]
        async with aclosing(_watched(request, engine, work, model)) as outputs:
            async for index, output in outputs:
                pieces.append(_vector_json(index, embedding_of(output), body.encoding_format))
                await asyncio.sleep(0)  # the others' turn
        pieces.append(_ending(model, prompts))
        return await _send(request, pieces)


@dataclass(frozen=True)
class Work:
    """Everything one HTTP request asks of the engine."""

    prompts: Sequence[list[int]]
    params: PoolingParams
    priority: int
    cache_salt: str | None


def _prompts(engine: AsyncLLMEngine, body: EmbeddingBody) -> list[list[int]]:
    """Token ids of every input, checked; blocks for as long as the tokenizer takes."""
    prompts = []
    for given in body.input:
        if isinstance(given, str):
            token_ids = tokenizer_of(engine, "input").encode(given, body.add_special_tokens)
        else:
            check_vocabulary(given, engine.vocab_size, "input")
            token_ids = given
        token_ids = truncated(token_ids, body, engine.max_model_len)
        if not token_ids:
            raise InvalidRequestError("input has no tokens", param="input")
        prompts.append(token_ids)
    longest = max(map(len, prompts))
    if longest > engine.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {engine.max_model_len} tokens, but an input has "
            f"{longest} tokens. Shorten it, or have it cut with truncate_prompt_tokens.",
            param="input",
        )
    return prompts


async def _watched(
    request: web.Request, engine: AsyncLLMEngine, work: Work, model: str
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(index, finished output) of every input in order, seen for the log and the trace."""
    seen = Observation(
        request_id=request_id_of(request),
        operation="embeddings",
        route=route_of(request) or "",
        model=model,
        params=work.params,
        arrival_time=arrival_time_of(request),
        trace_headers=trace_headers(request),
    )
    try:
        async with aclosing(seen.watch(_outputs(request, engine, work))) as watched:
            async for index, output in watched:
                yield index, output
    finally:
        tracer = request.app[STATE].tracer
        seen.trace_id = seen.trace_id if tracer is None else tracer.record(seen)
        log_fields(request, **seen.log_fields())


async def _outputs(
    request: web.Request, engine: AsyncLLMEngine, work: Work
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Submit the inputs, some ahead of the one that is waited for; however this ends, none is left.

    Where the queue has room for some of them the others wait here; where it has none for the first, that is
    a QueueFullError.
    """
    waiting = deque(work.prompts)
    streams: deque[RequestStream] = deque()
    try:
        for index in range(len(work.prompts)):
            while waiting and len(streams) < _AT_ONCE:
                try:
                    streams.append(_submit(request, engine, work, waiting[0]))
                except QueueFullError:
                    if not streams:
                        raise
                    break
                charge_tokens(request, len(waiting.popleft()))
                await asyncio.sleep(0)  # checking a long input takes its time
            yield index, await streams[0].final()
            streams.popleft()
    finally:
        for stream in streams:
            stream.abort()


def _submit(request: web.Request, engine: AsyncLLMEngine, work: Work, prompt: list[int]) -> RequestStream:
    try:
        return engine.add_request(
            prompt,
            work.params,
            request_id=uuid.uuid4().hex,
            priority=work.priority,
            cache_salt=work.cache_salt,
            final_only=True,
            arrival_time=arrival_time_of(request),
        )
    except InvalidRequestError as error:
        error.param = "input" if error.param == "prompt" else error.param  # the engine's name for it
        raise


# The body is made in pieces, one for each vector, and sent in pieces: two thousand vectors of some thousand
# numbers are tens of megabytes, which in one piece would hold up everybody else.


def _vector_json(index: int, vector: np.ndarray, encoding: str) -> bytes:
    """An element of `data`, with the comma before it."""
    if not np.isfinite(vector).all():
        raise ArithmeticError("the model gave an embedding with numbers that are not finite")
    shown: Any = vector.tolist()
    if encoding == "base64":
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    data = pydantic_core.to_json({"object": "embedding", "index": index, "embedding": shown})
    return b"," + data if index else data


def _ending(model: str, prompts: Sequence[list[int]]) -> bytes:
    count = sum(map(len, prompts))
    rest = {"model": model, "usage": {"prompt_tokens": count, "total_tokens": count}}
    return b"]," + pydantic_core.to_json(rest)[1:]


async def _send(request: web.Request, pieces: Sequence[bytes]) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_type = "application/json"
    response.content_length = sum(map(len, pieces))
    try:
        await response.prepare(request)
        for piece in pieces:
            await write(request, response, piece, SLOW_READER_SECONDS)
        await response.write_eof()
    except ConnectionError as error:
        logger.info("an answer ended early: %s", error)
        request.app[STATE].metrics.disconnected()
    return response
