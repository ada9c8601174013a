"""`SchedulerConfig`: the limits that requests are taken and steps are made within. Never imports jax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError, QueueFullError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a scheduler. Raises ConfigError for values that cannot work."""

    max_num_seqs: int  # running requests
    max_num_batched_tokens: int  # tokens of one step
    max_model_len: int  # tokens of one request, prompt and output
    page_size: int  # tokens of one page
    num_pages: int  # pages of the pool, page 0 (never allocated) included
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True  # off: a prompt is computed in one step
    policy: Literal["fcfs", "priority"] = "fcfs"
    scheduler_delay: float = 0.0  # seconds a new request may be held so that others join it
    max_queue: int | None = None  # requests taken beyond max_num_seqs; None: no limit

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_pages < 2:
            raise ConfigError(f"num_pages must be at least 2 (page 0 is reserved), got {self.num_pages}")
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"scheduling policy must be fcfs or priority, got {self.policy!r}")
        if not 0.0 <= self.scheduler_delay < math.inf:
            raise ConfigError(f"scheduler_delay must be a number of seconds >= 0, got {self.scheduler_delay}")
        if self.max_queue is not None and self.max_queue < 0:
            raise ConfigError(f"max_queue must be at least 0, got {self.max_queue}")

    @property
    def pool_tokens(self) -> int:
        """Tokens the pool holds."""
        return (self.num_pages - 1) * self.page_size

    def check_queue(self, num_unfinished: int) -> None:
        """Raises QueueFullError where no further request is taken."""
        if self.max_queue is not None and num_unfinished >= self.max_num_seqs + self.max_queue:
            raise QueueFullError(f"{num_unfinished} requests are running or waiting; try again later")

    def total_tokens_limit(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Tokens, prompt and output, at which a request ends.

        `max_tokens` is cut to the rest of the context or of the pool, whichever is less; None means all of
        it. Raises ContextLengthError for a prompt that leaves no room for a token, InvalidRequestError for an
        empty prompt.
        """
        if num_prompt_tokens < 1:
            raise InvalidRequestError("the prompt is empty", "prompt")
        room = 0 if max_tokens == 0 else 1
        least = num_prompt_tokens + room
        if least > self.max_model_len:
            raise ContextLengthError.over(self.max_model_len, num_prompt_tokens, "prompt", room=room)
        if least > self.pool_tokens:
            raise ContextLengthError.over(
                self.pool_tokens, num_prompt_tokens, "prompt", room=room, why="what the page pool holds"
            )
        if not self.enable_chunked_prefill and num_prompt_tokens > self.max_num_batched_tokens:
            raise ContextLengthError(
                f"Without chunked prefill a prompt has at most {self.max_num_batched_tokens} tokens "
                f"(max_num_batched_tokens), got {num_prompt_tokens}.",
                "prompt",
            )
        room = min(self.max_model_len, self.pool_tokens)
        return room if max_tokens is None else min(num_prompt_tokens + max_tokens, room)
