"""The engine's step with the TPU's attention kernels, interpreted, and rows of the pool as a TPU has them."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxserve import kv_pool, step
from pallas_kernels.pool_layout import TPU_LANES, row_dim
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from tests.jaxserve.test_goldens import check, load
from tests.jaxserve.tiny import GOLDENS


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Gives the step the TPU's kernels. What it returns is filled: whether calls were of decode steps."""
    found: set[bool] = set()

    def attention(*args: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        found.add(options["spec"].decode_only)
        on_tpu = {"platform": "tpu", "chip": "v6e", "implementation": "mosaic_tpu", "interpret": True}
        return ragged_paged_attention(*args, **{**options, **on_tpu})

    monkeypatch.setattr(step, "ragged_paged_attention", attention)
    monkeypatch.setattr(kv_pool, "row_dim", lambda kv_dim, platform: row_dim(kv_dim, "tpu"))
    return found


@pytest.mark.parametrize(("name", "num_devices"), [("llama_gqa", 1), ("llama_gqa", 2), ("gemma3_text", 2)])
def test_the_tpu_s_kernels_give_the_reference_s_tokens(name: str, num_devices: int, modes: set[bool]) -> None:
    pack = GOLDENS / "arch" / name
    with load(pack, tensor_parallel_size=num_devices) as llm:
        check(llm, pack, atol=1e-4)
        assert llm._engine.runner.pool.shape[-1] == TPU_LANES
    assert modes == {True, False}  # both kernels
