"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.sampling_params import SamplingParams
from jaxserve_server.protocol import ChatBody, CompletionBody, GenerationBody

# Left open by the client, these come from the model's own generation_config, then from OpenAI's defaults.
_MODEL_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling of POST /v1/completions."""
    choices = body.best_of or body.n
    logprobs = body.logprobs
    if choices > body.n and logprobs is None:
        logprobs = 0  # best_of ranks choices by their log-probability
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return SamplingParams(
        n=choices,
        max_tokens=body.max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **_shared(body, defaults),
    )


def chat_params(body: ChatBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling of POST /v1/chat/completions; without a limit the rest of the context is the limit."""
    return SamplingParams(
        n=body.n,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        **_shared(body, defaults),
    )


def _shared(body: GenerationBody, defaults: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, last_resort in _MODEL_DEFAULTS.items():
        asked = getattr(body, name)
        values[name] = asked if asked is not None else defaults.get(name, last_resort)
    return values | {
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "seed": body.seed,
        "stop": body.stop,
        "stop_token_ids": body.stop_token_ids,
        "allowed_token_ids": body.allowed_token_ids,
        "bad_words": body.bad_words,
        "logit_bias": body.logit_bias,
        "ignore_eos": body.ignore_eos,
        "min_tokens": body.min_tokens,
        "skip_special_tokens": body.skip_special_tokens,
        "spaces_between_special_tokens": body.spaces_between_special_tokens,
        "include_stop_str_in_output": body.include_stop_str_in_output,
    }
