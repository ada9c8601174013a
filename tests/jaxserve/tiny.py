"""Small models for engine tests, and engines whose programs compile fast."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import LLM, AsyncLLMEngine
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import name_table
from jaxserve.models.rope import RopeConfig

GOLDENS = Path(__file__).parents[1] / "goldens"

TINY = ModelConfig(
    family="llama",
    vocab_size=211,  # a prime: no multiple of anything
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0, head_dim=8, max_position_embeddings=1024),
    max_position_embeddings=1024,
    eos_token_ids=(2,),
)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by its Hugging Face name."""
    h, i = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    by_projection = {
        "q_proj": (q, h),
        "k_proj": (kv, h),
        "v_proj": (kv, h),
        "o_proj": (h, q),
        "gate_proj": (i, h),
        "up_proj": (i, h),
        "down_proj": (h, i),
    }
    found: dict[str, tuple[int, ...]] = {}
    for name in name_table(config).values():
        part, kind = name.split(".")[-2:]
        if "norm" in part:
            found[name] = (h,)
        elif part in by_projection:
            found[name] = by_projection[part] if kind == "weight" else by_projection[part][:1]
        else:
            found[name] = (config.vocab_size, h)
    return found


def random_arrays(config: ModelConfig = TINY, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights under which logits differ widely, so that a wrong token shows."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes(config).items():
        value = 1 + 0.1 * rng.standard_normal(shape) if "norm" in name else rng.standard_normal(shape) * 0.25
        arrays[name] = value.astype(np.float32)
    return arrays


# Of an engine of few programs.
TINY_ARGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "page_size": 8,
    "num_pages": 129,
    "warmup": "none",
    "max_token_gap": 0,  # steps that do not depend on how long others took
}


def tiny_llm(**engine_args: Any) -> LLM:
    """TINY on an engine of few programs."""
    return LLM(random_arrays(), config=TINY, **{**TINY_ARGS, **engine_args})


async def is_idle(engine: AsyncLLMEngine) -> bool:
    """Whether, within seconds, nothing runs or waits and every page is back."""
    for _ in range(500):
        stats = engine.stats()
        if stats.num_running == stats.num_waiting == stats.pages_used == 0:
            return True
        await asyncio.sleep(0.01)
    return False
