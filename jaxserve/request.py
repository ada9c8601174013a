"""`Request`: one sequence on its way through the engine (each of a request's `n` choices is one)."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.outputs import FinishReason, RequestMetrics
from jaxserve.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # never admitted
    RUNNING = "running"  # has a slot and pages
    PREEMPTED = "preempted"  # gave its slot and pages back; waits to be computed anew
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, how to continue it, and how far that has come.

    There are no phases: a step computes positions [num_computed_tokens, num_computed_tokens + n), and
    whenever the last known token is among them a new one is sampled. Equality is identity: an id may be used
    again later. The engine fills the first group of fields; the scheduler alone writes the others.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower goes first (policy "priority")
    cache_salt: str | None = None  # only requests of the same salt share cached prefixes
    arrival_time: float = field(default_factory=time.monotonic)  # seconds
    seed: int = 0  # resolved: params.seed with the choice's index, or drawn by the engine
    eos_token_ids: frozenset[int] = frozenset()  # empty under ignore_eos
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    is_pin: bool = False  # the scheduler's own: it computes a prefix to be kept, and nobody waits for it
    # The first position whose hidden state goes into an embedding; None: none is wanted.
    pool_from: int | None = None

    # The scheduler's.
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: str | int | None = field(default=None, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    num_computed_tokens: int = field(
        default=0, init=False
    )  # positions whose KV is written, or is about to be
    num_in_flight: int = field(default=0, init=False)  # sampled on the device, not yet seen by the host
    num_cached_tokens: int = field(
        default=0, init=False
    )  # prompt tokens found in the cache at first admission
    max_total_tokens: int = field(default=0, init=False)  # prompt and output; set when it is added
    slot: int | None = field(default=None, init=False)
    page_ids: list[int] = field(
        default_factory=list, init=False
    )  # page i holds positions [i, i + 1) * page_size
    cache_root: bytes = field(default=b"", init=False)  # start of its hash chain
    page_hashes: list[bytes] = field(
        default_factory=list, init=False
    )  # of the first full pages of known tokens
    num_registered_pages: int = field(
        default=0, init=False
    )  # leading pages the prefix cache has been told of
    arrival_index: int = field(default=0, init=False)  # order of arrival at the scheduler

    # Derived.
    metrics: RequestMetrics = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    needs_host_tokens: bool = field(
        init=False
    )  # a next token may be scheduled only when the host knows the last
    may_need_bias: bool = field(init=False)  # a row of the bias table, at some time

    def __post_init__(self) -> None:
        self.metrics = RequestMetrics(self.arrival_time)
        self.stop_token_ids = frozenset(self.params.stop_token_ids or ())
        # Whether a word of several tokens is about to be completed is decided on the host.
        self.needs_host_tokens = any(len(word) > 1 for word in self.bad_words_token_ids)
        params = self.params
        self.may_need_bias = bool(
            params.logit_bias or params.allowed_token_ids or params.min_tokens or self.bad_words_token_ids
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens the host knows: the prompt and the output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_scheduled_total(self) -> int:
        """Known tokens and those in flight."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def known_tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop) of prompt and output, without copying the rest."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[max(0, start - split) : stop - split]
