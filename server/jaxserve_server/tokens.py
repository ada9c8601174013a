"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic_core
from aiohttp import web

from jaxserve.errors import InvalidRequestError
from jaxserve.tokenizer import MAX_TOKENS
from jaxserve_server.body import BODY_BYTES, read_body
from jaxserve_server.protocol import ChatBody, DetokenizeBody, TokenizeBody
from jaxserve_server.state import STATE
from jaxserve_server.truncation import truncated
from jaxserve_server.workers import off_loop

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine
    from jaxserve.tokenizer import Tokenizer

_PIECE = 64 * 1024  # elements


def tokenizer_of(engine: AsyncLLMEngine, param: str | None) -> Tokenizer:
    """The engine's tokenizer; raises InvalidRequestError where the checkpoint has none."""
    if engine.tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer: send token ids to /v1/completions", param)
    return engine.tokenizer


def chat_token_ids(
    tokenizer: Tokenizer, body: ChatBody | TokenizeBody, max_tokens: int = MAX_TOKENS
) -> list[int]:
    """The conversation as token ids; blocks for as long as the template and the tokenizer take."""
    generation_prompt = body.add_generation_prompt
    return tokenizer.apply_chat_template(
        body.messages or [],
        add_generation_prompt=not body.continue_final_message
        if generation_prompt is None
        else generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=bool(body.add_special_tokens),
        max_tokens=max_tokens,
        **body.chat_template_kwargs,
    )


async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.lifecycle.engine()
    body = await read_body(request, TokenizeBody)
    state.model_name(body.model)
    tokenizer = tokenizer_of(engine, "prompt")
    content = await off_loop(request[BODY_BYTES], _tokenized, tokenizer, body, engine.max_model_len)
    return web.Response(body=content, content_type="application/json")


def _tokenized(tokenizer: Tokenizer, body: TokenizeBody, max_model_len: int) -> bytes:
    """The answer's JSON."""
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = tokenizer.encode(body.prompt, special)
    else:
        ids = chat_token_ids(tokenizer, body)
    ids = truncated(ids, body, max_model_len)
    texts = [tokenizer.token_str(token) for token in ids] if body.return_token_strs else None
    return b'{"count":%d,"max_model_len":%d,"tokens":%s,"token_strs":%s}' % (
        len(ids),
        max_model_len,
        _json_list(ids),
        b"null" if texts is None else _json_list(texts),
    )


def _json_list(items: list[Any]) -> bytes:
    """Made in pieces: encoding a long list at once would stop other threads."""
    pieces = (items[start : start + _PIECE] for start in range(0, len(items), _PIECE))
    return b"[" + b",".join(pydantic_core.to_json(piece)[1:-1] for piece in pieces) + b"]"


async def detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.lifecycle.engine()
    body = await read_body(request, DetokenizeBody)
    state.model_name(body.model)
    tokenizer = tokenizer_of(engine, "tokens")
    text = await off_loop(request[BODY_BYTES], _text_of, tokenizer, body.tokens, engine.vocab_size)
    return web.Response(body=pydantic_core.to_json({"prompt": text}), content_type="application/json")


def _text_of(tokenizer: Tokenizer, token_ids: list[int], vocab_size: int) -> str:
    check_vocabulary(token_ids, vocab_size, "tokens")
    return tokenizer.decode(token_ids, skip_special_tokens=False)


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
    for start in range(0, len(token_ids), _PIECE):
        piece = token_ids[start : start + _PIECE]
        if min(piece) < 0 or max(piece) >= vocab_size:
            raise InvalidRequestError(f"{param}: every token id must be in 0..{vocab_size - 1}", param)
