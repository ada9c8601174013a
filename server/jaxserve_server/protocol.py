"""The bodies that clients send, as http clients of OpenAI's API know them.

Every optional field takes an explicit null as absent; numbers are strict (0.5 or "1" is not an integer, true
is not a number) and finite; unknown fields are ignored; a field that is known and not honoured is an error
that names it. `parse` turns whatever is wrong into one `InvalidRequestError`. Rules that hold for Python
callers too (stop strings, logit_bias, token ids in the vocabulary) are `SamplingParams`'.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from jaxserve.chat_template import check_template_kwargs
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import MAX_N, MAX_STOP_STRINGS

MAX_PROMPTS = 1024
MAX_LOGPROBS = 20

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
BodyT = TypeVar("BodyT", bound="Body")


def parse(kind: type[BodyT], data: Any) -> BodyT:
    """Validate a decoded JSON body; raises InvalidRequestError with the field's name as `param`."""
    if not isinstance(data, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _first_problem(error) from None


def _first_problem(error: ValidationError) -> InvalidRequestError:
    problems = error.errors(include_url=False, include_input=False)
    problem = problems[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequestError):
        return cause
    where = [str(part) for part in problem["loc"]]
    if problem["type"] == "missing":
        return InvalidRequestError(f"{where[0]} is required", param=where[0])
    # A field of several types has one problem for each of them.
    messages = dict.fromkeys(other["msg"] for other in problems if other["loc"][:1] == problem["loc"][:1])
    return InvalidRequestError(f"{where[0]}: {', or: '.join([*messages][:3])}", param=where[0])


class Body(BaseModel):
    """Base of all bodies; `not_honoured` maps a known field to the values that ask for nothing."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())
    not_honoured: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        present = {name: value for name, value in data.items() if value is not None}
        for name, harmless in cls.not_honoured.items():
            if name in present and present[name] not in harmless:
                raise InvalidRequestError(f"{name} is not supported by this server", param=name)
        return present


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """What completions and chat have in common."""

    not_honoured = {
        "response_format": ({"type": "text"},),
        "structured_outputs": ({},),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "use_beam_search": (False,),
        "truncate_prompt_tokens": (),
    }

    model: str = ""
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float | None = Field(None, gt=0)
    n: int = Field(1, ge=1, le=MAX_N)
    seed: Int64 | None = None
    stop: Any = None  # a string or a list of up to 4: SamplingParams says what is wrong with anything else
    # fail_fast: one error is enough, and a list may have millions of elements.
    stop_token_ids: list[Int64] | None = Field(None, fail_fast=True)
    allowed_token_ids: list[Int64] | None = Field(None, fail_fast=True)
    bad_words: list[str] | None = Field(None, fail_fast=True)
    logit_bias: dict[str, float] | None = Field(None, max_length=300)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Int64 = 0
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:  # repeats count here
            raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings", param="stop")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs is not available with stream", param="prompt_logprobs")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer shows log-probabilities of the generated tokens."""
        logprobs: int | bool | None = getattr(self, "logprobs", None)
        return logprobs is not None and logprobs is not False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options.continuous_usage_stats  # type: ignore[union-attr]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    not_honoured = {**GenerationBody.not_honoured, "suffix": ("",), "prompt_embeds": ()}

    # A list of str or of token ids or of lists of token ids. Checked by hand: a union would collect an error
    # for every element of a long list, and prompts have up to millions of them.
    prompt: Any
    max_tokens: int = Field(16, ge=0)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, value: Any) -> list[str] | list[list[int]]:
        prompts = [value] if isinstance(value, str) or _is_ids(value) else value
        if not isinstance(prompts, list) or not (
            all(isinstance(prompt, str) for prompt in prompts) or all(_is_ids(prompt) for prompt in prompts)
        ):
            message = "prompt must be a string, a list of strings, a list of token ids or a list of those"
            raise InvalidRequestError(message, param="prompt")
        if not prompts or not all(prompts):
            raise InvalidRequestError("prompt must not be empty", param="prompt")
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError(f"prompt takes at most {MAX_PROMPTS} prompts", param="prompt")
        return prompts

    @model_validator(mode="after")
    def _completion(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens may be 0 only with echo", param="max_tokens")
        if self.best_of is not None:
            if self.best_of < self.n:
                raise InvalidRequestError("best_of must not be less than n", param="best_of")
            if self.stream and self.best_of > self.n:
                raise InvalidRequestError("best_of is not available with stream", param="best_of")
        return self


def _is_ids(value: Any) -> bool:
    """A non-empty list of integers; `type` and not isinstance, because a bool is an int."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    not_honoured = {
        **GenerationBody.not_honoured,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "reasoning_effort": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "suffix": ("",),
    }

    # What is in a message is checked where it is rendered, by `jaxserve.chat_template`.
    messages: list[dict[str, Any]] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    parallel_tool_calls: bool = True
    add_special_tokens: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        check_template_options(self)
        return self


class TokenizeBody(Body):
    """POST /tokenize: `prompt` or `messages`."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, fail_fast=True)
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    not_honoured = {"tools": ([],), "chat_template": ()}

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        check_template_options(self)
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str = ""
    tokens: list[Int64] = Field(fail_fast=True)


def check_template_options(body: ChatBody | TokenizeBody) -> None:
    """The rules of the fields that steer the chat template."""
    if body.add_generation_prompt and body.continue_final_message:
        message = "add_generation_prompt and continue_final_message cannot both be true"
        raise InvalidRequestError(message, param="continue_final_message")
    check_template_kwargs(body.chat_template_kwargs)
