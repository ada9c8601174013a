"""An engine whose output a person can compute, with the interface of `jaxserve.AsyncLLMEngine`.

Token ids 0..255 are the bytes of UTF-8; 256 is `<bos>`, 257 is `<eos>`. Token `i` of choice `j` after a
prompt of `p` tokens is `alphabet[(p + i + j) % len(alphabet)]`, and `<eos>` comes after `eos_after` of them.
The most likely token has the log-probability -0.5, the next (its id plus one) -1.0, and so on; the one that
is sampled is the first. The embedding of a prompt is `vector_of` its token ids.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer

from jaxserve.errors import EngineClosedError, EngineDeadError, QueueFullError
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import Logprob
from jaxserve.pooling import PoolingParams
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.tallies import EngineTallies
from jaxserve.tokenizer import Tokenizer
from jaxserve_checkpoints import TokenizerAssets

BOS, EOS = 256, 257
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; `<bos>` goes before a text when special tokens are added."""
    printable = sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    vocabulary = {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}
    assert sorted(vocabulary) == printable
    hf = HfTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    hf.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    assets = TokenizerAssets(
        tokenizer=hf,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
        unk_token_id=None,
        eos_token_ids=(EOS,),
        chat_template=TEMPLATE,
        special_tokens_map={"bos_token": "<bos>", "eos_token": "<eos>"},
    )
    return Tokenizer(assets)


def vector_of(token_ids: list[int], size: int) -> np.ndarray:
    """float32 [size] of length 1: a ramp whose start the ids decide."""
    ramp = np.arange(size) + sum(token_ids) % 97 + 1
    return (ramp / np.linalg.norm(ramp)).astype(np.float32)


@dataclass
class Stats:
    num_running: int = 0
    num_waiting: int = 0
    pages_total: int = 100
    pages_used: int = 25
    pages_cached: int = 5
    pages_pinned: int = 3
    pinned_tokens: int = 48
    pinned_hits: int = 16
    pages_free: int = 72
    prefix_queries: int = 40
    prefix_hits: int = 10
    num_preemptions: int = 3
    num_compilations: int = 7
    num_steps: int = 11
    generation_tokens: int = 0
    last_step_age: float | None = None


@dataclass
class FakeEngine:
    """Set `pause` to stop all generation before the next token; `fail_after` ends streams with an error, and
    `pause_after` pauses, after so many tokens."""

    alphabet: bytes = b"abcdefghijklmnopqrstuvwxyz"
    eos_after: int | None = None
    fail_after: int | None = None
    pause_after: int | None = None
    max_queue: int | None = None
    max_model_len: int = 512
    vocab_size: int = 258
    hidden_size: int = 8
    model_name: str = "org/fake"
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = field(default_factory=byte_tokenizer)

    def __post_init__(self) -> None:
        self.streams: dict[str, FakeStream] = {}
        self.aborted: list[str] = []
        self.seen: list[tuple[list[int], SamplingParams | PoolingParams, dict[str, Any]]] = []
        self.running = asyncio.Event()
        self.running.set()
        self.error: BaseException | None = None
        self.num_resets = 0
        self.is_ready, self.is_dead = True, False
        self.counts = Stats()
        self.tallies = EngineTallies()

    def pause(self) -> None:
        self.running.clear()

    def resume(self) -> None:
        self.running.set()

    def add_request(
        self,
        prompt: list[int],
        params: SamplingParams | PoolingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        final_only: bool = False,
        arrival_time: float | None = None,
    ) -> FakeStream:
        if self.is_dead:
            raise EngineDeadError("dead")
        if isinstance(params, PoolingParams):
            params.validate_for(self.hidden_size)
        else:
            params.validate_for(self.vocab_size, 20)
        self.check_queue()
        self.seen.append((list(prompt), params, {"priority": priority, "cache_salt": cache_salt}))
        stream = FakeStream(self, request_id or uuid.uuid4().hex, list(prompt), params, final_only)
        for request in stream.requests:
            request.metrics.queued_time = request.metrics.arrival_time
            request.metrics.arrival_time = arrival_time or request.metrics.arrival_time
        self.streams[stream.request_id] = stream
        return stream

    async def add_requests(
        self, prompts: list[list[int]], params: Any, *, in_thread: Any, **options: Any
    ) -> list[FakeStream]:
        self.check_queue()
        most, self.max_queue = self.max_queue, None  # all or none
        try:
            return [self.add_request(prompt, params, **options) for prompt in prompts]
        finally:
            self.max_queue = most

    def check_queue(self) -> None:
        if self.max_queue is not None and len(self.streams) >= self.max_queue:
            raise QueueFullError(f"{len(self.streams)} requests wait")

    def cache_info(self) -> dict[str, str]:
        return {"block_size": "16", "num_gpu_blocks": "100", "cache_dtype": "float32"}

    def stats(self) -> Stats:
        self.counts.num_running = len(self.streams)
        return self.counts

    def die(self, error: BaseException) -> None:
        self.is_dead, self.is_ready, self.error = True, False, error
        self.running.set()

    async def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def describe(self) -> dict[str, Any]:
        return {"model": self.model_name, "devices": ["fake"]}

    def abandon(self, error: BaseException) -> None:
        self.die(error)

    def shutdown(self) -> None:
        self.is_dead, self.is_ready = True, False
        loop = next((stream.loop for stream in self.streams.values()), None)
        if loop is not None:
            loop.call_soon_threadsafe(self.running.set)


class FakeStream:
    def __init__(
        self,
        engine: FakeEngine,
        request_id: str,
        prompt: list[int],
        params: SamplingParams | PoolingParams,
        final_only: bool,
    ) -> None:
        self._final_only = final_only
        self.loop = asyncio.get_running_loop()
        self.request_id = request_id
        self._engine = engine
        self._vector = None
        if isinstance(params, PoolingParams):
            self._vector = vector_of(prompt, params.dimensions or engine.hidden_size)
            params = SamplingParams(max_tokens=0)
        self._params = params
        self._texts = OutputProcessor(engine.tokenizer)
        self.requests = [
            Request(f"{request_id}-{j}", prompt, params, eos_token_ids=frozenset({EOS}))
            for j in range(params.n)
        ]
        self._texts.add(request_id, None, self.requests, params)
        if params.prompt_logprobs is not None:
            entries = [self._logprobs(token, params.prompt_logprobs) for token in prompt[1:]]
            self._texts.set_prompt_logprobs(request_id, [None, *entries])
        self._steps = 0

    def abort(self) -> None:
        if self._engine.streams.pop(self.request_id, None) is not None:
            self._engine.aborted.append(self.request_id)
            for request in self.requests:
                request.metrics.finished_time = request.metrics.finished_time or time.monotonic()
            self._texts.abort(self.request_id)
            self._engine.tallies.request_ended(self.requests, self._texts.snapshot(self.request_id))

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self):
        output = await self._next()
        while self._final_only and not output.finished:
            output = await self._next()
        return output

    async def final(self):
        async for output in self:
            if output.finished:
                return output
        raise AssertionError("a stream ends with a finished output or an error")

    async def _next(self):
        engine = self._engine
        if self.request_id not in engine.streams:
            raise StopAsyncIteration
        await asyncio.sleep(0)
        if self._steps == engine.pause_after:
            engine.pause()
        await engine.running.wait()
        if engine.is_dead or self._steps == engine.fail_after:
            closed = engine.is_dead and engine.error is None
            raise (EngineClosedError if closed else EngineDeadError)("the engine stopped")
        for j, request in enumerate(self.requests):
            if request.finish_reason is None:
                self._step(request, j)
        self._steps += 1
        if self._vector is not None:
            self._texts.set_embedding(self.request_id, self._vector)
        output = self._texts.snapshot(self.request_id)
        if output.finished:
            del engine.streams[self.request_id]
            engine.tallies.request_ended(self.requests, output)
        return output

    def _step(self, request: Request, j: int) -> None:
        params, engine, times = self._params, self._engine, request.metrics
        times.first_scheduled_time = times.first_scheduled_time or time.monotonic()
        if params.max_tokens != 0:
            i = self._steps
            place = (len(request.prompt_token_ids) + i + j) % len(engine.alphabet)
            ends = engine.eos_after is not None and i >= engine.eos_after and not params.ignore_eos
            token = EOS if ends else engine.alphabet[place]
            request.output_token_ids.append(token)
            engine.counts.generation_tokens += 1
            now = time.monotonic()
            engine.tallies.token(request, now)
            times.last_token_time = now
            times.first_token_time = times.first_token_time or times.last_token_time
            logprobs = None if params.logprobs is None else self._logprobs(token, params.logprobs)
            hit = self._texts.process(request, token, logprobs)
            if token == EOS:
                request.finish_reason = "stop"
            elif token in request.stop_token_ids or hit is not None:
                request.finish_reason = "stop"
                request.stop_reason = token if hit is None else hit.stop_string
        room = self._engine.max_model_len - len(request.prompt_token_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        if request.finish_reason is None and len(request.output_token_ids) >= limit:
            request.finish_reason = "length" if self._vector is None else "stop"
        if request.finish_reason is not None:
            times.finished_time = time.monotonic()
            self._texts.finish(request)

    def _logprobs(self, token: int, top: int) -> dict[int, Logprob]:
        vocabulary = self._engine.vocab_size
        return {(token + r) % vocabulary: Logprob(-0.5 * (r + 1), r + 1) for r in range(max(top, 1))}
