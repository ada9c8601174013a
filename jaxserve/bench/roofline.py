"""What a machine can do at best, and what a model asks of it.

Memory: a step reads every weight once, as it lies in memory (packed ones at their size), and each decoding
sequence reads its keys and values; over the bandwidth measured here. Arithmetic: two operations a weight a
token, over the matmul peak. That is measured in float32; packed weights multiply 8-bit integers, whose peak
is reckoned from it by what the instruction set does in the same time. Attention's arithmetic, and reading in
prefill, are left out: the bounds are lower for it, and the fractions that we state smaller, never larger.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.measure import RequestRecord
from jaxserve.engine import LLMEngine
from jaxserve_checkpoints import open_checkpoint

# The input embedding and the output head as checkpoints name them.
_EMBEDDINGS = ("model.embed_tokens.weight", "token_embd.weight")
_HEADS = ("lm_head.weight", "output.weight")
# Products of 8-bit integers that an instruction set adds up, for each of float32 in the same time. AVX2 needs
# three instructions (vpmaddubsw, vpmaddwd, vpaddd) for 32 of them, VNNI one; a fused multiply-add of float32
# does a quarter of as many.
_INT8_RATIOS = {"avx2": 4 / 3, "avx_vnni": 4.0, "avx512_vnni": 4.0}


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
    """What a loaded model asks of a machine.

    `weight_bytes`: that a step reads. `kv_bytes`: keys and values of one position. `flops_per_token`: of the
    linear layers. `peak_ratio`: of the arithmetic on the weights as they lie in memory, over float32's.
    """

    weight_bytes: int
    kv_bytes: int
    flops_per_token: int
    peak_ratio: float = 1.0

    @classmethod
    def of_engine(cls, engine: LLMEngine, checkpoint: Path) -> ModelCost:
        """Raises CheckpointError."""
        skeleton, pool = engine.skeleton, engine.runner.pool
        has_head = any("lm_head" in leaf.path for leaf in skeleton.leaves)
        # With a head of its own, the embedding is only looked up: one row a token.
        read = [leaf for leaf in skeleton.leaves if not (has_head and "embed_tokens" in leaf.path)]
        is_packed = any(leaf.dtype in (np.uint8, np.int8) for leaf in read)
        return cls(
            weight_bytes=sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in read),
            kv_bytes=pool.num_bytes // (pool.num_pages * pool.page_size),
            flops_per_token=flops_per_token(checkpoint),
            peak_ratio=_INT8_RATIOS.get(engine.runner.spec.chip or "", 1.0) if is_packed else 1.0,
        )

    def decode_floor(self, machine: Machine, context: float) -> float:
        """Least seconds a token for one sequence with so many positions."""
        return (self.weight_bytes + context * self.kv_bytes) / machine.bandwidth

    def memory_floor(self, machine: Machine, records: Sequence[RequestRecord], concurrency: int) -> float:
        """Least seconds to read what decoding so many requests at once reads."""
        # The first token of each comes from its prompt's last step.
        steps = math.ceil(sum(r.output_tokens - 1 for r in records) / concurrency)
        positions = sum((r.output_tokens - 1) * (r.prompt_tokens + r.output_tokens / 2) for r in records)
        return (steps * self.weight_bytes + positions * self.kv_bytes) / machine.bandwidth

    def arithmetic_floor(self, machine: Machine, records: Sequence[RequestRecord]) -> float:
        """Least seconds for the linear layers of all tokens that were not found in a cache."""
        # The last token of each is never computed on.
        tokens = sum(r.prompt_tokens - r.cached_tokens + r.output_tokens - 1 for r in records)
        return tokens * self.flops_per_token / (machine.matmul * self.peak_ratio)


def flops_per_token(checkpoint: Path) -> int:
    """Two for each element of a matrix that a token is multiplied with. Raises CheckpointError."""
    shapes = {name: ref.shape for name, ref in open_checkpoint(checkpoint).tensors.items()}
    looked_up = _EMBEDDINGS if any(name in shapes for name in _HEADS) else ()
    return 2 * sum(
        math.prod(shape) for name, shape in shapes.items() if len(shape) > 1 and name not in looked_up
    )


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
