"""The size of the pool, and the arguments that decide it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine_args import EngineArgs
from jaxserve.errors import ConfigError
from jaxserve.kv_pool import default_page_size, plan_pool
from jaxserve.sharding import make_mesh
from tests.jaxserve.tiny import TINY

PAGE_BYTES = 2 * 2 * 2 * 16 * 8 * 4  # layers, kv heads, k and v, page_size, head_dim, float32


def plan(**args: Any) -> Any:
    defaults: dict[str, Any] = {
        "dtype": np.dtype(np.float32),
        "page_size": 16,
        "num_pages": None,
        "budget_bytes": 100 * PAGE_BYTES,
        "max_num_seqs": 8,
        "max_model_len": 1000,
    }
    mesh = make_mesh(jax.devices(), args.pop("num_devices", 1))
    return plan_pool(TINY, mesh, **{**defaults, **args})


def test_the_budget_is_filled_and_not_exceeded() -> None:
    pool = plan(budget_bytes=100 * PAGE_BYTES + 7)
    assert (pool.num_pages, pool.num_tokens, pool.num_bytes) == (100, 99 * 16, 100 * PAGE_BYTES)


def test_never_more_pages_than_concurrency_and_context_can_use() -> None:
    assert plan(budget_bytes=10**12).num_pages == 8 * 63 + 1
    assert plan(num_pages=10**9).num_pages == 8 * 63 + 1


def test_given_pages_go_before_the_budget() -> None:
    assert plan(num_pages=7).num_pages == 7


def test_a_budget_of_less_than_two_pages_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        plan(budget_bytes=2 * PAGE_BYTES - 1)


@pytest.mark.parametrize(("num_devices", "heads"), [(2, 2), (3, 2), (4, 4), (8, 2)])
def test_key_value_heads_are_repeated_where_that_gives_each_device_one(num_devices: int, heads: int) -> None:
    """TINY has 2 of them for 4 query heads: 3 devices, or 8, do not share 4 evenly."""
    pool = plan(num_devices=num_devices)
    assert pool.shape == (2, 100 * 2 // heads, heads, 16, 2 * 8)
    assert pool.num_bytes == 100 * PAGE_BYTES


@pytest.mark.parametrize(
    ("context", "size"), [(16, 16), (256, 16), (400, 16), (511, 16), (512, 32), (8192, 32), (32768, 16)]
)
def test_default_page_sizes(context: int, size: int) -> None:
    assert default_page_size(context) == size


@pytest.mark.parametrize(
    ("token_bytes", "size"),
    [(4096, 16), (2048, 16), (1024, 32), (512, 64), (256, 128), (64, 128)],
)
def test_pages_on_an_accelerator_are_worth_a_copy(token_bytes: int, size: int) -> None:
    assert default_page_size(32768, "tpu", token_bytes) == size
    assert default_page_size(32768, "cpu", token_bytes) == 16


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_length": 5}, "did you mean 'max_model_len'"),
        ({"page_size": 0}, "page_size must be"),
        ({"page_size": True}, "page_size must be"),
        ({"num_pages": 1}, "num_pages must be"),
        ({"memory_utilization": 1.5}, "memory_utilization"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"page_size": 8, "block_size": 8}, "given twice"),
        ({"max_logprobs": 21}, "max_logprobs"),
        ({"quantization": "int4"}, "quantization must be one of"),
    ],
)
def test_engine_arguments_that_cannot_work_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs.from_mapping(values)


def test_vllm_s_names_are_aliases() -> None:
    args = EngineArgs.from_mapping({"block_size": 8, "gpu_memory_utilization": 0.5})
    assert (args.page_size, args.memory_utilization) == (8, 0.5)
