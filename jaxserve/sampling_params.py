"""`SamplingParams`: how one request samples, checked and normalised when it is made.

The ranges are those of the OpenAI API and vLLM's extensions. What depends on the model (vocabulary size, the
engine's limit on logprobs) is checked by `validate_for`. Nothing here imports jax.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError

MAX_N = 16
MAX_STOP_STRINGS = 64  # the server takes fewer, see its --max-stop-strings
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 1024  # characters of one of them
MAX_LOGIT_BIAS = 300  # entries
LOGIT_BIAS_LIMIT = 100.0
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    Raises InvalidRequestError, whose `param` names the field, for a value of the wrong type or out of range.
    After construction `stop`, `stop_token_ids` and `bad_words` are tuples and `logit_bias` is a dict (empty
    where nothing was given); `allowed_token_ids` is a tuple or None.
    """

    n: int = 1  # choices, 1..16
    temperature: float = 1.0  # [0, 2]; 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 and -1: off (both become 0)
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2], over generated tokens
    frequency_penalty: float = 0.0  # [-2, 2], over generated tokens
    repetition_penalty: float = 1.0  # > 0, over prompt and generated tokens
    seed: int | None = None  # int64
    stop: str | Iterable[str] | None = None  # up to 64 strings
    stop_token_ids: Iterable[int] | None = None  # up to 1024
    allowed_token_ids: Iterable[int] | None = None  # nothing else is ever sampled
    bad_words: Iterable[str] | None = None  # up to 256
    logit_bias: Mapping[int, float] | None = None  # token id -> bias, clamped to +-100; "12" is taken as 12
    ignore_eos: bool = False
    min_tokens: int = 0  # end of sequence, stop ids and stop strings do nothing before this many tokens
    max_tokens: int | None = 16  # None: the rest of the context; 0: the prompt is run and nothing is sampled
    logprobs: int | None = None  # how many of the most likely tokens to report besides the chosen one
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            # The one place where a frozen instance is written: its own construction.
            object.__setattr__(self, name, value)

        put("n", _integer("n", self.n, 1, MAX_N))
        put("temperature", _number("temperature", self.temperature, 0.0, 2.0))
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0, above=True))
        # A top_k beyond int32 (the device's type) keeps every token, as does the largest int32.
        put("top_k", max(0, min(_integer("top_k", self.top_k, -1), _INT32_MAX)))
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.0, above=True))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, -(2**63), 2**63 - 1))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        put("stop", _strings("stop", stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids) or ())
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:  # type: ignore[arg-type]
            raise InvalidRequestError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} token ids", "stop_token_ids"
            )
        put("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.allowed_token_ids == ():
            raise InvalidRequestError("allowed_token_ids must not be empty", "allowed_token_ids")
        put("bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH))
        put("logit_bias", _logit_bias(self.logit_bias))
        for name in ("max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                # Beyond int32 is beyond every context, and beyond what counters and traces can take.
                put(name, min(_integer(name, getattr(self, name), 0), _INT32_MAX))
        put("min_tokens", min(_integer("min_tokens", self.min_tokens, 0), _INT32_MAX))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false", name)
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", "stop")

    def validate_for(self, vocab_size: int, max_logprobs: int) -> None:
        """Check what depends on the model and the engine.

        Token ids lie in [0, vocab_size), logprobs within `max_logprobs`. Raises InvalidRequestError naming
        the parameter.
        """
        ids: dict[str, Iterable[int]] = {
            "stop_token_ids": self.stop_token_ids or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": self.logit_bias or (),
        }
        for name, values in ids.items():
            largest = max(values, default=0)
            if largest >= vocab_size:
                raise InvalidRequestError(
                    f"{name}: token id {largest} is out of the vocabulary (0 to {vocab_size - 1})", name
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > max_logprobs:
                raise InvalidRequestError(f"{name} must be at most {max_logprobs}, got {value}", name)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)


_BOOLEANS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def _number(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] with `above`. A bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequestError(f"{name} must be a number, got {_shown(value)}", name)
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of a double
        number = math.inf
    if not math.isfinite(number) or number > high or number < low or (above and number <= low):
        bounds = f"greater than {low:g}" if above else f"at least {low:g}"
        if high < math.inf:
            bounds += f" and at most {high:g}"
        raise InvalidRequestError(f"{name} must be a finite number, {bounds}; got {_shown(value)}", name)
    return number


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """An int in [low, high]. A bool is not one, and neither is 1.0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequestError(f"{name} must be an integer, got {_shown(value)}", name)
    number = int(value)
    if number < low or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(f"{name} must be {bounds}, got {_shown(value)}", name)
    return number


def _token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Token ids without repeats, in order; None stays None."""
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {_shown(value)}", name)
    token_ids = list(value)
    # A vocabulary's worth of ids is a legitimate list: plain ones are not looked at one by one.
    if not (set(map(type, token_ids)) <= {int} and min(token_ids, default=0) >= 0):
        token_ids = [_integer(name, token_id, 0) for token_id in token_ids]
    return tuple(dict.fromkeys(token_ids))


def _strings(name: str, value: Any, most: int, longest: int) -> tuple[str, ...]:
    """Up to `most` non-empty strings of up to `longest` characters, without repeats; None is none of them."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} must be a list of strings, got {_shown(value)}", name)
    texts = list(value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"{name} must hold non-empty strings, got {_shown(text)}", name)
        if len(text) > longest:
            raise InvalidRequestError(f"{name}: a string is longer than {longest} characters", name)
    strings = tuple(dict.fromkeys(texts))
    if len(strings) > most:
        raise InvalidRequestError(f"{name} takes at most {most} strings, got {len(strings)}", name)
    return strings


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"logit_bias must map token ids to numbers, got {_shown(value)}", "logit_bias"
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias takes at most {MAX_LOGIT_BIAS} entries, got {len(value)}", "logit_bias"
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # JSON has only string keys. 18 digits: more is out of any vocabulary, and slow to convert.
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 18:
            key = int(key)
        token_id = _integer("logit_bias", key, 0)
        number = _number("logit_bias", bias, -math.inf)
        biases[token_id] = max(-LOGIT_BIAS_LIMIT, min(LOGIT_BIAS_LIMIT, number))
    return biases


def _shown(value: Any) -> str:
    """A value as an error message shows it: short, whatever a client sent."""
    if isinstance(value, int) and value.bit_length() > 128:  # repr() of a huge int is slow or refused
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 64 else text[:61] + "..."
