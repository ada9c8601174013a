"""What a request gives back: `RequestOutput` with one `CompletionOutput` per choice."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Logprob:
    """One token's log-probability under the raw model distribution (before temperature and filters)."""

    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str | None = None


# One position: {token_id: Logprob}, the chosen token first, then the most likely ones.
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of `time.monotonic()`; None until it happened."""

    arrival_time: float  # at the server, before tokenising, where there is one
    queued_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    def copy(self) -> RequestMetrics:
        """Written out: one is made for every token, and `dataclasses.replace` takes ten times as long."""
        return RequestMetrics(
            self.arrival_time,
            self.queued_time,
            self.first_scheduled_time,
            self.first_token_time,
            self.last_token_time,
            self.finished_time,
            self.num_preemptions,
        )


class _SharedTokens:
    """Token ids as the first of a list that another thread only ever appends to, copied when they are read.

    A state is made for every token, and few are asked for their ids.
    """

    __slots__ = ("_shared",)
    _shared: tuple[list[int], int] | None  # that list, and how many are this state's; None once copied
    token_ids: list[int]  # the subclass's slot: empty until somebody looks

    def __post_init__(self) -> None:
        self._shared = None

    def _share(self, token_ids: list[int]) -> None:
        self._shared = token_ids, len(token_ids)

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name):
            """Called for a slot that is empty."""
            if name == "token_ids":
                shared = self._shared
                if shared is not None:  # None: two threads look at once, and the other was first
                    self.token_ids = shared[0][: shared[1]]
                    self._shared = None
            return object.__getattribute__(self, name)

    @property
    def num_tokens(self) -> int:
        """The length of `token_ids`, without a copy of them."""
        shared = self._shared
        try:
            return len(object.__getattribute__(self, "token_ids"))
        except AttributeError:
            return shared[1] if shared is not None else len(self.token_ids)


@dataclass(slots=True)
class CompletionOutput(_SharedTokens):
    """One choice. `text`, `token_ids` and `logprobs` are cumulative."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id; None on end of sequence

    @classmethod
    def of_growing(
        cls,
        index: int,
        text: str,
        token_ids: list[int],
        cumulative_logprob: float | None,
        logprobs: list[TokenLogprobs] | None,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> CompletionOutput:
        """The state now of a choice whose list of tokens is only ever appended to."""
        output = cls.__new__(cls)  # written out: half the time of the constructor, whose `token_ids` would go
        output.index = index
        output.text = text
        output._share(token_ids)
        output.cumulative_logprob = cumulative_logprob
        output.logprobs = logprobs
        output.finish_reason = finish_reason
        output.stop_reason = stop_reason
        return output

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: its prompt and every choice so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # first entry None: nothing precedes it
    num_cached_tokens: int = 0
    # float32 [hidden or dimensions], of a finished request with PoolingParams.
    embedding: np.ndarray | None = field(default=None, compare=False)

    def __str__(self) -> str:
        head = (
            f"prompt: {self.prompt!r}"
            if self.prompt is not None
            else f"prompt: {len(self.prompt_token_ids)} tokens"
        )
        rows = [
            f"  [{o.index}] {o.text!r} ({o.num_tokens} tokens, {o.finish_reason or 'running'})"
            for o in self.outputs
        ]
        return "\n".join([head, *rows])

    def _repr_html_(self) -> str:
        prompt = self.prompt if self.prompt is not None else f"{len(self.prompt_token_ids)} token ids"
        rows = "".join(
            f"<tr><td>{o.index}</td>"
            f"<td style='text-align:left;white-space:pre-wrap'>{html.escape(o.text)}</td>"
            f"<td>{o.num_tokens}</td><td>{o.finish_reason or 'running'}</td></tr>"
            for o in self.outputs
        )
        return (
            f"<div><div style='white-space:pre-wrap'><b>{html.escape(prompt)}</b></div>"
            "<table><thead><tr><th>#</th><th>text</th><th>tokens</th><th>finish</th></tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )
