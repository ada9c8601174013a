"""Sampled tokens to `RequestOutput`: text, stop strings, log-probabilities, grouped by request.

The engine's thread owns an `OutputProcessor`; what `snapshot` returns may go to any thread and is never
changed later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.detokenizer import IncrementalDetokenizer
from jaxserve.errors import InvalidRequestError
from jaxserve.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, TokenLogprobs
from jaxserve.stop_strings import StopChecker

if TYPE_CHECKING:
    from jaxserve.request import Request
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string is in the text: the engine finishes the request in the scheduler."""

    stop_string: str


class _Choice:
    """The growing output of one `Request`."""

    __slots__ = (
        "_detokenizer",
        "_pieces",
        "_stops",
        "_terminal",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "logprobs",
        "min_tokens",
        "request",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self, index: int, request: Request, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.index = index
        self.request = request
        self.min_tokens = params.min_tokens
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._pieces: list[str] = []
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stops: StopChecker | None = None
        # The token that ends a sequence has no text, unless stop strings are to be shown as well (as in
        # vLLM).
        ends = request.eos_token_ids | request.stop_token_ids
        self._terminal = frozenset[int]() if params.include_stop_str_in_output else ends
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
                request.prompt_token_ids,
            )
            if params.stop:
                self._stops = StopChecker(tuple(params.stop), params.include_stop_str_in_output)

    @property
    def stopped(self) -> str | None:
        """The stop string in the text."""
        return self._stops.stop if self._stops is not None else None

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.token_ids.append(token_id)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id].logprob
        if self._detokenizer is not None and token_id not in self._terminal:
            self._show(self._detokenizer.append(token_id))

    def _show(self, text: str) -> None:
        if self._stops is not None:
            text = self._stops.feed(text, may_stop=len(self.token_ids) > self.min_tokens)
        if text:
            self._pieces.append(text)

    def finish(self, reason: FinishReason | None, stop_reason: str | int | None) -> None:
        """Releases what was held back; a stop string in the text goes before any other reason."""
        if self._detokenizer is not None:
            self._show(self._detokenizer.flush())
            if self._stops is not None:
                self._pieces.append(self._stops.flush())
        if self.stopped is not None and reason != "abort":
            reason, stop_reason = "stop", self.stopped
        self.finish_reason = reason or "abort"
        self.stop_reason = stop_reason

    def output(self) -> CompletionOutput:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return CompletionOutput.of_growing(
            self.index,
            self._pieces[0] if self._pieces else "",
            self.token_ids,
            None if self.logprobs is None else self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs.copy(),
            self.finish_reason,
            self.stop_reason,
        )


@dataclass(slots=True)
class _Group:
    """One request of a caller: n choices of one prompt."""

    prompt: str | None
    choices: list[_Choice]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: np.ndarray | None = None


class OutputProcessor:
    """Outputs of all live requests.

    A caller's request has an id of its own; each of its choices is a `Request` with its own `request_id`, by
    which `process` and `finish` know it.

    Args:
        tokenizer: None for a checkpoint without one; text is then empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}
        self._choices: dict[str, _Choice] = {}

    def __len__(self) -> int:
        """Requests not yet removed."""
        return len(self._groups)

    def add(
        self, request_id: str, prompt: str | None, requests: Sequence[Request], params: SamplingParams
    ) -> None:
        """Takes a request on.

        Args:
            request_id: the caller's; the key of `snapshot`, `abort` and `remove`.
            prompt: its text, None for a prompt of token ids.
            requests: one for each choice, in the order of their indexes.
            params: of all choices.

        Raises:
            InvalidRequestError: an id is in use, or there are stop strings but no text to find them in.
        """
        if request_id in self._groups or any(r.request_id in self._choices for r in requests):
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
        if params.stop and (self._tokenizer is None or not params.detokenize):
            raise InvalidRequestError("stop strings need a tokenizer and detokenize=True", param="stop")
        choices = [_Choice(i, request, params, self._tokenizer) for i, request in enumerate(requests)]
        self._groups[request_id] = _Group(prompt, choices)
        self._choices.update((choice.request.request_id, choice) for choice in choices)

    def process(
        self, request: Request, token_id: int | None, token_logprobs: TokenLogprobs | None = None
    ) -> StopHit | None:
        """Takes the next sampled token of a choice.

        A token for a choice that has stopped, finished or been removed is dropped: the device may be a step
        ahead.

        Args:
            request: the choice.
            token_id: None where a step gave none.
            token_logprobs: of this token, which is among them; kept, and `decoded_token` filled in.

        Returns:
            The stop string this token completed, if any.
        """
        choice = self._choice(request)
        if choice is None or token_id is None or choice.finish_reason or choice.stopped:
            return None
        if token_logprobs is not None:
            self._fill_tokens(token_logprobs)
        choice.append(token_id, token_logprobs)
        return None if choice.stopped is None else StopHit(choice.stopped)

    def finish(self, request: Request) -> None:
        """Ends a choice for the reason the scheduler wrote into `request` (a stop string goes before it)."""
        choice = self._choice(request)
        if choice is not None and choice.finish_reason is None:
            choice.finish(request.finish_reason, request.stop_reason)

    def abort(self, request_id: str) -> None:
        """Ends the choices that still run, with reason `abort`; what they have stays to be read."""
        group = self._groups.get(request_id)
        for choice in group.choices if group is not None else ():
            if choice.finish_reason is None:
                choice.finish("abort", None)

    def remove(self, request_id: str) -> None:
        """Forgets a request; unknown ids are fine."""
        group = self._groups.pop(request_id, None)
        for choice in group.choices if group is not None else ():
            del self._choices[choice.request.request_id]

    def set_prompt_logprobs(self, request_id: str, logprobs: list[TokenLogprobs | None]) -> None:
        """Log-probabilities of the prompt's tokens, the first None; kept, and `decoded_token` filled in."""
        group = self._groups.get(request_id)
        if group is None:
            return
        for entry in logprobs:
            if entry is not None:
                self._fill_tokens(entry)
        group.prompt_logprobs = logprobs

    def set_embedding(self, request_id: str, vector: np.ndarray) -> None:
        """The vector, float32 [dimensions], of a request that asked for one."""
        self._groups[request_id].embedding = vector

    def snapshot(self, request_id: str) -> RequestOutput:
        """The state of a request now, cumulative; later tokens do not change it."""
        group = self._groups[request_id]
        choices = group.choices
        first = choices[0].request
        return RequestOutput(
            request_id,
            group.prompt,
            first.prompt_token_ids,
            [choice.output() for choice in choices],
            None not in [choice.finish_reason for choice in choices],
            _merge_metrics([choice.request.metrics for choice in choices]),
            group.prompt_logprobs,
            first.num_cached_tokens,
            group.embedding,
        )

    def _choice(self, request: Request) -> _Choice | None:
        choice = self._choices.get(request.request_id)
        # An id may be used again while the device still runs a removed request's last step.
        return choice if choice is not None and choice.request is request else None

    def _fill_tokens(self, logprobs: TokenLogprobs) -> None:
        if self._tokenizer is not None:
            for token_id, entry in logprobs.items():
                entry.decoded_token = self._tokenizer.token_str(token_id)


def _merge_metrics(parts: list[RequestMetrics]) -> RequestMetrics:
    """Metrics of a request from its choices': the first of what begins, the last of what ends, a copy."""
    if len(parts) == 1:
        return parts[0].copy()

    def known(name: str) -> list[float]:
        return [value for value in (getattr(part, name) for part in parts) if value is not None]

    finished = known("finished_time")
    return RequestMetrics(
        arrival_time=min(part.arrival_time for part in parts),
        queued_time=min(known("queued_time"), default=None),
        first_scheduled_time=min(known("first_scheduled_time"), default=None),
        first_token_time=min(known("first_token_time"), default=None),
        last_token_time=max(known("last_token_time"), default=None),
        finished_time=max(finished) if len(finished) == len(parts) else None,
        num_preemptions=sum(part.num_preemptions for part in parts),
    )
