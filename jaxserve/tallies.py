"""What an engine counts for its operators: tokens, ends, and how values spread, in Prometheus' buckets.

The engine's thread adds; anybody may read. A reader may see a request whose last field is still missing,
never a broken number. Counting a token costs less than half a microsecond, so every one is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from jaxserve.outputs import RequestMetrics, RequestOutput
from jaxserve.request import Request

# Bounds that vLLM's dashboards offer as thresholds are among them.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_GAP = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


class Tally:
    """How many values fell into each bucket: a bucket holds those up to its bound, the last all others."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """Values up to each bound, and last the number of all values."""
        return list(accumulate(self._counts.copy()))


class EngineTallies:
    """Counts since the engine's start. Times are in seconds; one value per choice where nothing else is said.

    What is not known is left out: a choice that was aborted while it waited has no prefill time.
    """

    def __init__(self) -> None:
        self.ended: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.prompt_tokens = 0  # of choices whose prompt has been computed, cached ones included
        self.cached_tokens = 0  # those of them that the prefix cache had
        self.step_tokens = Tally(_STEP_TOKENS)  # one value per step: positions computed
        self.first_token = Tally(_FIRST_TOKEN)  # from arrival
        self.token_gap = Tally(_TOKEN_GAP)  # one value per token but the first
        self.mean_token_gap = Tally(_TOKEN_GAP)  # 0 for a choice of one token
        self.latency = Tally(_REQUEST)  # from arrival to the end
        self.queue = Tally(_REQUEST)  # from the queue to the first step
        self.prefill = Tally(_REQUEST)  # from the first step to the first token
        self.decode = Tally(_REQUEST)  # from the first token to the last
        self.inference = Tally(_REQUEST)  # from the first step to the last token
        self.prompt_length = Tally(_TOKENS)
        self.output_length = Tally(_TOKENS)
        self.max_tokens = Tally(_TOKENS)  # as asked for
        self.choices = Tally(_CHOICES)  # one value per request: n
        self.longest_output = Tally(_TOKENS)  # one value per request: tokens of its longest choice

    def token(self, request: Request, now: float) -> None:
        """A choice gets a token; called before its times are set."""
        times = request.metrics
        if times.last_token_time is None:
            self.first_token.add(now - times.arrival_time)
            self.prompt_computed(request)
        else:
            self.token_gap.add(now - times.last_token_time)

    def prompt_computed(self, request: Request) -> None:
        self.prompt_tokens += request.num_prompt_tokens
        self.cached_tokens += request.num_cached_tokens

    def request_ended(self, requests: Sequence[Request], output: RequestOutput) -> None:
        """All choices of a request have ended; `output` is its last."""
        for request, choice in zip(requests, output.outputs, strict=True):
            if choice.finish_reason is not None:
                self.ended[choice.finish_reason] += 1
            self._choice_ended(request, request.metrics, choice.num_tokens)
        self.choices.add(len(requests))
        self.longest_output.add(max(choice.num_tokens for choice in output.outputs))

    def _choice_ended(self, request: Request, times: RequestMetrics, num_tokens: int) -> None:
        self.prompt_length.add(request.num_prompt_tokens)
        self.output_length.add(num_tokens)
        if request.params.max_tokens:  # neither none nor an embedding's 0
            self.max_tokens.add(request.params.max_tokens)
        for tally, start, end in (
            (self.latency, times.arrival_time, times.finished_time),
            (self.queue, times.queued_time, times.first_scheduled_time),
            (self.prefill, times.first_scheduled_time, times.first_token_time),
            (self.decode, times.first_token_time, times.last_token_time),
            (self.inference, times.first_scheduled_time, times.last_token_time),
        ):
            if start is not None and end is not None:
                tally.add(end - start)
        if times.first_token_time is not None and times.last_token_time is not None:
            decode = times.last_token_time - times.first_token_time
            self.mean_token_gap.add(decode / max(num_tokens - 1, 1))

    def failed(self, requests: Iterable[Request]) -> None:
        """The engine stops: choices that have not ended never will."""
        self.ended["error"] += sum(not request.is_finished for request in requests)
