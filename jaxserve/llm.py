"""`LLM`: the engine for scripts and notebooks."""

from __future__ import annotations

import itertools
import queue
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.async_engine import RequestStream
from jaxserve.chat_template import check_template_kwargs
from jaxserve.engine import EngineStats, Prompt
from jaxserve.engine_args import EngineArgs
from jaxserve.engine_loop import EngineLoop
from jaxserve.errors import InvalidRequestError
from jaxserve.loading import Live, load_engine
from jaxserve.models.config import ModelConfig
from jaxserve.outputs import RequestOutput
from jaxserve.pooling import PoolingParams, embedding_of
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights import named_arrays

Message = Mapping[str, Any]


class _FinalSink:
    """Puts a request's last output, or its error, into a queue."""

    final_only = True

    def __init__(
        self, results: queue.SimpleQueue[tuple[int, RequestOutput | BaseException]], index: int
    ) -> None:
        self._results = results
        self._index = index

    def put(self, output: RequestOutput) -> None:
        self._results.put((self._index, output))

    def wake(self) -> None:
        """The queue has."""

    def fail(self, error: BaseException) -> None:
        self._results.put((self._index, error))


class LLM:
    """A model ready to generate; a context manager that frees it.

    Args:
        model: a model reference (see `EngineArgs.model`); or live weights: an nnx.Module or nnx.State of a
            family's structure, or {Hugging Face tensor name: array}. Live weights are not copied where they
            already have the step's dtype and place.
        config: for live weights, a ModelConfig or the dict of a config.json.
        tokenizer: for live weights, a Tokenizer; otherwise a model reference whose tokenizer to use.
        engine_args: fields of EngineArgs.

    Raises:
        ConfigError, CheckpointError: see `jaxserve.loading.load_engine`.

    It runs on a thread of its own, so it works inside a running event loop (Jupyter) as well.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        config: ModelConfig | Mapping[str, Any] | None = None,
        tokenizer: Tokenizer | str | None = None,
        report: Callable[[str], None] | None = None,
        **engine_args: Any,
    ) -> None:
        is_reference = model is None or isinstance(model, str) or hasattr(model, "__fspath__")
        live = None
        if is_reference:
            if config is not None:
                raise InvalidRequestError("config is for live weights only", "config")
            if model is not None:
                engine_args["model"] = str(model)
            if tokenizer is not None and not isinstance(tokenizer, str):
                raise InvalidRequestError("tokenizer must be a model reference", "tokenizer")
            engine_args["tokenizer"] = tokenizer
        else:
            if config is None:
                raise InvalidRequestError("live weights need a config", "config")
            if isinstance(tokenizer, str):
                raise InvalidRequestError("with live weights, tokenizer must be a Tokenizer", "tokenizer")
            live = Live(model, config, tokenizer)
        args = EngineArgs.from_mapping(engine_args)
        self._engine = load_engine(args, live, **({} if report is None else {"report": report}))
        self._loop = EngineLoop(self._engine)
        weakref.finalize(self, self._loop.close)  # an LLM that is dropped without close
        self._request_ids = itertools.count(1)  # not `+= 1`: any thread may generate

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        return self._engine.config.model

    @property
    def max_model_len(self) -> int:
        return self._engine.config.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, batched; outputs in input order.

        Args:
            prompts: a text, a list of token ids, {"prompt_token_ids": [...]}, or a list of these.
            sampling_params: one for all prompts or one each; by default SamplingParams().
            progress: show a bar; by default where a person watches (a terminal or a notebook).

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was started then.
            EngineDeadError: the engine has stopped.
        """
        batch = _as_list(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        each = (
            list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params] * len(batch)
        )
        if len(each) != len(batch):
            raise InvalidRequestError(
                f"{len(batch)} prompts but {len(each)} sampling_params", "sampling_params"
            )
        return self._run(batch, each, _bar("generating", len(batch), progress))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> np.ndarray:
        """Embeddings of prompts, batched: float32 [num_prompts, hidden], in input order.

        Each is the mean over the prompt's final hidden states or that of its last token, scaled to length 1,
        as the checkpoint says: sentence-transformers' `modules.json` or GGUF's `pooling_type`; without them
        the last token's, scaled.

        Args:
            prompts: as for `generate`. One may fill the whole context.
            pooling_params: `dimensions` keeps the first numbers only ([num_prompts, dimensions]).
            progress: as for `generate`.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong, or the checkpoint asks for a pooling that is
                not implemented; nothing was started then.
            EngineDeadError: the engine has stopped.
        """
        batch = _as_list(prompts)
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(
                f"pooling_params must be PoolingParams, got {type(params).__name__}", "pooling_params"
            )
        outputs = self._run(batch, [params] * len(batch), _bar("embedding", len(batch), progress))
        size = params.dimensions or self.model_config.hidden_size
        return np.array([embedding_of(output) for output in outputs], np.float32).reshape(len(batch), size)

    def _run(
        self, batch: Sequence[Prompt], each: Sequence[SamplingParams | PoolingParams], bar: _bar
    ) -> list[RequestOutput]:
        """The finished outputs in order; whatever ends the wait ends the requests."""
        ids = [self._next_id() for _ in batch]
        ready = [self._engine.prepare(p, s, i) for p, s, i in zip(batch, each, ids, strict=True)]
        results: queue.SimpleQueue[tuple[int, RequestOutput | BaseException]] = queue.SimpleQueue()
        sinks = [_FinalSink(results, index) for index in range(len(ready))]
        outputs: list[RequestOutput | None] = [None] * len(ready)
        try:
            with bar as advance:
                for new, sink in zip(ready, sinks, strict=True):
                    self._loop.submit(new, sink)
                for _ in ready:
                    index, result = results.get()
                    if isinstance(result, BaseException):
                        raise result
                    outputs[index] = result
                    advance(result)
        except BaseException:  # Ctrl-C too: nothing may run on unseen
            for request_id, sink in zip(ids, sinks, strict=True):
                self._loop.abort(request_id, sink)
            raise
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template.

        Raises InvalidRequestError without a tokenizer or template, and as `generate` does.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer, so no chat template", "messages")
        if chat_template_kwargs is not None:
            check_template_kwargs(chat_template_kwargs)
        conversations = _as_conversations(messages)
        prompts = [
            {
                "prompt_token_ids": self.tokenizer.apply_chat_template(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    **(chat_template_kwargs or {}),
                )
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, progress=progress)

    async def async_generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> str:
        """The text of one completion (of choice 0); run many at once through `asyncio.gather`.

        Cancelling it ends the request. `AsyncLLMEngine` gives whole outputs and streams.
        """
        request_id = self._next_id()
        new = self._engine.prepare(prompt, sampling_params or SamplingParams(), request_id)
        stream = RequestStream(self._loop, request_id, final_only=True)
        self._loop.submit(new, stream)
        try:
            return (await stream.final()).outputs[0].text
        finally:
            stream.abort()

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Raw logits after each of `token_ids`: float32 [num_tokens, vocab]."""
        return self._loop.call(lambda: self._engine.logits(token_ids)).result()

    def update_weights(self, params: Any) -> None:
        """Use other weights of the same shapes from now on (as `model` for live weights)."""
        self._loop.call(lambda: self._engine.update_weights(params)).result()

    def named_weights(self) -> Mapping[str, Any]:
        """The live arrays by their Hugging Face names."""
        engine = self._engine
        return self._loop.call(lambda: named_arrays(engine.runner.weights, engine.skeleton)).result()

    def stats(self) -> EngineStats:
        """Pages, queues and counters now."""
        return self._engine.stats()

    def wait_for_compilations(self) -> None:
        """Until the programs that compile in the background are there (for measurements)."""
        self._engine.runner.programs.wait()

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, slots and pages agree."""
        self._loop.call(self._engine.scheduler.check_integrity).result()

    def reset_prefix_cache(self) -> None:
        self._loop.call(self._engine.scheduler.reset_prefix_cache).result()

    def close(self) -> None:
        """End the engine's thread and free device memory. Idempotent."""
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _next_id(self) -> str:
        return str(next(self._request_ids))


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt (a text, a mapping, a list of token ids) or several, as several."""
    if not _is_list(prompts) and not isinstance(prompts, np.ndarray):
        return [prompts]
    if len(prompts) and all(isinstance(p, int | np.integer) for p in prompts):
        return [prompts]
    return list(prompts)


def _as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or several, as several."""
    several = [messages] if _is_list(messages) and messages and isinstance(messages[0], Mapping) else messages
    if not _is_list(several) or not all(_is_list(conversation) for conversation in several):
        raise InvalidRequestError("messages must be a list of messages, or a list of such lists", "messages")
    return [
        [dict(message) if isinstance(message, Mapping) else message for message in conversation]
        for conversation in several
    ]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


class _bar:  # noqa: N801 (reads as a function at its one use)
    """A progress bar of finished requests with the rate of tokens; does nothing where nobody watches."""

    def __init__(self, text: str, total: int, show: bool | None) -> None:
        if show is None:
            show = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._total = total
        self._tokens = 0
        self._bar = Progress(
            TextColumn(text),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            disable=not show,
        )

    def __enter__(self) -> Callable[[RequestOutput], None]:
        self._bar.start()
        task = self._bar.add_task("generate", total=self._total, rate="")

        def advance(output: RequestOutput) -> None:
            kind = "output"
            if output.embedding is not None:
                kind, self._tokens = "input", self._tokens + len(output.prompt_token_ids)
            self._tokens += sum(choice.num_tokens for choice in output.outputs)
            elapsed = self._bar.tasks[0].elapsed or 0.0
            rate = f"{self._tokens / elapsed:.0f} {kind} tok/s" if elapsed else ""
            self._bar.update(task, advance=1, rate=rate)

        return advance

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
