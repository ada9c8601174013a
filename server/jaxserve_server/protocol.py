"""The bodies that clients send, as http clients of OpenAI's API know them.

Every optional field takes an explicit null as absent; numbers are strict (0.5 or "1" is not an integer, true
is not a number) and finite; unknown fields are ignored; a field that is known and not honoured is an error
that names it. `parse` turns whatever is wrong into one `InvalidRequestError`. Rules that hold for Python
callers too (stop strings, logit_bias, token ids in the vocabulary) are `SamplingParams`'.

The models are also the source of the OpenAPI document: a field that is checked by hand says with
`WithJsonSchema` what it takes, and its description is what users read.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from jaxserve.chat_template import check_template_kwargs
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_TOKEN_IDS,
)
from jaxserve_server import field_schemas as schemas
from jaxserve_server.config import DEFAULT_STOP_STRINGS

MAX_PROMPTS = 1024
MAX_LOGPROBS = 20


def _some_messages(value: Any) -> list[Any]:
    """A list; what is in it is checked where it is rendered, by `jaxserve.chat_template`."""
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("messages must be a non-empty list", param="messages")
    return value


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TruncateTokens = Annotated[
    Literal[-1] | Annotated[int, Field(ge=1, le=2**63 - 1)] | None,
    Field(description="Keep this many tokens of a longer prompt; -1: as many as the context has room for."),
]
TruncationSide = Annotated[
    Literal["left", "right"],
    Field(description="Where a prompt is cut: `left` keeps its last tokens, `right` its first."),
]
Messages = Annotated[Any, AfterValidator(_some_messages), WithJsonSchema(schemas.MESSAGES)]
TemplateKwargs = Annotated[
    dict[str, Any],
    WithJsonSchema(schemas.TEMPLATE_KWARGS),
    Field(description="Variables for the model's chat template, such as `enable_thinking`."),
]
ModelName = Annotated[str, Field(description="A served model; empty: the default one.")]
GenerationPrompt = Annotated[
    bool | None,
    Field(description="End the prompt with the opening of an answer; true, unless the last message goes on."),
]
ContinueFinal = Annotated[
    bool, Field(description="Go on with the last message; not together with `add_generation_prompt: true`.")
]
_MAX_STOP_STRINGS = "max_stop_strings"  # in the context of a validation
BodyT = TypeVar("BodyT", bound="Body")


def parse(kind: type[BodyT], data: Any, max_stop_strings: int = DEFAULT_STOP_STRINGS) -> BodyT:
    """Validate a decoded JSON body; raises InvalidRequestError with the field's name as `param`."""
    if not isinstance(data, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    try:
        return kind.model_validate(data, context={_MAX_STOP_STRINGS: max_stop_strings})
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
    """Base of all bodies."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
    # Known fields that would change the answer and do not: the values that ask for nothing, and only those,
    # are taken. `not_yet` are the ones among them that a later version honours.
    not_honoured: ClassVar[dict[str, tuple[Any, ...]]] = {}
    not_yet: ClassVar[frozenset[str]] = frozenset()
    # Known fields that do not change the answer: anything is taken.
    ignored: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        present = {name: value for name, value in data.items() if value is not None}
        for name, harmless in cls.not_honoured.items():
            if name in present and not any(_same(present[name], value) for value in harmless):
                problem = "is not served yet" if name in cls.not_yet else "is not supported by this server"
                raise InvalidRequestError(f"{name} {problem}", param=name)
        return present

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        schema = handler.resolve_ref_schema(handler(core_schema))
        return schemas.complete(schema, cls.not_honoured, cls.ignored)


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and neither is true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


class StreamOptions(Body):
    include_usage: bool = False
    """End with a chunk that has no choices and the usage."""
    continuous_usage_stats: bool = False
    """With `include_usage`: every chunk has the usage so far."""


class GenerationBody(Body):
    """What completions and chat have in common."""

    not_honoured = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "structured_outputs": ({},),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "reasoning_effort": (),
        "thinking_token_budget": (-1,),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "early_stopping": (False,),
        "watermarking": (False,),
        "logits_processors": ([],),
        "logprob_token_ids": ([],),
        "repetition_detection": (),
        "routed_experts_prompt_start": (0,),
        "stream_interval": (1,),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
        "vllm_xargs": ({},),
        "prompt_embeds": (),
        "suffix": ("",),
    }
    not_yet = frozenset(
        {"tools", "tool_choice", "functions", "function_call", "response_format", "structured_outputs"}
        | {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "reasoning_effort"}
    )
    ignored: ClassVar[tuple[str, ...]] = (
        "user",
        "metadata",
        "store",
        "service_tier",
        "request_id",
        "session_id",
    )

    model: ModelName = ""
    temperature: float | None = Field(None, ge=0, le=2)
    """0 is greedy. Left open: the model's own default, then 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the most likely tokens that hold this much probability. Default: the model's, then 1."""
    top_k: int | None = Field(None, ge=-1)
    """Sample from this many tokens; 0 and -1: from all. Default: the model's, then 0."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Drop tokens below this share of the most likely one's probability. Default: the model's, then 0."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of a token that was generated before."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logit of a token for each time it was generated before."""
    repetition_penalty: float | None = Field(None, gt=0)
    """Above 1 makes tokens of the prompt and the answer less likely. Default: the model's, then 1."""
    n: int = Field(1, ge=1, le=MAX_N)
    """Choices for each prompt."""
    seed: Int64 | None = None
    """The same seed gives the same answer, whatever else runs."""
    stop: Annotated[Any, schemas.StopSchema()] = None
    """End before the first of these strings in the answer's text."""
    # fail_fast: one error is enough, and a list may have millions of elements.
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
    """End at any of these tokens."""
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, fail_fast=True)
    """No other token is ever sampled."""
    bad_words: list[schemas.ShortText] | None = Field(None, max_length=MAX_BAD_WORDS, fail_fast=True)
    """Texts that are never completed."""
    logit_bias: Annotated[dict[str, float], WithJsonSchema(schemas.LOGIT_BIAS)] | None = Field(
        None, max_length=MAX_LOGIT_BIAS
    )
    """Added to the logits of token ids (the keys), clamped to +-100."""
    include_stop_str_in_output: bool = False
    """Leave the stop string at the end of the text."""
    ignore_eos: bool = False
    """Go on after the end of sequence, to the limit."""
    min_tokens: int = Field(0, ge=0)
    """Neither the end of sequence nor anything of `stop` ends the answer before this many tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Spaces between special tokens, where they are shown."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Log-probabilities of the prompt's tokens and of this many alternatives; not with `stream`."""
    return_tokens_as_token_ids: bool = False
    """Tokens of logprobs as `token_id:N`."""
    return_token_ids: bool = False
    """The token ids of the prompt and of the choices too."""
    truncate_prompt_tokens: TruncateTokens = None
    truncation_side: TruncationSide = "left"
    stream: bool = False
    """Answer with server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    priority: Int64 = 0
    """Lower goes first, where the server schedules by priority."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Cached prefixes are shared only between requests with the same salt."""

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: Any, info: ValidationInfo) -> Any:
        most = (info.context or {}).get(_MAX_STOP_STRINGS, DEFAULT_STOP_STRINGS)
        if isinstance(value, list) and len(value) > most:  # repeats count here
            raise InvalidRequestError(f"stop takes at most {most} strings", param="stop")
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

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}]
        }
    )
    not_honoured = {**GenerationBody.not_honoured, "max_completion_tokens": (), "top_logprobs": ()}

    # Checked by hand: a union would collect an error for every element of a long list, and prompts have up to
    # millions of them.
    prompt: Annotated[Any, WithJsonSchema(schemas.PROMPT)]
    """A text, a list of texts, a list of token ids, or a list of those."""
    max_tokens: int = Field(16, ge=0)
    """The most tokens of a choice, cut to the rest of the context; 0 only with `echo`."""
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    """Sample this many choices and return the `n` most likely ones; not with `stream`. Default: `n`."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Log-probabilities of the tokens and of this many alternatives."""
    echo: bool = False
    """Begin every choice with its prompt."""
    add_special_tokens: bool = True
    """Begin the prompt as the model's tokenizer does, with a BOS token for most."""

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, value: Any) -> list[str] | list[list[int]]:
        return prompts_of(value, "prompt", MAX_PROMPTS)

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

    @property
    def token_limit(self) -> int:
        """The most tokens the client wants in a choice."""
        return self.max_tokens


def prompts_of(value: Any, param: str, most: int) -> list[str] | list[list[int]]:
    """A text, texts, token ids or lists of those, as several; raises InvalidRequestError for the rest."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if prompts == [] or prompts == [""]:
        raise InvalidRequestError(f"{param} must not be empty", param=param)
    if isinstance(prompts, list) and len(prompts) > most:
        raise InvalidRequestError(f"{param} takes at most {most} prompts", param=param)
    if not isinstance(prompts, list) or not (
        all(isinstance(prompt, str) and prompt for prompt in prompts)
        or prompts[0] is value
        or all(_is_ids(prompt) for prompt in prompts)
    ):
        message = f"{param} must be a string, a list of strings, or non-empty lists of token ids"
        raise InvalidRequestError(message, param=param)
    return prompts


def _is_ids(value: Any) -> bool:
    """A non-empty list of integers; `type` and not isinstance, because a bool is an int."""
    return isinstance(value, list) and set(map(type, value)) == {int}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 64}
            ]
        }
    )
    not_honoured = {
        **GenerationBody.not_honoured,
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "moderation": (),
        "web_search_options": (),
        "verbosity": ("medium",),
        "include_reasoning": (True,),
        "chat_template": (),
        "documents": ([],),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "echo": (False,),
        "best_of": (1,),
        "return_prompt_text": (False,),
    }
    ignored = (
        *GenerationBody.ignored,
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    )

    messages: Messages
    """The conversation so far."""
    max_tokens: int | None = Field(None, ge=1)
    """The most tokens of a choice, cut to the rest of the context, which is the default."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of `max_tokens`; where both are given, this one holds."""
    logprobs: bool = False
    """Log-probabilities of the answer's tokens."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """And of this many alternatives; needs `logprobs: true`."""
    add_special_tokens: bool = False
    """Add special tokens before those that the template writes; there is never a second BOS."""
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = False
    chat_template_kwargs: TemplateKwargs = {}

    @model_validator(mode="after")
    def _chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        check_template_options(self)
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens the client wants in a choice; None: the rest of the context."""
        return self.max_completion_tokens or self.max_tokens


class TokenizeBody(Body):
    """POST /tokenize: `prompt` or `messages`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Hello"}]})
    not_honoured = {"tools": ([],), "chat_template": ()}
    not_yet = frozenset({"tools"})

    model: ModelName = ""
    prompt: str | None = None
    """A text; either this or `messages`."""
    messages: Messages = None
    """A conversation."""
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages."""
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = False
    chat_template_kwargs: TemplateKwargs = {}
    truncate_prompt_tokens: TruncateTokens = None
    truncation_side: TruncationSide = "left"
    return_token_strs: bool = False
    """The text of each token too."""

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        check_template_options(self)
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2, 3]}]})

    model: ModelName = ""
    tokens: list[TokenId] = Field(fail_fast=True)
    """Token ids; special ones are shown."""


def check_template_options(body: ChatBody | TokenizeBody) -> None:
    """The rules of the fields that steer the chat template."""
    if body.add_generation_prompt and body.continue_final_message:
        message = "add_generation_prompt and continue_final_message cannot both be true"
        raise InvalidRequestError(message, param="continue_final_message")
    check_template_kwargs(body.chat_template_kwargs)
    if "tools" in body.chat_template_kwargs:  # a template's variable, and a field of its own
        message = "'tools' may not be given as a chat template variable"
        raise InvalidRequestError(message, param="chat_template_kwargs")
