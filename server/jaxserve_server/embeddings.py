"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
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
from jaxserve_server.large_json import answered
from jaxserve_server.limits import charge_tokens
from jaxserve_server.middleware import arrival_time_of
from jaxserve_server.observation import observed
from jaxserve_server.protocol import (
    Body,
    Int64,
    ModelName,
    TruncateTokens,
    TruncationSide,
    prompts_of,
)
from jaxserve_server.state import STATE
from jaxserve_server.tokens import check_vocabulary, tokenizer_of
from jaxserve_server.truncation import most_tokens, truncated
from jaxserve_server.workers import off_loop

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine, RequestStream

    Submit = Callable[[list[int]], RequestStream]

MAX_INPUTS = 2048  # as OpenAI
_AT_ONCE = 256  # inputs of one HTTP request that are in the engine
_FULL_SECONDS = 0.02  # between two looks whether the queue has room


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
    """Keep the first numbers of each vector, scaled to length 1 where the model scales its vectors.

    Default and at most: the model's hidden size."""
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


@contextmanager
def _named_input() -> Iterator[None]:
    """What others call the prompt is the input here."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = "input" if error.param == "prompt" else error.param
        raise


async def embeddings(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    state.lifecycle.check_admission()
    body = await read_body(request, EmbeddingBody)
    model = state.model_name(body.model)
    with state.lifecycle.admitted() as engine:
        prompts = await off_loop(sum(map(len, body.input)), _prompts, engine, body)
        params = PoolingParams(body.dimensions)
        cache_salt = cache_salt_of(request, body.cache_salt)

        @_named_input()
        def submit(prompt: list[int]) -> RequestStream:
            return engine.add_request(
                prompt,
                params,
                priority=body.priority,
                cache_salt=cache_salt,
                final_only=True,
                arrival_time=arrival_time_of(request),
            )

        pieces = [b'{"id":"embd-%s","object":"list","data":[' % uuid.uuid4().hex.encode("ascii")]
        with observed(request, "embeddings", model, params) as seen:
            async with aclosing(seen.watch(_outputs(request, prompts, submit))) as outputs:
                async for index, output in outputs:
                    pieces.append(_vector_json(index, embedding_of(output), body.encoding_format))
                    await asyncio.sleep(0)  # the others' turn
        pieces.append(_ending(model, prompts))
        return await answered(request, pieces)


@_named_input()
def _prompts(engine: AsyncLLMEngine, body: EmbeddingBody) -> list[list[int]]:
    """Token ids of every input, checked; blocks for as long as the tokenizer takes."""
    most = most_tokens(engine.max_model_len, body)
    prompts = []
    for given in body.input:
        if isinstance(given, str):
            token_ids = tokenizer_of(engine, "input").encode(given, body.add_special_tokens, max_tokens=most)
        else:
            check_vocabulary(given, engine.vocab_size, "input")
            token_ids = given
        token_ids = truncated(token_ids, body, engine.max_model_len)
        if not token_ids:
            raise InvalidRequestError("input has no tokens", param="input")
        prompts.append(token_ids)
    longest = max(map(len, prompts))
    if longest > engine.max_model_len:
        raise ContextLengthError.over(engine.max_model_len, longest, "input", room=0)
    return prompts


async def _outputs(
    request: web.Request, prompts: Sequence[list[int]], submit: Submit
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(index, finished output) of every input in order; however this ends, no input is left in the engine.

    Some inputs are submitted ahead of the one that is waited for. The first is refused where the queue is
    full, a QueueFullError; once it is in, so is the request: the others wait for their places.
    """
    waiting = deque(prompts)
    streams: deque[RequestStream] = deque()
    try:
        for index in range(len(prompts)):
            while waiting and len(streams) < _AT_ONCE:
                try:
                    streams.append(submit(waiting[0]))
                except QueueFullError:
                    if streams:
                        break
                    if index == 0:
                        raise
                    await asyncio.sleep(_FULL_SECONDS)  # others took the places
                    continue
                charge_tokens(request, len(waiting.popleft()))
                await asyncio.sleep(0)  # checking a long input takes its time
            yield index, await streams[0].final()
            streams.popleft()
    finally:
        for stream in streams:
            stream.abort()


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
