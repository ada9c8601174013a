"""What the routes answer, as models for the OpenAPI document. Tests hold the live answers against them.

The answers themselves are built as plain dicts: a chunk of a stream is made for every token.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

OptionalKey: Any = Field(default=None)  # a key that is there only where the request asks for it


class Shape(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())


class Error(Shape):
    message: str
    """What is wrong, for people."""
    type: str
    """The kind of error."""
    param: str | None
    """The field of the request that is wrong."""
    code: str | None
    """The kind of error, for programs."""


class ErrorAnswer(Shape):
    """Every error, on every path."""

    error: Error
    """What went wrong."""


class PromptDetails(Shape):
    cached_tokens: int
    """Prompt tokens that the prefix cache held."""


class Usage(Shape):
    prompt_tokens: int
    """Tokens of all prompts."""
    completion_tokens: int
    """Tokens generated for all choices."""
    total_tokens: int
    """Both together."""
    prompt_tokens_details: PromptDetails
    """More about the prompts."""


FinishReason = Literal["stop", "length", "abort"]
StopReason = str | int | None


class PromptLogprob(Shape):
    logprob: float
    """Its log-probability."""
    rank: int
    """1 for the most likely token."""
    decoded_token: str
    """Its text."""


# One entry for each prompt token: token id -> what is known; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Shape):
    """Four lists of one length."""

    tokens: list[str]
    """Text of each token."""
    token_logprobs: list[float | None]
    """Of each token; null for the first of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    """Text and log-probability of the most likely tokens at each place."""
    text_offset: list[int]
    """Characters before each token."""


class CompletionChoice(Shape):
    index: int
    """Choice `j` of prompt `i` has the index `i * n + j`."""
    text: str
    """The text; in a stream, what is new of it."""
    logprobs: CompletionLogprobs | None
    """Where the request asked for them."""
    finish_reason: FinishReason | None
    """Why the choice ended; null in a stream while it goes on."""
    stop_reason: StopReason
    """The stop string or token id that ended the choice; null at the end of sequence."""
    prompt_logprobs: PromptLogprobs = OptionalKey
    """Of each prompt token, by token id; null for the first."""
    token_ids: list[int] = OptionalKey
    """Ids of the choice's tokens."""
    prompt_token_ids: list[int] = OptionalKey
    """Ids of the prompt's tokens."""


class Head(Shape):
    id: str
    """Of this answer; in every event of a stream."""
    created: int
    """Seconds since the epoch."""
    model: str
    """The served model."""


class Completion(Head):
    object: Literal["text_completion"]
    """What this is."""
    choices: list[CompletionChoice]
    """`n` for each prompt."""
    usage: Usage
    """Tokens of the whole request."""


class CompletionChunk(Head):
    """An event of a stream; the last one may have the usage and no choices."""

    object: Literal["text_completion"]
    """What this is."""
    choices: list[CompletionChoice]
    """What is new of them."""
    usage: Usage | None = OptionalKey
    """Where `stream_options` ask for it."""


class TokenLogprob(Shape):
    token: str
    """Its text."""
    logprob: float
    """Its log-probability."""
    bytes: list[int]
    """The token's own bytes; those of all tokens join to the text's UTF-8."""


class ChatToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]
    """The most likely tokens at this place."""


class ChatLogprobs(Shape):
    content: list[ChatToken]
    """One entry for each token."""
    refusal: None
    """Always null."""


class ChatMessage(Shape):
    role: Literal["assistant"]
    """Who speaks."""
    content: str
    """The text."""
    refusal: None
    """Always null."""


class ChatChoice(Shape):
    index: int
    """Which of the `n` choices."""
    message: ChatMessage
    """The answer."""
    logprobs: ChatLogprobs | None
    """Where the request asked for them."""
    finish_reason: FinishReason
    """Why the choice ended."""
    stop_reason: StopReason
    """The stop string or token id that ended the choice; null at the end of sequence."""
    token_ids: list[int] = OptionalKey
    """Ids of the choice's tokens."""


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    """What this is."""
    choices: list[ChatChoice]
    """The `n` choices."""
    usage: Usage
    """Tokens of the whole request."""
    prompt_logprobs: PromptLogprobs = OptionalKey
    """Of each prompt token, by token id; null for the first."""
    prompt_token_ids: list[int] = OptionalKey
    """Ids of the prompt's tokens."""


class ChatDelta(Shape):
    role: Literal["assistant"] = OptionalKey
    """Who speaks; in the first event of a choice."""
    content: str = OptionalKey
    """What is new of the text."""


class ChatChunkChoice(Shape):
    index: int
    """Which of the `n` choices."""
    delta: ChatDelta
    """What is new."""
    logprobs: ChatLogprobs | None
    """Of the new tokens, where the request asked for them."""
    finish_reason: FinishReason | None
    """Why the choice ended; null while it goes on."""
    stop_reason: StopReason = OptionalKey
    """The stop string or token id that ended the choice; null at the end of sequence."""
    token_ids: list[int] = OptionalKey
    """Ids of the new tokens."""


class ChatChunk(Head):
    """An event of a stream; the first of each choice has the role, the last one may have only the usage."""

    object: Literal["chat.completion.chunk"]
    """What this is."""
    choices: list[ChatChunkChoice]
    """What is new of them."""
    usage: Usage | None = OptionalKey
    """Where `stream_options` ask for it."""
    prompt_token_ids: list[int] = OptionalKey
    """Ids of the prompt's tokens; in the first event."""


class Embedding(Shape):
    object: Literal["embedding"]
    """What this is."""
    index: int
    """Which of the inputs."""
    embedding: list[float] | str
    """Numbers, or the base64 of little-endian 32-bit floats."""


class EmbeddingUsage(Shape):
    prompt_tokens: int
    """Tokens of all inputs."""
    total_tokens: int
    """The same."""


class Embeddings(Shape):
    id: str
    """Of this answer."""
    object: Literal["list"]
    """What this is."""
    data: list[Embedding]
    """One for each input, in their order."""
    model: str
    """The served model."""
    usage: EmbeddingUsage
    """Tokens of the whole request."""


class Tokens(Shape):
    count: int
    """How many tokens."""
    max_model_len: int
    """Tokens of the longest prompt and answer together."""
    tokens: list[int]
    """Their ids."""
    token_strs: list[str] | None
    """Their texts, where the request asked for them."""


class Detokenized(Shape):
    prompt: str
    """The text."""


class TokenizerInfo(Shape):
    bos_token: str | None
    """Begins a text; null where there is none."""
    eos_token: str | None
    """Ends a text; null where there is none."""
    pad_token: str | None
    """Null where there is none."""
    unk_token: str | None
    """Stands for what the vocabulary lacks; null where there is none."""
    chat_template: str | None
    """The Jinja template of conversations; null where there is none."""


class ModelCard(Shape):
    id: str
    """The name that requests use."""
    object: Literal["model"]
    """What this is."""
    created: int
    """When the server started, in seconds since the epoch."""
    owned_by: str
    """Always `jaxserve`."""
    root: str
    """The model that the name stands for."""
    parent: str | None
    """Always null."""
    max_model_len: int
    """Tokens of the longest prompt and answer together."""
    permission: Annotated[list[dict[str, Any]], Field(max_length=0)]
    """Always empty."""


class ModelList(Shape):
    object: Literal["list"]
    """What this is."""
    data: list[ModelCard]
    """The served names, the default first."""


class Status(Shape):
    status: Literal["loading", "ready", "draining", "dead"]
    """Where the server is in its life."""


class Version(Shape):
    version: str
    """Of jaxserve."""
