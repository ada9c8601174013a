"""From admitted prompts to deltas: what both generation routes share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxserve.errors import ContextLengthError
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve_server.logprobs import TextOffsets, TokenText
from jaxserve_server.protocol import GenerationBody
from jaxserve_server.workers import off_loop

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine, RequestStream


_BYTES_PER_TOKEN = 4  # of text, about


@dataclass(frozen=True)
class Prompt:
    """Token ids and, where they are known, the text and where in it each token begins (in characters)."""

    token_ids: list[int]
    text: str | None = None
    offsets: list[int] | None = None


def check_context(prompts: Sequence[Prompt], max_model_len: int, param: str, *, room: int = 1) -> None:
    """Every prompt must leave `room` tokens in the context."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + room > max_model_len:
        raise ContextLengthError.over(max_model_len, longest, param, room=room)


@dataclass(frozen=True)
class Work:
    """Everything one HTTP request asks of the engine."""

    prompts: Sequence[Prompt]
    params: SamplingParams  # of every prompt; the engine cuts max_tokens to the room that each leaves
    priority: int
    cache_salt: str | None
    final_only: bool  # only the finished outputs are read


@asynccontextmanager
async def submitted(
    engine: AsyncLLMEngine, work: Work, arrival_time: float
) -> AsyncIterator[list[RequestStream]]:
    """The engine's streams of all prompts; whatever ends the block, they are aborted and their pages free.

    A client's X-Request-Id may repeat, so the engine's keys are its own.
    """
    prompts = [prompt.token_ids for prompt in work.prompts]
    streams = await engine.add_requests(
        prompts,
        work.params,
        priority=work.priority,
        cache_salt=work.cache_salt,
        final_only=work.final_only,
        arrival_time=arrival_time,
        in_thread=partial(off_loop, _BYTES_PER_TOKEN * sum(map(len, prompts))),
    )
    try:
        yield streams
    finally:
        for stream in streams:
            stream.abort()


async def outputs_of(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(prompt index, cumulative output) as they come, from any of the streams, until all are finished."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    # A task for each stream and one queue: the cost of an output does not grow with the number of streams.
    ready: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(len(streams))
    tasks = [asyncio.ensure_future(_pass_on(index, stream, ready)) for index, stream in enumerate(streams)]
    try:
        num_left = len(streams)
        while num_left:
            index, got = await ready.get()
            if got is None:
                num_left -= 1
            elif isinstance(got, Exception):
                raise got
            else:
                yield index, got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(
    index: int, stream: RequestStream, ready: asyncio.Queue[tuple[int, RequestOutput | Exception | None]]
) -> None:
    """A stream's outputs, then None or what failed. While the queue is full, newer outputs coalesce."""
    try:
        async for output in stream:
            await ready.put((index, output))
    except Exception as error:
        await ready.put((index, error))
    else:
        await ready.put((index, None))


@dataclass(frozen=True)
class Delta:
    """What a choice has gained: text, and the tokens (by position) that go with it."""

    text: str
    first_token: int
    end_token: int
    offsets: list[int]  # of all tokens so far; empty when tokens are not shown
    silent_token: int | None  # the position of the EOS or stop id that ended the choice: it has no text
    cut_chars: int  # of the last token's text, which a stop string's end or beginning cut off
    finish_reason: str | None
    stop_reason: str | int | None

    def __bool__(self) -> bool:
        return bool(self.text) or self.end_token > self.first_token or self.finish_reason is not None


def shows_tokens(body: GenerationBody) -> bool:
    """Whether the answer tells tokens apart, by log-probabilities or ids."""
    return body.wants_logprobs or body.return_token_ids


class ChoiceCursor:
    """Cuts one choice's cumulative outputs into deltas; one cut of the final output is the whole answer.

    A token travels with the delta that shows the last of its text, so text that is held back (a possible stop
    string, half a character) holds its tokens back too. Tokens that belong to a stop string cut from the text
    are dropped: ids, log-probabilities and text agree.
    """

    def __init__(self, token_text: TokenText, prompt: Prompt, body: GenerationBody) -> None:
        self._shows_end = body.include_stop_str_in_output
        self._offsets = TextOffsets(token_text, prompt.token_ids) if shows_tokens(body) else None
        self._num_chars = 0
        self._num_tokens = 0
        self.finished = False

    def advance(self, output: CompletionOutput) -> Delta:
        text = output.text[self._num_chars :]
        self._num_chars = len(output.text)
        self.finished = output.finished
        first, offsets, cut_chars = self._num_tokens, list[int](), 0
        by_string = isinstance(output.stop_reason, str)
        if self._offsets is not None:
            offsets = self._offsets.offsets
            self._offsets.extend(output.token_ids[len(offsets) :])
            self._num_tokens = len(offsets) if output.finished and not by_string else self._end(by_string)
            if by_string and self._num_tokens:
                cut_chars = max(0, self._offsets.ends[self._num_tokens - 1] - self._num_chars)
        by_token = output.finish_reason == "stop" and not by_string
        silent = output.num_tokens - 1 if by_token and not self._shows_end else None
        return Delta(
            text,
            first,
            self._num_tokens,
            offsets,
            silent,
            cut_chars,
            output.finish_reason,
            output.stop_reason,
        )

    def _end(self, is_cut: bool) -> int:
        """How many tokens have been shown whole; at a stop string, how many have begun before it."""
        assert self._offsets is not None
        offsets, ends = self._offsets.offsets, self._offsets.ends
        end = self._num_tokens
        while (
            end < len(offsets) and offsets[end] < self._num_chars and (is_cut or ends[end] <= self._num_chars)
        ):
            end += 1
        return end


class Usage:
    """Token counts over all prompts and choices of one HTTP request.

    Totals are kept as outputs come: every chunk may tell them.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._completion: dict[tuple[int, int], int] = {}  # by prompt and choice
        self._cached = [0] * len(prompts)

    def see(self, index: int, output: RequestOutput) -> tuple[int, int]:
        """Counts what an output of prompt `index` adds: (tokens, choices that were not seen before)."""
        self.cached_tokens += output.num_cached_tokens - self._cached[index]
        self._cached[index] = output.num_cached_tokens
        tokens, choices = self.completion_tokens, len(self._completion)
        for choice in output.outputs:
            key, count = (index, choice.index), choice.num_tokens
            self.completion_tokens += count - self._completion.get(key, 0)
            self._completion[key] = count
        return self.completion_tokens - tokens, len(self._completion) - choices

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
