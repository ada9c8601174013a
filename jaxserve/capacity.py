"""What an engine's arguments come to on a device: number format, attention, limits, pool, static spec.

The engine asks for the devices it has, `jaxserve plan` for ones it has not.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.engine_args import EngineArgs
from jaxserve.errors import ConfigError
from jaxserve.kv_pool import PoolSpec, default_page_size, plan_pool
from jaxserve.limits import SchedulerConfig
from jaxserve.models.config import ModelConfig
from jaxserve.sharding import head_sharding, num_pool_heads, platform_of
from jaxserve.skeleton import ModelSkeleton
from jaxserve.step import StepSpec
from pallas_kernels.pool_layout import row_dim
from pallas_kernels.support import SUPPORT, resolve

_UTILIZATION = 0.9  # of an accelerator's memory
_CPU_UTILIZATION = 0.05  # of the machine's, for the pool alone


def choose_attention(args: EngineArgs, platform: str, chip: str | None) -> str:
    """As asked for. Raises ConfigError when that does not run there; "auto" chooses by case, in the step."""
    try:
        resolve("ragged_paged_attention", platform, args.attention_implementation, chip=chip)
        return args.attention_implementation
    except NotImplementedError as error:
        raise ConfigError(f"attention_implementation: {error}") from error


def choose_dtype(args: EngineArgs, platform: str) -> np.dtype:
    """Of weights and activations."""
    if args.dtype != "auto":
        return np.dtype(jnp.dtype(args.dtype))
    return np.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)


def choose_kv_dtype(args: EngineArgs, dtype: np.dtype, *, is_packed: bool = False) -> np.dtype:
    """Of keys and values in the pool; `is_packed`: beside packed weights, on a CPU with native kernels."""
    if args.kv_cache_dtype != "auto":
        return np.dtype(jnp.dtype(args.kv_cache_dtype))
    # Half the bytes of attention, where its kernel reads them as they are.
    has_kernel = "cpu" in SUPPORT["ragged_paged_attention"]["cpu"]
    return np.dtype(jnp.bfloat16) if is_packed and has_kernel else dtype


def choose_num_seqs(args: EngineArgs, platform: str) -> int:
    return args.max_num_seqs or (32 if platform == "cpu" else 256)


def choose_utilization(args: EngineArgs, platform: str) -> float:
    """Share of a device's memory that is used where nothing else says how large the pool is."""
    return args.memory_utilization or (_CPU_UTILIZATION if platform == "cpu" else _UTILIZATION)


def choose_limits(
    args: EngineArgs,
    config: ModelConfig,
    kv_dtype: np.dtype,
    mesh: Mesh,
    budget_bytes: int,
    num_pinned: int = 0,
) -> tuple[SchedulerConfig, PoolSpec]:
    """The scheduler's limits and the pool.

    Args:
        budget_bytes: of the pool over all devices.
        num_pinned: tokens of pinned prefixes, which the pool holds beside those of requests.

    Raises ConfigError for a context that the model does not have and for a budget below two pages.
    """
    platform = platform_of(mesh)
    max_num_seqs = choose_num_seqs(args, platform)
    max_model_len = args.max_model_len or config.max_position_embeddings
    if max_model_len > config.max_position_embeddings and config.rope.rope_type != "dynamic":
        raise ConfigError(
            f"max_model_len {max_model_len} exceeds the model's max_position_embeddings "
            f"{config.max_position_embeddings}"
        )
    axis = head_sharding(config, mesh).axis
    heads = num_pool_heads(config, mesh) // (mesh.shape[axis] if axis else 1)
    token_bytes = heads * row_dim(2 * config.head_dim, platform) * kv_dtype.itemsize
    page_size = args.page_size or default_page_size(max_model_len, platform, token_bytes)
    pool = plan_pool(
        config,
        mesh,
        dtype=kv_dtype,
        page_size=page_size,
        num_pages=args.num_pages,
        budget_bytes=budget_bytes,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_pinned=num_pinned,
    )
    if args.max_model_len is None:
        pinned = num_pinned // page_size * page_size
        max_model_len = min(max_model_len, max(pool.num_tokens - pinned, page_size))
    tokens = args.max_num_batched_tokens or (512 if platform == "cpu" else 2048)
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(tokens, 1),
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=pool.num_pages,
        enable_prefix_caching=args.enable_prefix_caching,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy="priority" if args.scheduling_policy == "priority" else "fcfs",
        scheduler_delay=args.scheduler_delay,
        max_queue=args.max_queue,
    )
    return limits, pool


def pool_budget(
    args: EngineArgs, config: ModelConfig, mesh: Mesh, device_bytes: int, taken_bytes: int
) -> int:
    """Bytes of the pool over all accelerators of a mesh; negative where the rest does not fit.

    Args:
        device_bytes: memory of one device.
        taken_bytes: what each device needs beside the pool and the step's tables, weights above all.
    """
    slots = choose_num_seqs(args, platform_of(mesh)) + 1
    tables = 4 * slots * (config.vocab_size + (args.max_model_len or config.max_position_embeddings))
    share = int(device_bytes * (args.memory_utilization or _UTILIZATION))
    # A pool that is not split is whole on every device.
    return (share - taken_bytes - tables) * (mesh.size if head_sharding(config, mesh).axis else 1)


def make_spec(skeleton: ModelSkeleton, mesh: Mesh, chip: str | None, attention: str) -> StepSpec:
    """What is static in the engine's programs; `attention` is an implementation's name."""
    config = skeleton.config
    return StepSpec(
        graphdef=skeleton.graphdef,
        treedef=skeleton.treedef,
        mesh=mesh,
        heads=skeleton.heads,
        head_dim=config.head_dim,
        sm_scale=config.attention_scale or config.head_dim**-0.5,
        soft_cap=config.attention_soft_cap,
        platform=platform_of(mesh),
        chip=chip,
        attention_implementation=attention,
    )
