"""What a machine can do at best, and what a model asks of it.

Decoding one sequence reads every weight once a token, so its floor is bytes of weights over memory bandwidth.
Many sequences share one read and end at arithmetic: two operations a weight a token, over the matmul peak.
Reading keys and values and the attention's own arithmetic are left out. They are small for short contexts;
without them the floor is lower and the fraction of it that we state smaller, never larger.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve_checkpoints import open_checkpoint

# The input embedding and the output head as checkpoints name them.
_EMBEDDINGS = ("model.embed_tokens.weight", "token_embd.weight")
_HEADS = ("lm_head.weight", "output.weight")


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured rates: bytes/s of reading and copying (copies count both ways), FLOP/s of float32 matmuls."""

    platform: str
    threads: int
    read_one_thread: float
    read: float
    copy_one_thread: float
    copy: float
    matmul: float

    @property
    def bandwidth(self) -> float:
        """Bytes/s that memory was seen to move at best, so that a floor built on it is one."""
        return max(self.read, self.copy)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """`weights`: elements that computing a token touches; two FLOPs for each that a matmul reads."""

    weights: int
    flops_per_token: int

    @classmethod
    def of_checkpoint(cls, path: Path) -> ModelCost:
        """Counted from the shapes in the checkpoint's headers. Raises CheckpointError."""
        shapes = {name: ref.shape for name, ref in open_checkpoint(path).tensors.items()}
        # With a head of its own, the embedding is only looked up: one row a token.
        looked_up = _EMBEDDINGS if any(name in shapes for name in _HEADS) else ()
        touched = {name: shape for name, shape in shapes.items() if name not in looked_up}
        return cls(
            weights=sum(math.prod(shape) for shape in touched.values()),
            flops_per_token=2 * sum(math.prod(shape) for shape in touched.values() if len(shape) > 1),
        )

    def decode_floor(self, machine: Machine, bytes_per_weight: int) -> float:
        """Least seconds a token for one sequence."""
        return self.weights * bytes_per_weight / machine.bandwidth

    def token_rate_ceiling(self, machine: Machine) -> float:
        """Most tokens/s (prompt and output together) for many sequences."""
        return machine.matmul / self.flops_per_token


def _best_rate(run: Callable[[], object], work: float, seconds: float) -> float:
    """Highest `work`/s of repeated runs; the best, since other load can only slow a run down."""
    run()
    best, end = 0.0, time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        run()
        best = max(best, work / (time.perf_counter() - start))
    return best


def _host_rates(num_bytes: int, threads: int, seconds: float) -> tuple[float, float]:
    """Read and copy bandwidth of host memory; numpy lets go of the interpreter's lock inside these loops."""
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), threads)
    targets = [np.empty_like(part) for part in parts]
    with ThreadPoolExecutor(threads) as pool:
        read = _best_rate(lambda: list(pool.map(np.max, parts)), num_bytes, seconds)
        copy = _best_rate(lambda: list(pool.map(np.copyto, targets, parts)), 2 * num_bytes, seconds)
    return read, copy


def _device_rates(num_bytes: int, seconds: float) -> tuple[float, float]:
    """Read and copy bandwidth of an accelerator's memory."""
    data = jnp.ones((num_bytes // 4096, 1024), jnp.float32)
    total, plus_one = jax.jit(jnp.sum), jax.jit(lambda x: x + 1)
    read = _best_rate(lambda: total(data).block_until_ready(), num_bytes, seconds)
    copy = _best_rate(lambda: plus_one(data).block_until_ready(), 2 * num_bytes, seconds)
    return read, copy


def _matmul_rate(size: int, seconds: float) -> float:
    """FLOP/s of a square float32 matmul."""
    a = jnp.ones((size, size), jnp.float32)
    multiply = jax.jit(lambda x: jnp.dot(x, x, precision=jax.lax.Precision.HIGHEST))
    return _best_rate(lambda: multiply(a).block_until_ready(), 2.0 * size**3, seconds)


def measure_machine(num_bytes: int = 1 << 29, matmul_size: int = 2048, seconds: float = 1.0) -> Machine:
    """Measure the default device, about five times `seconds`. `num_bytes` should exceed the caches by far."""
    platform = jax.default_backend()
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if platform == "cpu":
        read_one, copy_one = _host_rates(num_bytes, 1, seconds)
        read, copy = _host_rates(num_bytes, threads, seconds)
    else:
        read, copy = read_one, copy_one = _device_rates(num_bytes, seconds)
    return Machine(
        platform=platform,
        threads=threads,
        read_one_thread=read_one,
        read=max(read, read_one),
        copy_one_thread=copy_one,
        copy=max(copy, copy_one),
        matmul=_matmul_rate(matmul_size, seconds),
    )
