"""Compiling one bucket's step, and what its program says of itself."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass

import jax

from jaxserve.batch import Bucket
from jaxserve.plan import hlo
from jaxserve.plan.hlo_text import parse
from jaxserve.step_programs import Aval, StepPrograms

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TOO_LARGE = re.compile(r"\(([\d.]+)([KMGT]?)\)? exceeds available HBM \(([\d.]+)([KMGT]?)")


class MemoryExceededError(Exception):
    """The compiler found no room: `needed` and `available` bytes of a device, as far as it tells them."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed:,} bytes of {available:,}")
        self.needed = needed
        self.available = available


@dataclass(frozen=True)
class BucketReport:
    """One compiled step, on each device."""

    bucket: Bucket
    temp_bytes: int
    output_bytes: int  # beside the pool and the table, which come back in their own memory
    code_bytes: int
    total_bytes: int  # with arguments: weights, pool, tables
    pool_copies: tuple[str, ...]  # instructions that make a value of the pool's size
    pool_aliased: bool
    collectives: tuple[hlo.Collective, ...]
    kernels: dict[str, int]
    seconds: float  # that compiling took

    @property
    def link_bytes(self) -> float:
        return sum(c.link_bytes for c in self.collectives)


def compile_bucket(programs: StepPrograms, bucket: Bucket) -> BucketReport:
    """Raises MemoryExceededError where the compiler refuses for want of memory."""
    started = time.perf_counter()
    try:
        compiled = programs.lower(bucket).compile()
    except jax.errors.JaxRuntimeError as error:
        if (exceeded := _exceeded(str(error))) is None:
            raise
        raise exceeded from error
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    module = parse(text)
    pool_dims = shard_dims(programs.kv_pool)
    output = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return BucketReport(
        bucket=bucket,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=output,
        code_bytes=memory.generated_code_size_in_bytes,
        total_bytes=memory.argument_size_in_bytes
        + output
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes,
        pool_copies=tuple(hlo.pool_copies(module, pool_dims)),
        pool_aliased=hlo.is_pool_aliased(module, pool_dims),
        collectives=tuple(hlo.collectives(module)),
        kernels=hlo.custom_calls(module),
        seconds=time.perf_counter() - started,
    )


def shard_dims(aval: Aval) -> tuple[int, ...]:
    assert aval.sharding is not None
    return aval.sharding.shard_shape(aval.shape)


def shard_bytes(aval: Aval) -> int:
    return math.prod(shard_dims(aval)) * aval.dtype.itemsize


def available_memory(device: jax.Device) -> int:
    """Bytes of a TPU that its compiler gives to a program: it keeps some, how much only it knows.

    So it is asked for too much.
    """
    huge = Aval((1 << 36, 1 << 7), "float32", sharding=jax.sharding.SingleDeviceSharding(device))  # 32 TiB
    try:
        jax.jit(lambda x: x + 1).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        if exceeded := _exceeded(str(error)):
            return exceeded.available
        raise
    raise RuntimeError(f"the compiler for {device.device_kind} gives 32 TiB to a program")


def _exceeded(message: str) -> MemoryExceededError | None:
    match = _TOO_LARGE.search(message)
    if match is None:
        return None
    needed, available = (
        int(float(number) * _UNITS[unit]) for number, unit in (match.groups()[:2], match.groups()[2:])
    )
    return MemoryExceededError(needed, available)
