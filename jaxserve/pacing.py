"""How many prompt tokens a step may carry beside decodes, so that running requests hardly feel it.

A step with prompt tokens should take at most `max_token_gap` times as long as its decodes alone. Both times
are measured: steps of decodes alone by their number of rows, and what each prompt token added to a step. The
measurements come from outside, so that the same measurements give the same answers; no clock is read here.

Where many requests wait for their first token, steps are longer: each prompt but two gets the time of half
a decode, and where eight decode, that of two. Otherwise a load of prompts and short outputs would keep the
decodes few, and few decodes use a step badly: tokens would come evenly, but all of them late.

The cost of a token is taken at the size of chunk that is in use. What a step with prompts costs beside its
tokens is in it, and the size settles where the whole step takes the time it may.

A prompt that takes long to compute would leave no step of decodes alone to measure. So one step in a while
goes without prompt tokens, which wastes nothing: its decodes are due anyway.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable
from statistics import median_low

LEAST_CHUNK = 8  # prompt tokens a step may carry however slow they are (or half, to fill a compiled size)
_FEW_PROMPTS = 2  # that wait, whatever decodes: no reason to slow the decodes down
_MEASURABLE = 8  # fewer prompt tokens in a step say little of what one costs
_KEPT = 5  # measurements of a token's cost
# Steps with prompts in a row, after which one goes without: where a similar number of decodes has been
# measured, and where none has.
_REFRESH, _REFRESH_UNKNOWN = 16, 4
_SIMILAR = 1.25
_SPILL = 1.25  # a size of step that is exceeded by less is kept to


class StepPacer:
    """Learns what steps cost, and gives each step its number of tokens.

    Args:
        max_token_gap: the time of a step with prompts to that of one without; above 1.
        step_sizes: numbers of tokens that programs are compiled for. One token more may cost as much as the
            next size, so a step does not go just over one.
    """

    def __init__(self, max_token_gap: float, step_sizes: Iterable[int] = ()) -> None:
        assert max_token_gap > 1.0
        self.max_token_gap = max_token_gap
        self._step_sizes = sorted(step_sizes)
        self._measured: list[int] = []  # numbers of decodes, sorted
        self._seconds: dict[int, tuple[float, float]] = {}  # by number of decodes: the last two times
        self._costs: deque[float] = deque(maxlen=_KEPT)  # seconds a prompt token, beside decodes
        self._cost_alone: float | None = None  # the same in the last step of prompts alone
        self._since_alone = 0  # steps of both kinds of tokens since one of decodes alone

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step took so long."""
        if not num_prompt_tokens:
            if num_decodes:
                self._since_alone = 0
                if num_decodes not in self._seconds:
                    insort(self._measured, num_decodes)
                self._seconds[num_decodes] = (self._seconds.get(num_decodes, (seconds,))[-1], seconds)
        elif not num_decodes:
            self._cost_alone = seconds / num_prompt_tokens
        else:
            self._since_alone += 1
            alone = self._alone(num_decodes)
            if num_prompt_tokens >= _MEASURABLE and alone is not None and self._is_measured(num_decodes):
                self._costs.append(max(seconds - alone, 0.0) / num_prompt_tokens)

    def num_tokens(self, num_decodes: int, num_prompts: int, most: int) -> int:
        """Tokens of the next step, its decodes included; `num_decodes` where no prompt has its turn.

        Args:
            num_prompts: requests that have more than a token to compute, and could in this step.
            most: tokens of any step.
        """
        if not num_decodes:
            return most
        alone = self._alone(num_decodes)
        wait = _REFRESH if self._is_measured(num_decodes) else _REFRESH_UNKNOWN
        if alone is None or self._since_alone >= wait:
            return min(num_decodes, most)
        cost = median_low(self._costs) if self._costs else self._cost_alone
        if cost is None:
            chunk = LEAST_CHUNK
        else:
            each = min(max(num_decodes / 4, 0.5), 2.0)
            share = max(self.max_token_gap - 1, each * (num_prompts - _FEW_PROMPTS) / num_decodes)
            chunk = max(LEAST_CHUNK, int(min(share * alone / max(cost, 1e-9), most)))
        total = num_decodes + chunk
        fitting = bisect_right(self._step_sizes, total)
        size = self._step_sizes[fitting - 1] if fitting else 0
        if size >= num_decodes + LEAST_CHUNK // 2 and total < size * _SPILL:
            total = size
        return min(total, most)

    def _is_measured(self, num_decodes: int) -> bool:
        """Whether a step of about so many decodes alone has been measured."""
        place = bisect_left(self._measured, num_decodes / _SIMILAR)
        return place < len(self._measured) and self._measured[place] <= num_decodes * _SIMILAR

    def _alone(self, num_decodes: int) -> float | None:
        """Seconds of a step of so many decodes alone: measured, or from the nearest that were.

        Of the last two times the shorter: what disturbs a measurement makes it longer. More decodes take no
        less, and in proportion no more, so that an estimate from one side errs towards small chunks.
        """
        place = bisect_left(self._measured, num_decodes)
        above = self._measured[place] if place < len(self._measured) else None
        below = self._measured[place - 1] if place else None
        if above is None:
            return None if below is None else min(self._seconds[below])
        high = min(self._seconds[above])
        if below is None or above == num_decodes:
            return high * num_decodes / above
        low = min(self._seconds[below])
        return low + (high - low) * (num_decodes - below) / (above - below)
