"""Every exception jaxserve raises on purpose.

JaxserveError
├── ConfigError            an engine argument or a model's config is wrong (one line on the command line)
│   └── UnsupportedModelError    an architecture, a config key or a number format that is not implemented
├── InvalidRequestError    a request's parameter is wrong (HTTP 400; `.param` names it)
│   └── ContextLengthError       the prompt leaves no room in the context window or can never fit the pool
├── QueueFullError         too many requests wait (HTTP 429)
└── EngineDeadError        the engine has stopped and takes no more requests (HTTP 500; 503 for a new one)
    └── EngineClosedError        it was closed, nothing failed (HTTP 503)

Errors of files are `jaxserve_checkpoints.CheckpointError`. An `assert` that fails is our bug, not the user's.
"""

from __future__ import annotations


class JaxserveError(Exception):
    """Base of all exceptions of this package."""


class ConfigError(JaxserveError, ValueError):
    """An engine argument or a model's config is wrong."""


class UnsupportedModelError(ConfigError):
    """The checkpoint needs something that is not implemented; the message names it."""


class InvalidRequestError(JaxserveError, ValueError):
    """A request's parameter is wrong; `param` is its name."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit the context window, or could never fit the page pool.

    Clients know it by the words "maximum context length is N tokens".
    """

    @classmethod
    def over(
        cls, limit: int, num_tokens: int | str, param: str, *, room: int = 1, why: str = ""
    ) -> ContextLengthError:
        """For a prompt of `num_tokens` tokens.

        Args:
            limit: tokens of the context.
            num_tokens: that the prompt has; a text where only a bound is known, such as "more than 512".
            param: the parameter that gave the prompt.
            room: tokens that must be left for the answer.
            why: why the limit is not the model's own.
        """
        has = f"the prompt has {num_tokens} tokens"
        has += " and leaves no room for an answer" if room else ""
        limited = f"maximum context length is {limit} tokens"
        limited = f"The {limited} ({why})" if why else f"This model's {limited}"
        return cls(f"{limited}, but {has}. Shorten the prompt.", param)


class QueueFullError(JaxserveError):
    """The waiting queue is full; try again later."""


class EngineDeadError(JaxserveError):
    """The engine has stopped; `__cause__` is what stopped it."""


class EngineClosedError(EngineDeadError):
    """The engine was closed by its owner."""
