"""The engine: schedule, run, update. Synchronous; one thread owns it (see `engine_loop`)."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.model_runner import ModelRunner, StepHandle
from jaxserve.models.config import ModelConfig
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import RequestOutput, TokenLogprobs
from jaxserve.pooling import PooledPrompt, Pooling, PoolingParams
from jaxserve.profiling import NoProfiler, StepProfiler, part
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Scheduler, SchedulerOutput
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights import ROPE_PATH, ModelSkeleton, rope_leaf, weights_from

# A text, token ids, or {"prompt": text, "prompt_token_ids": ids} with either or both.
Prompt = str | Sequence[int] | Mapping[str, Any]
# Of a request for an embedding: its prompt is run.
_SAMPLES_NOTHING = SamplingParams(temperature=0.0, max_tokens=0, detokenize=False)
_RUN_AHEAD = 1  # steps that may be under way when the next one is scheduled


@dataclass(frozen=True)
class EngineStats:
    """A picture of the engine; counters since its start."""

    num_running: int
    num_waiting: int
    pages_total: int  # that can be allocated
    pages_used: int  # by requests
    pages_cached: int  # free, and still holding a prefix
    pages_free: int  # cached ones included
    prefix_queries: int  # tokens
    prefix_hits: int  # tokens
    num_preemptions: int
    num_compilations: int
    num_steps: int
    generation_tokens: int
    pages_pinned: int  # held for pinned prefixes; not counted as used
    pinned_tokens: int  # in them
    pinned_hits: int  # those of prefix_hits that were found in pinned pages
    last_step_age: float | None  # seconds of the step now under way; waiting for the compiler is not counted


@dataclass(frozen=True)
class EngineConfig:
    """What an engine tells its users of itself."""

    model_name: str
    model: ModelConfig
    max_model_len: int
    max_logprobs: int
    default_sampling_params: Mapping[str, Any]
    eos_token_ids: frozenset[int]
    seed: int | None
    kv_cache_dtype: str = "auto"
    memory_utilization: float | None = None  # None: the pool was given a size of its own
    pooling: Pooling = field(default_factory=Pooling)  # of embeddings


@dataclass(frozen=True)
class NewRequest:
    """A validated request, ready for the engine's thread."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    pooling: PoolingParams | None = None  # an embedding is wanted; `params` then samples nothing
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    arrival_time: float = field(default_factory=time.monotonic)


class LLMEngine:
    """Owns the scheduler, the runner and the outputs. All methods but `prepare` belong to one thread."""

    def __init__(
        self,
        config: EngineConfig,
        skeleton: ModelSkeleton,
        runner: ModelRunner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.config = config
        self.skeleton = skeleton
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(tokenizer)
        self.profiler: StepProfiler | NoProfiler = NoProfiler()  # the caller's to set, before the first step
        self._under_way: deque[StepHandle] = deque()
        self._choices: dict[str, list[Request]] = {}  # request id -> its choices
        self._owner: dict[str, str] = {}  # a choice's id -> request id
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self._pooled: dict[str, PooledPrompt] = {}
        self._random = random.Random(config.seed)
        # All prompts of a caller have the same words: a thousand prompts encode and keep them once.
        self._bad_word_ids = lru_cache(maxsize=4)(self._encode_bad_words)
        self._num_requests = 0
        self.num_steps = 0
        self.generation_tokens = 0
        self._step_started: float | None = None
        self._last_results = 0.0  # when a step's results last came

    # ---- requests

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> NewRequest:
        """Tokenise and validate; callable from any thread. Raises InvalidRequestError."""
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        pooling = None
        if isinstance(params, PoolingParams):
            self.config.pooling.check()
            params.validate_for(self.config.model.hidden_size)
            pooling, params = params, _SAMPLES_NOTHING
        text, token_ids = self._tokenise(prompt)
        vocab_size = self.config.model.vocab_size
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params"
            )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError("priority must be an integer", "priority")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise InvalidRequestError("cache_salt must be a string", "cache_salt")
        # The length first: what goes through all ids then is bounded by the context.
        self.scheduler.config.total_tokens_limit(len(token_ids), params.max_tokens)
        if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise InvalidRequestError(f"prompt token ids must be in [0, {vocab_size})", "prompt")
        params.validate_for(vocab_size, self.config.max_logprobs)
        if self.tokenizer is None and params.bad_words:
            raise InvalidRequestError("bad_words need a tokenizer, and this model has none", "bad_words")
        return NewRequest(
            request_id,
            text,
            token_ids,
            params,
            priority,
            cache_salt,
            pooling,
            self._bad_word_ids(tuple(params.bad_words or ())),
            arrival_time,
        )

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: str | None = None
        ids: Any = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            ids = prompt
        if ids is None:
            if text is None:
                raise InvalidRequestError("a prompt needs a text or prompt_token_ids", "prompt")
            if self.tokenizer is None:
                raise InvalidRequestError(
                    "this model has no tokenizer: give the prompt as token ids", "prompt"
                )
            if not isinstance(text, str):
                raise InvalidRequestError(f"a prompt's text is a string, got {type(text).__name__}", "prompt")
            return text, self.tokenizer.encode(text)
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence | np.ndarray):
            raise InvalidRequestError(
                f"a prompt is a text, a list of token ids or a mapping, got {type(ids).__name__}", "prompt"
            )
        kinds = set(map(type, ids))
        if kinds == {int}:
            return text, list(ids)
        if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
            raise InvalidRequestError("prompt token ids must be integers", "prompt")
        return text, [int(i) for i in ids]

    def add(self, *news: NewRequest) -> None:
        """Queue prepared requests, all or none.

        Raises QueueFullError, InvalidRequestError for an id in use.
        """
        choices = [self._make_choices(new) for new in news]
        known = []
        try:
            for new, requests in zip(news, choices, strict=True):
                self.processor.add(new.request_id, new.prompt, requests, new.params)
                known.append(new.request_id)
            self.scheduler.add_requests([request for requests in choices for request in requests])
        except Exception:
            for request_id in known:
                self.processor.remove(request_id)
            raise
        for new, requests in zip(news, choices, strict=True):
            self._take_on(new, requests)

    def _make_choices(self, new: NewRequest) -> list[Request]:
        params = new.params
        pool_from = None
        if new.pooling is not None:
            pool_from = self.config.pooling.first_position(len(new.prompt_token_ids))
        requests = []
        for index in range(params.n):
            seed = self._random.getrandbits(64) if params.seed is None else params.seed + index
            self._num_requests += 1
            requests.append(
                Request(
                    request_id=f"{self._num_requests}",  # ours: a caller's may come twice
                    prompt_token_ids=new.prompt_token_ids,
                    params=params,
                    priority=new.priority,
                    cache_salt=new.cache_salt,
                    arrival_time=new.arrival_time,
                    seed=seed,
                    eos_token_ids=frozenset() if params.ignore_eos else self.config.eos_token_ids,
                    bad_words_token_ids=new.bad_words_token_ids,
                    pool_from=pool_from,
                )
            )
        return requests

    def _take_on(self, new: NewRequest, requests: list[Request]) -> None:
        num_prompt = len(new.prompt_token_ids)
        self._choices[new.request_id] = requests
        self._owner.update((request.request_id, new.request_id) for request in requests)
        if new.pooling is not None:
            self._pooled[new.request_id] = PooledPrompt(self.config.pooling, new.pooling, num_prompt)
        if new.params.prompt_logprobs is not None:
            table: list[TokenLogprobs | None] = [None] * len(new.prompt_token_ids)
            self._prompt_logprobs[new.request_id] = table
            if len(table) == 1:  # nothing to score
                self.processor.set_prompt_logprobs(new.request_id, table)

    def _encode_bad_words(self, words: tuple[str, ...]) -> Sequence[Sequence[int]]:
        if self.tokenizer is None:
            return ()
        return tuple(ids for word in words for ids in self.tokenizer.bad_word_token_ids(word))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free its pages; its last state, None when it is not known."""
        choices = self._choices.get(request_id)
        if choices is None:
            return None
        for request in choices:
            self.scheduler.abort(request.request_id)
        self.processor.abort(request_id)
        output = self.processor.snapshot(request_id)
        self._forget(request_id, output)
        return output

    def _forget(self, request_id: str, last_output: RequestOutput) -> None:
        self.scheduler.tallies.request_ended(self._choices[request_id], last_output)
        self.processor.remove(request_id)
        self._prompt_logprobs.pop(request_id, None)
        self._pooled.pop(request_id, None)
        for request in self._choices.pop(request_id):
            del self._owner[request.request_id]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._under_way)

    @property
    def has_step_under_way(self) -> bool:
        return bool(self._under_way)

    clock = staticmethod(time.monotonic)  # seconds; the scheduler's

    # ---- the three verbs

    def step(self, wants_output: Callable[[str], bool] = lambda request_id: True) -> list[RequestOutput]:
        """Schedule and start a step, then take the results of the one before it.

        Returns the state of the requests that advanced: of all that finished, and of those others that
        `wants_output` names. Empty when nothing could be done yet.
        """
        if not self.has_work:
            return []
        with self.profiler.step(self.num_steps):
            return self._step(wants_output)

    def _step(self, wants_output: Callable[[str], bool]) -> list[RequestOutput]:
        if self._step_started is None:
            self._step_started = time.monotonic()
        with part("schedule"):
            output = self.scheduler.schedule()
        if output.scheduled:
            with part("execute"):
                output.dispatch_time = time.monotonic()
                self._under_way.append(self.runner.execute(output))
            self.num_steps += 1
            self.scheduler.tallies.step_tokens.add(output.num_tokens)
        if len(self._under_way) > _RUN_AHEAD or (self._under_way and not output.scheduled):
            with part("update"):
                outputs = self._take_results(self._under_way.popleft(), wants_output)
            self._step_started = time.monotonic() if self._under_way else None
            return outputs
        if not self._under_way:
            self._step_started = None
        return []

    def _take_results(self, handle: StepHandle, wants_output: Callable[[str], bool]) -> list[RequestOutput]:
        tokens = handle.tokens()
        self._measure(handle.output)
        logprobs = handle.logprobs()
        self._take_prompt_logprobs(handle)
        self._take_pooled(handle)
        touched: dict[str, bool] = {}  # request id -> whether a choice of it has ended now
        for request in self.scheduler.update(handle.output, tokens):
            key = request.request_id
            owner = self._owner.get(key)
            if owner is None:
                continue
            # Of an unfinished request only what this step sampled: a request aborted meanwhile is not there.
            if key in tokens:
                self.generation_tokens += 1
                hit = self.processor.process(request, tokens[key], logprobs.get(key))
                if hit is not None and not request.is_finished:
                    self.scheduler.finish(key, "stop", hit.stop_string)
            has_ended = request.is_finished
            if has_ended:
                self.processor.finish(request)
            touched[owner] = has_ended or touched.get(owner, False)
        outputs = []
        for request_id, has_ended in touched.items():
            is_finished = has_ended and all(request.is_finished for request in self._choices[request_id])
            if is_finished or wants_output(request_id):
                outputs.append(self.processor.snapshot(request_id))
            if is_finished:
                self._forget(request_id, outputs[-1])
        return outputs

    def _measure(self, output: SchedulerOutput) -> None:
        """Tell the scheduler what the step took whose results have just come."""
        now, started = time.monotonic(), max(output.dispatch_time, self._last_results)
        self._last_results = now
        if self.runner.programs.waited_until <= started:  # no compilation was in it
            self.scheduler.observe(output, now - started)

    def _take_prompt_logprobs(self, handle: StepHandle) -> None:
        for request, first, entries in handle.prompt_logprobs():
            owner = self._owner.get(request.request_id)
            if owner is None:
                continue
            table = self._prompt_logprobs[owner]
            table[first : first + len(entries)] = entries
            if all(entry is not None for entry in table[1:]):
                self.processor.set_prompt_logprobs(owner, table)

    def _take_pooled(self, handle: StepHandle) -> None:
        for request, first, count, total in handle.pooled_sums():
            owner = self._owner.get(request.request_id)
            if owner is None:
                continue
            pooled = self._pooled[owner]
            pooled.add(first, count, total)
            if pooled.is_complete:
                self.processor.set_embedding(owner, pooled.vector())

    # ---- beside the requests

    def pin_prefixes(self, prefixes: Sequence[Sequence[int]]) -> None:
        """Compute prefixes that stay in the cache; runs steps until they are there."""
        self.scheduler.pin_prefixes(prefixes)
        while self.has_work:
            self.step()

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Raw logits float32 [num_tokens, vocab]; borrows free pages for the time of the call."""
        ids = self._tokenise({"prompt_token_ids": token_ids})[1]
        vocab_size, limit = self.config.model.vocab_size, self.config.max_model_len
        if not ids or any(not 0 <= i < vocab_size for i in ids):
            raise InvalidRequestError(
                f"token ids must be a non-empty list of ids in [0, {vocab_size})", "token_ids"
            )
        if len(ids) > limit:
            raise ContextLengthError.over(limit, len(ids), "token_ids", room=0)
        pages = self.scheduler.allocator.allocate(-(-len(ids) // self.scheduler.config.page_size))
        if pages is None:
            raise InvalidRequestError(
                "no free pages for these tokens; wait for running requests", "token_ids"
            )
        try:
            return self.runner.logits(ids, pages, self._weights_for(len(ids)))
        finally:
            self.scheduler.allocator.free(pages)

    def _weights_for(self, num_tokens: int) -> Any:
        """Dynamic rope is a function of the sequence's length, which is known here."""
        if self.config.model.rope.rope_type != "dynamic":
            return None
        leaf = rope_leaf(self.skeleton, None, num_tokens)
        is_rope = [leaf_info.path == ROPE_PATH for leaf_info in self.skeleton.leaves]
        return tuple(leaf if r else w for r, w in zip(is_rope, self.runner.weights, strict=True))

    def update_weights(self, params: Any) -> None:
        """Use other weights of the same shapes from the next step on, and forget cached prefixes.

        Running requests go on with the keys and values they have.
        """
        self.runner.weights = weights_from(params, self.skeleton)
        self.scheduler.reset_prefix_cache()

    def _step_age(self) -> float | None:
        started, programs = self._step_started, self.runner.programs
        if started is None or programs.is_waited_for:
            return None
        return time.monotonic() - max(started, programs.waited_until)

    def stats(self) -> EngineStats:
        """Callable from any thread: reads counters only."""
        allocator = self.scheduler.allocator
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            pages_total=allocator.num_pages - 1,
            pages_used=max(allocator.num_used - self.scheduler.num_pinned, 0),
            pages_cached=allocator.num_cached,
            pages_free=allocator.num_free,
            prefix_queries=self.scheduler.prefix_queries,
            prefix_hits=self.scheduler.prefix_hits,
            num_preemptions=self.scheduler.num_preemptions,
            num_compilations=self.runner.num_compilations,
            num_steps=self.num_steps,
            generation_tokens=self.generation_tokens,
            pages_pinned=self.scheduler.num_pinned,
            pinned_tokens=self.scheduler.num_pinned * allocator.page_size,
            pinned_hits=self.scheduler.pinned_hits,
            last_step_age=self._step_age(),
        )

    def cache_info(self) -> dict[str, str]:
        """How the pool of keys and values is set up, under the names that vLLM gives these settings."""
        limits = self.scheduler.config
        return {
            "block_size": str(limits.page_size),
            "num_gpu_blocks": str(limits.num_pages - 1),  # that can be allocated
            "kv_cache_size_tokens": str(limits.pool_tokens),
            "cache_dtype": self.config.kv_cache_dtype,
            "enable_prefix_caching": str(limits.enable_prefix_caching),
            "gpu_memory_utilization": str(self.config.memory_utilization),
        }

    def use_idle_time(self) -> bool:
        """Do a piece of work that may wait; whether there was one."""
        self._step_started = time.monotonic()  # it runs on the device too, and may hang there
        try:
            return self.runner.try_unused_program()
        finally:
            self._step_started = None

    def close(self) -> None:
        """Let go of the device's memory. Called once, after the last step."""
        self.scheduler.tallies.failed(request for choices in self._choices.values() for request in choices)
        self._under_way.clear()
        self.profiler.close()
        self.runner.close()
