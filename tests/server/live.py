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


async def is_idle(engine: AsyncLLMEngine) -> bool:
    """Whether, within seconds, nothing runs or waits and every page is back."""
    for _ in range(500):
        stats = engine.stats()
        if stats.num_running == stats.num_waiting == stats.pages_used == 0:
            return True
        await asyncio.sleep(0.01)
    return False
