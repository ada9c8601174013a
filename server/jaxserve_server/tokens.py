"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web

from jaxserve.errors import InvalidRequestError
from jaxserve_server.body import read_body
from jaxserve_server.protocol import ChatBody, DetokenizeBody, TokenizeBody
from jaxserve_server.state import STATE
from jaxserve_server.truncation import truncated

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine
    from jaxserve.tokenizer import Tokenizer


def tokenizer_of(engine: AsyncLLMEngine, param: str | None) -> Tokenizer:
    """The engine's tokenizer; raises InvalidRequestError where the checkpoint has none."""
    if engine.tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer: send token ids to /v1/completions", param)
    return engine.tokenizer


def chat_token_ids(tokenizer: Tokenizer, body: ChatBody | TokenizeBody) -> list[int]:
    """The conversation as token ids; blocks for as long as the template and the tokenizer take."""
    generation_prompt = body.add_generation_prompt
    return tokenizer.apply_chat_template(
        body.messages or [],
        add_generation_prompt=not body.continue_final_message
        if generation_prompt is None
        else generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=bool(body.add_special_tokens),
        **body.chat_template_kwargs,
    )


async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.lifecycle.engine()
    body = await read_body(request, TokenizeBody)
    state.model_name(body.model)
    tokenizer = tokenizer_of(engine, "prompt")
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt, special)
    else:
        ids = await asyncio.to_thread(chat_token_ids, tokenizer, body)
    ids = truncated(ids, body, engine.max_model_len)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": engine.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token_str(token) for token in ids] if body.return_token_strs else None,
    }
    return web.json_response(answer)


async def detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.lifecycle.engine()
    body = await read_body(request, DetokenizeBody)
    state.model_name(body.model)
    tokenizer = tokenizer_of(engine, "tokens")
    check_vocabulary(body.tokens, engine.vocab_size, "tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return web.json_response({"prompt": text})


async def tokenizer_info(request: web.Request) -> web.Response:
    """What a client needs besides /tokenize to count and to template as the server does.

    lm-eval asks for it: with it, its `local-completions` needs no tokenizer of its own.
    """
    tokenizer = tokenizer_of(request.app[STATE].lifecycle.engine(), None)
    ids = {
        "bos_token": tokenizer.bos_token_id,
        "eos_token": tokenizer.eos_token_id,
        "pad_token": tokenizer.pad_token_id,
        "unk_token": tokenizer.unk_token_id,
    }
    texts = {name: None if token is None else tokenizer.token_str(token) for name, token in ids.items()}
    return web.json_response({**texts, "chat_template": tokenizer.chat_template})


def check_vocabulary(token_ids: list[int], vocab_size: int, param: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise InvalidRequestError(f"{param}: every token id must be in 0..{vocab_size - 1}", param)
