"""Plans an engine for a topology: sizes its pool, compiles its steps for it, and bounds their times.

The engine's own parts do the work (`capacity`, `skeleton`, `step_programs`), for devices that only a compiler
knows. The pool gets what the memory share leaves beside weights, tables, programs and temporaries; it is then
compiled at that size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jaxserve.batch import Bucket
from jaxserve.capacity import (
    choose_attention,
    choose_dtype,
    choose_kv_dtype,
    choose_limits,
    choose_num_seqs,
    make_spec,
    pool_budget,
)
from jaxserve.engine_args import EngineArgs
from jaxserve.errors import ConfigError
from jaxserve.kv_pool import PoolSpec
from jaxserve.limits import SchedulerConfig
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import Family, family_of, read_model
from jaxserve.packing import check_quantization
from jaxserve.plan.bucket import (
    BucketReport,
    MemoryExceededError,
    available_memory,
    compile_bucket,
    shard_bytes,
)
from jaxserve.plan.step_cost import Bound, bound, step_cost, weights_bytes
from jaxserve.sharding import make_mesh, platform_of
from jaxserve.skeleton import ModelSkeleton, build_skeleton
from jaxserve.step_programs import StepPrograms
from jaxserve_checkpoints import open_checkpoint, resolve_model
from pallas_kernels.aot import abstract_devices, parse_topology
from pallas_kernels.chips import Chip

# Called before a bucket is compiled: which of how many.
Progress = Callable[[Bucket, int, int], None]
_SIZING_BYTES = 1 << 29  # of the pool on a device while temporaries are still unknown: none fits on a chip


@dataclass(frozen=True)
class Target:
    """What is compiled for."""

    topology: str
    chip: Chip
    mesh: Mesh
    memory_bytes: int  # of a device, that programs may have

    @classmethod
    def of(cls, topology: str, tensor_parallel_size: int) -> Target:
        """Raises ConfigError for an unknown topology, CompilerMissingError without its compiler."""
        try:
            chip, _ = parse_topology(topology)
        except NotImplementedError as error:
            raise ConfigError(str(error)) from error
        devices = abstract_devices(topology)
        mesh = make_mesh(devices, tensor_parallel_size)
        memory = available_memory(devices[0]) if chip.platform == "tpu" else chip.memory_bytes
        return cls(topology, chip, mesh, memory)


@dataclass(frozen=True)
class StepBound:
    """The least time of one step of so many rows."""

    rows: int
    tokens: int  # new ones, in all rows together
    context: int  # tokens of each row, the new ones included
    bound: Bound

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.bound.seconds


@dataclass(frozen=True)
class Plan:
    """What was found. `missing_bytes`: of each device, by which it does not fit."""

    model: str
    target: Target
    skeleton: ModelSkeleton
    tables_bytes: int
    limits: SchedulerConfig | None
    pool: PoolSpec | None
    pool_bytes: int  # on each device
    reports: tuple[BucketReport, ...]
    missing_bytes: int
    decode: StepBound | None
    prefill: StepBound | None

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @property
    def weights_bytes(self) -> int:
        return weights_bytes(self.skeleton)

    @property
    def temp_bytes(self) -> int:
        return max((report.temp_bytes for report in self.reports), default=0)

    @property
    def pool_copies(self) -> int:
        return max((len(report.pool_copies) for report in self.reports), default=0)

    @property
    def pool_aliased(self) -> bool:
        return all(report.pool_aliased for report in self.reports)

    def collectives(self) -> dict[str, int]:
        """How often the step that has most runs each kind."""
        counts: dict[str, int] = {}
        for report in self.reports:
            for found in report.collectives:
                counts[found.kind] = max(counts.get(found.kind, 0), found.count)
        return counts


def read_config(args: EngineArgs) -> tuple[Family, ModelConfig]:
    """The model's config; a directory with config.json, or that file, is enough."""
    path = Path(args.model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.name.endswith(".json") and file.is_file():
        try:
            raw = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{file}: must be a JSON object")
        family = family_of(raw)
        return family, family.config_from_hf(raw)
    return read_model(open_checkpoint(resolve_model(args.model, args.revision)))


def make_plan(
    args: EngineArgs,
    topology: str,
    *,
    largest_only: bool = False,
    context: int | None = None,
    progress: Progress = lambda bucket, i, n: None,
) -> Plan:
    """Compile what an engine with these arguments would, and say what came out.

    Args:
        args: as `jaxserve serve` takes them; the topology goes before `platform`.
        topology: see `pallas_kernels.aot.parse_topology`.
        largest_only: compile the largest decode and the largest mixed step, not every bucket.
        context: tokens of each running request in the decode bound; half of max_model_len by default, or
            what the pool holds.
        progress: told of each bucket before it is compiled.

    Raises ConfigError for arguments that cannot work, CompilerMissingError without the target's compiler.
    """
    family, config = read_config(args)
    with _without_program_cache():
        target = Target.of(topology, args.tensor_parallel_size)
        return _Planner(args, target, family, config).plan(largest_only, context, progress)


@contextmanager
def _without_program_cache() -> Iterator[None]:
    """A program for a device that is not there can be written to the cache on disk, and not read back."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether it is used is decided once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


class _Planner:
    """The steps of planning one engine; holds what they share."""

    def __init__(self, args: EngineArgs, target: Target, family: Family, config: ModelConfig) -> None:
        self.args, self.target, self.family, self.config = args, target, family, config
        platform = platform_of(target.mesh)
        check_quantization(args.quantization, platform, target.mesh.size)
        self.dtype = choose_dtype(args, platform)
        self.attention = choose_attention(args, platform, target.chip.name)
        self.longest = args.max_model_len or config.max_position_embeddings
        self.skeleton = self._skeleton(self.longest)
        self.weights = weights_bytes(self.skeleton)
        self.split = target.mesh.size if self.skeleton.heads.axis else 1  # devices that share the pool
        self.page_bytes = self._limits(0, num_pages=2)[1].num_bytes // 2  # over all devices

    def plan(self, largest_only: bool, context: int | None, progress: Progress) -> Plan:
        if missing := self._missing(self._budget(0)):
            return self._unfit(missing)
        # Temporaries do not depend on the pool's size, so one step with a small pool tells them.
        pages = max(2, self.split * _SIZING_BYTES // self.page_bytes)
        small = self._limits(0, num_pages=pages, max_model_len=self.longest)
        programs = self._programs(*small)
        buckets = _largest(programs.buckets) if largest_only else sorted(programs.buckets, key=_width)
        progress(buckets[-1], 0, len(buckets) + 1)
        try:
            first = compile_bucket(programs, buckets[-1])
        except MemoryExceededError as error:
            return self._unfit(error.needed - error.available)
        code = first.code_bytes * len(programs.buckets)
        # What a step needs varies by a few MiB with the pool's size and the bucket: an eighth more is kept.
        return self._prove(buckets, _needed(first) * 9 // 8, code, context, progress)

    def _prove(
        self, buckets: list[Bucket], needed: int, code: int, context: int | None, progress: Progress
    ) -> Plan:
        """Compile every bucket with the pool that a step's `needed` bytes and all `code` leave room for."""
        budget = self._budget(needed + code)
        if missing := self._missing(budget):
            return self._unfit(missing)
        limits, pool = self._limits(budget)
        programs = self._programs(limits, pool)
        pool_bytes = shard_bytes(programs.kv_pool)
        tables = shard_bytes(programs.tokens) + shard_bytes(programs.bias)
        reports: list[BucketReport] = []
        missing = 0
        for i, bucket in enumerate(buckets, start=1):
            progress(bucket, i, len(buckets) + 1)
            try:
                report = compile_bucket(programs, bucket)
            except MemoryExceededError as error:
                # The compiler's own figure is rounded to 10 MiB.
                known = self.weights + tables + pool_bytes + needed + code - self.target.memory_bytes
                missing = max(known, error.needed - error.available, 1)
                break
            reports.append(report)
            if _needed(report) > needed:  # a narrower step needs more than the widest
                return self._prove(buckets, _needed(report), code, context, progress)
        if not missing:
            most = max(report.total_bytes - report.code_bytes for report in reports)
            most += sum(report.code_bytes for report in reports)
            missing = max(0, most - self.target.memory_bytes)
        decode, prefill = None, None
        if not missing:
            decode, prefill = self._bounds(limits, pool, reports, context)
        return Plan(
            model=self.args.model,
            target=self.target,
            skeleton=self.skeleton,
            tables_bytes=tables,
            limits=limits,
            pool=pool,
            pool_bytes=pool_bytes,
            reports=tuple(reports),
            missing_bytes=missing,
            decode=decode,
            prefill=prefill,
        )

    def _bounds(
        self, limits: SchedulerConfig, pool: PoolSpec, reports: list[BucketReport], context: int | None
    ) -> tuple[StepBound, StepBound]:
        """The fullest decode step, and a first chunk of one prompt that fills a step."""

        def step(rows: int, tokens: int, context: int, link_bytes: float) -> StepBound:
            cost = step_cost(self.skeleton, pool, [tokens] * rows, [context] * rows)
            return StepBound(rows, rows * tokens, context, bound(cost, link_bytes, self.target.chip))

        rows = min(limits.max_num_seqs, pool.num_tokens)
        wanted = limits.max_model_len // 2 if context is None else context
        held = max(1, min(wanted, pool.num_tokens // rows, limits.max_model_len))
        widest = max((r for r in reports if r.bucket.decode_only), key=lambda r: _width(r.bucket))
        decode = step(rows, 1, held, widest.link_bytes)
        chunk = min(limits.max_num_batched_tokens, limits.max_model_len, pool.num_tokens)
        mixed = [r for r in reports if not r.bucket.decode_only]
        longest = max(r.bucket.num_tokens for r in mixed)
        links = min(r.link_bytes for r in mixed if r.bucket.num_tokens == longest)
        return decode, step(1, chunk, chunk, links)

    def _unfit(self, missing: int) -> Plan:
        """Without a pool: there is no room for one."""
        slots = choose_num_seqs(self.args, platform_of(self.target.mesh)) + 1
        tables = 4 * slots * (self.longest + self.config.vocab_size)
        return Plan(
            self.args.model,
            self.target,
            self.skeleton,
            tables,
            limits=None,
            pool=None,
            pool_bytes=0,
            reports=(),
            missing_bytes=missing,
            decode=None,
            prefill=None,
        )

    def _missing(self, budget: int) -> int:
        """Bytes of each device that the smallest pool lacks; a given one is left to the compiler."""
        if self.args.num_pages is not None or self.args.kv_cache_memory is not None:
            return 0
        return max(0, -(-(2 * self.page_bytes - budget) // self.split))

    def _budget(self, reserve: int) -> int:
        """Bytes of the pool over all devices, `reserve` left free on each beside weights and tables."""
        if self.args.kv_cache_memory is not None:
            return self.args.kv_cache_memory
        taken = self.weights + reserve
        return pool_budget(self.args, self.config, self.target.mesh, self.target.memory_bytes, taken)

    def _limits(self, budget: int, **changes: Any) -> tuple[SchedulerConfig, PoolSpec]:
        kv_dtype = choose_kv_dtype(self.args, self.dtype)
        return choose_limits(replace(self.args, **changes), self.config, kv_dtype, self.target.mesh, budget)

    def _skeleton(self, max_model_len: int) -> ModelSkeleton:
        return build_skeleton(self.family, self.config, self.dtype, self.target.mesh, max_model_len)

    def _programs(self, limits: SchedulerConfig, pool: PoolSpec) -> StepPrograms:
        spec = make_spec(self.skeleton, self.target.mesh, self.target.chip.name, self.attention)
        return StepPrograms(spec, self.skeleton, pool, limits)


def _needed(report: BucketReport) -> int:
    """Bytes of a device while it runs, beside the arguments and the other programs."""
    return report.temp_bytes + report.output_bytes


def _width(bucket: Bucket) -> tuple[int, int, bool]:
    return bucket.num_tokens, bucket.num_rows, not bucket.decode_only


def _largest(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The widest decode and the widest mixed one."""
    kinds = ([b for b in buckets if b.decode_only is decode_only] for decode_only in (True, False))
    return sorted((max(kind, key=_width) for kind in kinds), key=_width)
