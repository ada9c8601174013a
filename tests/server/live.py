"""The real server over real engines of tiny checkpoints: random weights, true tokenizers.

The checkpoints are the two golden GGUF files with tokenizers: 400 tokens, 512 positions; `gpt2` is byte level
(one EOS that is also the BOS), `llama` is SentencePiece with byte tokens, a BOS and leading spaces. Random
weights sample every kind of token: halves of characters, special tokens, spaces.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

from conftest import Api, running

from jaxserve import AsyncLLMEngine
from jaxserve.engine_args import EngineArgs
from jaxserve_server.config import ServerConfig
from tests.jaxserve.tiny import is_idle as is_idle

GGUF = Path(__file__).parents[1] / "goldens" / "gguf"
Kind = Literal["gpt2", "llama"]

# ChatML without special tokens: what the messages hold is in the prompt as it is.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_args(kind: Kind = "gpt2", **changes: Any) -> EngineArgs:
    """Arguments of an engine whose programs compile fast."""
    defaults: dict[str, Any] = {
        "model": str(GGUF / f"f16_tok_{kind}" / "model.gguf"),
        "chat_template": TEMPLATE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "page_size": 8,
        "num_pages": 257,
        "warmup": "none",
    }
    return EngineArgs(**{**defaults, **changes})


@contextlib.asynccontextmanager
async def live(
    kind: Kind = "gpt2", config: ServerConfig | None = None, **engine_args: Any
) -> AsyncIterator[Api]:
    """A server over a tiny engine, for the time of the block."""
    engine = await asyncio.to_thread(AsyncLLMEngine.from_engine_args, tiny_args(kind, **engine_args))
    try:
        async with running(engine, config, names=(kind,)) as api:
            yield api
    finally:
        await asyncio.to_thread(engine.shutdown)


def _gpt2_bytes() -> str:
    """GPT-2's stand-ins for bytes: printable ones are themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(moved)) for byte in range(256))


_GPT2_BYTES = _gpt2_bytes()


def tokens_of(api: Api, *names: str) -> list[int]:
    """Ids of tokens by the names they have in the vocabulary."""
    ids = [api.engine.tokenizer._hf.token_to_id(name) for name in names]
    assert None not in ids, names
    return ids


def byte_ids(api: Api, data: bytes) -> list[int]:
    """For each byte the token that is this byte alone."""
    if api.engine.tokenizer.decoder_kind == "sentencepiece":
        return tokens_of(api, *(f"<0x{byte:02X}>" for byte in data))
    return tokens_of(api, *(_GPT2_BYTES[byte] for byte in data))


def true_bytes(api: Api, token_id: int, skip_special_tokens: bool = True) -> bytes:
    """What a token adds to a text, from its name in the vocabulary."""
    tokenizer = api.engine.tokenizer
    name = tokenizer._hf.id_to_token(token_id)
    if token_id in tokenizer.special_ids:
        return b"" if skip_special_tokens else name.encode()
    if tokenizer.decoder_kind == "sentencepiece":
        is_byte = len(name) == 6 and name.startswith("<0x")
        return bytes([int(name[3:5], 16)]) if is_byte else name.replace("▁", " ").encode()
    return bytes(_GPT2_BYTES.index(char) for char in name)


def forced(ids: list[int]) -> dict[str, Any]:
    """Fields with which exactly these tokens come, in this order; all different and none in the prompt.

    The bias ranks them, and the repetition penalty puts one that has come behind all others.
    """
    bias = {str(token): 100 - 8 * place for place, token in enumerate(ids)}
    assert len(bias) == len(ids) <= 12
    return {
        "allowed_token_ids": ids,
        "logit_bias": bias,
        "repetition_penalty": 1000.0,
        "temperature": 0,
        "max_tokens": len(ids),
    }
