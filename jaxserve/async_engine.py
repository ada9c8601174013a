"""`AsyncLLMEngine`: the engine for asyncio. Many requests at once, each an async iterator of its outputs."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from jaxserve.engine import EngineStats, LLMEngine, NewRequest, Prompt
from jaxserve.engine_args import EngineArgs
from jaxserve.engine_loop import EngineLoop
from jaxserve.loading import load_engine
from jaxserve.outputs import RequestOutput
from jaxserve.pooling import PoolingParams, embedding_of
from jaxserve.sampling_params import SamplingParams
from jaxserve.tallies import EngineTallies
from jaxserve.tokenizer import Tokenizer
from pallas_kernels.support import resolve

InThread = Callable[[Callable[[], list[NewRequest]]], Awaitable[list[NewRequest]]]
_INLINE_TOKENS = 16 * 1024  # of prompts that are checked on the event loop: a millisecond


class _Waker:
    """Wakes readers of an event loop from another thread, many at one wake-up, which is a system call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._ready: deque[RequestStream] = deque()
        self._is_called = False  # and has not looked yet

    def add(self, stream: RequestStream) -> None:
        """Its readers are among those of the next wake-up."""
        self._ready.append(stream)

    def wake(self) -> None:
        if self._is_called or not self._ready:
            return
        loop = self._loop()
        if loop is not None:
            self._is_called = True
            with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        # Cleared before the look, so that what comes after the look calls again.
        self._is_called = False
        while self._ready:
            self._ready.popleft()._wake_readers()


_wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker] = weakref.WeakKeyDictionary()


class RequestStream:
    """Outputs of one request, cumulative; those not read in time are replaced by newer ones.

    Iterating ends after the finished output. Leaving the iteration early does not end the request: call
    `abort`, or use `AsyncLLMEngine.generate`, which does.
    """

    def __init__(self, loop: EngineLoop, request_id: str, *, final_only: bool) -> None:
        self.request_id = request_id
        self.final_only = final_only
        self._engine_loop = loop
        self._event_loop = asyncio.get_running_loop()
        self._waker = _wakers.setdefault(self._event_loop, _Waker(self._event_loop))
        # Not an `asyncio.Event`: its coroutine and its flag were a fifth of what an output costs here.
        self._readers: list[asyncio.Future[None]] = []
        # One place, whose operations are atomic: the two threads never see half of a change.
        self._newest: deque[RequestOutput] = deque(maxlen=1)
        self._error: BaseException | None = None
        self._is_over = False

    # Called on the engine's thread.

    def put(self, output: RequestOutput) -> None:
        self._newest.append(output)
        self._waker.add(self)

    def wake(self) -> None:
        self._waker.wake()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._waker.add(self)
        self._waker.wake()

    # Called on the event loop.

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        while not self._newest:
            if self._error is not None:
                self._is_over = True
                raise self._error
            # What comes after these looks wakes by a callback of the event loop, so after the wait has begun.
            reader = self._event_loop.create_future()
            self._readers.append(reader)
            await reader
        output = self._newest.pop()  # only this thread takes out
        self._is_over = output.finished
        return output

    def _wake_readers(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():  # it may be cancelled
                reader.set_result(None)

    async def final(self) -> RequestOutput:
        """The finished output."""
        async for output in self:
            if output.finished:
                return output
        raise AssertionError("a stream ends with a finished output or an error")

    def abort(self) -> None:
        """End the request and free its pages; harmless when it has ended. Its last output is still read."""
        self._engine_loop.abort(self.request_id, self)


class AsyncLLMEngine:
    """An engine on a thread of its own, for asyncio programs. Methods are called from an event loop."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._loop = EngineLoop(engine)

    @classmethod
    def from_engine_args(cls, args: EngineArgs | Mapping[str, Any], **kwargs: Any) -> AsyncLLMEngine:
        """Load a model; blocks until it is ready. `kwargs` go to `jaxserve.loading.load_engine`."""
        if not isinstance(args, EngineArgs):
            args = EngineArgs.from_mapping(args)
        return cls(load_engine(args, **kwargs))

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._engine.config.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._engine.config.model.vocab_size

    @property
    def model_name(self) -> str:
        return self._engine.config.model_name

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """Sampling parameters that the model's generation_config suggests."""
        return dict(self._engine.config.default_sampling_params)

    @property
    def is_ready(self) -> bool:
        return self._loop.is_alive

    @property
    def is_dead(self) -> bool:
        return not self._loop.is_alive

    @property
    def error(self) -> BaseException | None:
        """What stopped the engine, if something did."""
        return self._loop.error

    def stats(self) -> EngineStats:
        return self._engine.stats()

    @property
    def tallies(self) -> EngineTallies:
        """Counts since the start; reading them never waits for the engine."""
        return self._engine.scheduler.tallies

    def cache_info(self) -> dict[str, str]:
        """See `LLMEngine.cache_info`."""
        return self._engine.cache_info()

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        final_only: bool = False,
        arrival_time: float | None = None,
    ) -> RequestStream:
        """Submit a request; `final_only` saves the work of outputs that nobody reads.

        With PoolingParams nothing is generated: the one output is the finished one, with an `embedding`.
        `arrival_time` (of `time.monotonic`) is when a server got the request: latencies count from there.

        Raises InvalidRequestError, QueueFullError or EngineDeadError before anything is queued.
        """
        request_id = request_id or uuid.uuid4().hex
        new = self._engine.prepare(
            prompt,
            params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival_time,
        )
        stream = RequestStream(self._loop, request_id, final_only=final_only)
        self._loop.submit(new, stream)
        return stream

    def check_queue(self) -> None:
        """Raises QueueFullError, EngineDeadError where a request would be refused now."""
        self._loop.check_queue()

    async def add_requests(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        final_only: bool = False,
        arrival_time: float | None = None,
        in_thread: InThread = asyncio.to_thread,
    ) -> list[RequestStream]:
        """Submit several prompts as one: all of them are queued, or none. Otherwise as `add_request`.

        A queue that is not full takes them all. Long prompts are checked on a thread, by `in_thread`: for
        programs that keep threads of their own.
        """

        def prepare() -> list[NewRequest]:
            return [
                self._engine.prepare(
                    prompt,
                    params,
                    uuid.uuid4().hex,
                    priority=priority,
                    cache_salt=cache_salt,
                    arrival_time=arrival_time,
                )
                for prompt in prompts
            ]

        num_bad = sum(map(len, params.bad_words or ()))  # characters to encode
        is_long = sum(map(len, prompts)) + num_bad > _INLINE_TOKENS
        news = await in_thread(prepare) if is_long else prepare()
        streams = [RequestStream(self._loop, new.request_id, final_only=final_only) for new in news]
        self._loop.submit_all(news, streams)
        return streams

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Cumulative outputs until the request is finished; closing the iterator aborts it."""
        stream = self.add_request(prompt, params, request_id, priority=priority, cache_salt=cache_salt)
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    async def embed(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> np.ndarray:
        """The embedding of one prompt: float32 [hidden], or [params.dimensions]; see `LLM.embed`.

        Many at once through `asyncio.gather`. Cancelling it ends the request and frees its pages.
        """
        stream = self.add_request(
            prompt,
            params or PoolingParams(),
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            final_only=True,
        )
        try:
            return embedding_of(await stream.final())
        finally:
            stream.abort()

    async def update_weights(self, params: Any) -> None:
        """See `LLMEngine.update_weights`."""
        await asyncio.wrap_future(self._loop.call(lambda: self._engine.update_weights(params)))

    async def reset_prefix_cache(self) -> None:
        await asyncio.wrap_future(self._loop.call(self._engine.scheduler.reset_prefix_cache))

    async def drain(self, timeout: float) -> bool:
        """Wait until no request is left, `timeout` seconds at most; whether none is."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self._loop.num_unfinished and self._loop.is_alive:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def describe(self) -> dict[str, Any]:
        """What runs here, and on what: values for an operator to read, and for JSON."""
        engine = self._engine
        config, spec = engine.config, engine.runner.spec
        return {
            "model": config.model_name,
            "family": config.model.family,
            "dtype": str(engine.skeleton.dtype),
            "kv_cache_dtype": config.kv_cache_dtype,
            "platform": spec.platform,
            "devices": [device.device_kind for device in spec.mesh.devices.flat],
            "mesh": dict(spec.mesh.shape),
            "attention_implementation": resolve(
                "ragged_paged_attention", spec.platform, spec.attention_implementation, chip=spec.chip
            ),
            "limits": dataclasses.asdict(engine.runner.limits),
            "max_logprobs": config.max_logprobs,
            "seed": config.seed,
            "default_sampling_params": dict(config.default_sampling_params),
            "stats": dataclasses.asdict(engine.stats()),
        }

    def abandon(self, error: BaseException) -> None:
        """Give up an engine whose thread hangs: every request fails with EngineDeadError."""
        self._loop.abandon(error)

    def shutdown(self) -> None:
        """Stop the engine's thread; requests that are left fail with EngineDeadError. Idempotent."""
        self._loop.close()
