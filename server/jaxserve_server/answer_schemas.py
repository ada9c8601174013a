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
    type: str
    param: str | None
    """The field of the request that is wrong."""
    code: str | None


class ErrorAnswer(Shape):
    """Every error, on every path."""

    error: Error


class PromptDetails(Shape):
    cached_tokens: int
    """Prompt tokens that the prefix cache held."""


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


FinishReason = Literal["stop", "length", "abort"]
StopReason = str | int | None


class PromptLogprob(Shape):
    logprob: float
    rank: int
    decoded_token: str


# One entry for each prompt token: token id -> what is known; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Shape):
    """Four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Characters before each token."""


class CompletionChoice(Shape):
    index: int
    """Choice `j` of prompt `i` has the index `i * n + j`."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason
    """The stop string or token id that ended the choice; null at the end of sequence."""
    prompt_logprobs: PromptLogprobs = OptionalKey
    token_ids: list[int] = OptionalKey
    prompt_token_ids: list[int] = OptionalKey


class Head(Shape):
    id: str
    created: int
    """Seconds since the epoch."""
    model: str


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Head):
    """An event of a stream; the last one may have the usage and no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = OptionalKey


class TokenLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]
    """The token's own bytes; those of all tokens join to the text's UTF-8."""


class ChatToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Shape):
    content: list[ChatToken]
    refusal: None


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: list[int] = OptionalKey


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = OptionalKey
    prompt_token_ids: list[int] = OptionalKey


class ChatDelta(Shape):
    role: Literal["assistant"] = OptionalKey
    content: str = OptionalKey


class ChatChunkChoice(Shape):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = OptionalKey
    token_ids: list[int] = OptionalKey


class ChatChunk(Head):
    """An event of a stream; the first of each choice has the role, the last one may have only the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = OptionalKey
    prompt_token_ids: list[int] = OptionalKey


class Embedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or the base64 of little-endian 32-bit floats."""


class EmbeddingUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Shape):
    id: str
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Shape):
    prompt: str


class TokenizerInfo(Shape):
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    """Tokens of the longest prompt and answer together."""
    permission: Annotated[list[dict[str, Any]], Field(max_length=0)]


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class Status(Shape):
    status: Literal["loading", "ready", "draining", "dead"]


class Version(Shape):
    version: str
