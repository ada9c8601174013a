"""Builds an engine from `EngineArgs`: checkpoint, weights, pool, programs, each with a line that says so."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.capacity import (
    choose_attention,
    choose_dtype,
    choose_kv_dtype,
    choose_limits,
    choose_utilization,
    make_spec,
    pool_budget,
)
from jaxserve.chat_template import load_chat_template
from jaxserve.compilation import use_compilation_cache
from jaxserve.engine import EngineConfig, LLMEngine
from jaxserve.engine_args import EngineArgs
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.model_runner import ModelRunner
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import Family, family_by_name, family_of, read_model
from jaxserve.pacing import StepPacer
from jaxserve.packing import Machine, choose_packing
from jaxserve.pinning import check_prefixes, describe_prefixes, read_prefixes
from jaxserve.pooling import Pooling, pooling_of
from jaxserve.profiling import StepProfiler
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Scheduler
from jaxserve.sharding import make_mesh, platform_of
from jaxserve.step import Weights
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights import ModelSkeleton, build_skeleton, check_tensors, load_weights, weights_from
from jaxserve_checkpoints import Checkpoint, open_checkpoint, resolve_model
from pallas_kernels import native
from pallas_kernels.chips import chip_of_device_kind

log = logging.getLogger("jaxserve")
Report = Callable[[str], None]

# Keys of generation_config.json that are sampling parameters.
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Live:
    """A model that is in memory already, in place of a checkpoint."""

    model: Any  # nnx.Module, nnx.State, or {Hugging Face tensor name: array}
    config: ModelConfig | Mapping[str, Any]  # or the dict of a config.json
    tokenizer: Tokenizer | None


def cache_directory() -> Path:
    return Path(os.environ.get("JAXSERVE_CACHE") or Path.home() / ".cache" / "jaxserve")


def load_engine(args: EngineArgs, live: Live | None = None, report: Report = log.info) -> LLMEngine:
    """An engine that is ready to serve.

    Raises ConfigError for arguments that cannot work, CheckpointError for files that cannot be used.
    """
    started = time.perf_counter()
    profiler = StepProfiler(Path(args.profile), args.profile_steps, report) if args.profile else None
    devices = _devices(args.platform)
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(devices[0].platform, devices[0].platform)
    cache = Path(args.compilation_cache_dir) if args.compilation_cache_dir else cache_directory() / "xla"
    use_compilation_cache(cache)

    with ThreadPoolExecutor(1, thread_name_prefix="native") as beside:  # a first start compiles there
        machine = beside.submit(_machine, devices[0], platform, args.tensor_parallel_size)
        checkpoint = None
        if live is None:
            checkpoint = open_checkpoint(resolve_model(args.model, args.revision))
            family, config = read_model(checkpoint)
        else:
            family, config = _live_config(live)
        dtype = choose_dtype(args, platform)
        mesh = make_mesh(devices, args.tensor_parallel_size)
        tokenizer = _tokenizer(args, live, checkpoint)
        prefixes = read_prefixes(args.pin_prefix, tokenizer)
        num_pinned = sum(len(prefix.token_ids) for prefix in prefixes)
    chip = machine.result().chip
    implementation = choose_attention(args, platform, chip)
    packing, lines = choose_packing(
        args.quantization, machine.result(), family, config, checkpoint, str(dtype)
    )
    for line in lines:
        report(line)
    kv_dtype = choose_kv_dtype(args, dtype, is_packed=packing is not None and chip is not None)
    limits, pool = choose_limits(args, config, kv_dtype, mesh, _budget(args, config, dtype, mesh), num_pinned)
    check_prefixes(prefixes, limits)
    skeleton = build_skeleton(family, config, dtype, mesh, limits.max_model_len, packing=packing)

    name = args.model if live is None else "live"
    has_own_size = args.num_pages is not None or args.kv_cache_memory is not None
    engine_config = EngineConfig(
        model_name=name,
        model=config,
        max_model_len=limits.max_model_len,
        max_logprobs=args.max_logprobs,
        default_sampling_params=_default_sampling(args, checkpoint),
        eos_token_ids=_eos(args, config, tokenizer, checkpoint),
        seed=args.seed,
        kv_cache_dtype=str(pool.dtype),
        memory_utilization=None if has_own_size else choose_utilization(args, platform),
        pooling=Pooling() if checkpoint is None else pooling_of(checkpoint),
    )

    spec = make_spec(skeleton, mesh, chip, implementation)
    if checkpoint is not None:
        check_tensors(checkpoint, skeleton)
    runner = ModelRunner(spec, skeleton, pool, limits)
    pacer = None
    if args.max_token_gap:
        pacer = StepPacer(args.max_token_gap, runner.padded_sizes)
    scheduler = Scheduler(limits, name, pacer=pacer)
    try:
        _fill(runner, args, checkpoint, live, report)
    except BaseException:
        runner.close()  # it may be compiling
        raise
    engine = LLMEngine(engine_config, skeleton, runner, scheduler, tokenizer)
    if prefixes:
        try:
            engine.pin_prefixes([prefix.token_ids for prefix in prefixes])
        except BaseException:
            engine.close()
            raise
        report(describe_prefixes(prefixes, limits))
    report(f"ready in {time.perf_counter() - started:.1f} s")
    if profiler is not None:
        engine.profiler = profiler
    return engine


def _fill(
    runner: ModelRunner, args: EngineArgs, checkpoint: Checkpoint | None, live: Live | None, report: Report
) -> None:
    """Read the weights while the first programs compile, then make their first runs."""
    skeleton, pool, limits = runner.skeleton, runner.pool, runner.limits
    started = time.perf_counter()
    runner.begin_warm_up(args.warmup)
    runner.weights = _weights(checkpoint, live, skeleton, report)
    report(
        f"{args.model if live is None else 'live'}: {skeleton.config.num_parameters / 1e6:.1f}M parameters, "
        f"{skeleton.num_bytes / 1e6:,.0f} MB, {skeleton.dtype}, {runner.spec.platform} x "
        f"{runner.spec.mesh.size}, read in {time.perf_counter() - started:.1f} s"
    )
    report(
        f"KV pool: {pool.num_pages - 1} pages of {pool.page_size} tokens = {pool.num_tokens:,} tokens, "
        f"{pool.num_bytes / 1e6:,.0f} MB; context {limits.max_model_len}, "
        f"up to {limits.max_num_seqs} requests at once"
    )
    runner.warm_up(args.warmup, report)
    report(
        f"{runner.num_compilations} programs compiled or read from the cache "
        f"in {runner.programs.seconds:.1f} s"
    )


def _machine(device: jax.Device, platform: str, num_devices: int) -> Machine:
    """Finds, or compiles, the native kernels of a CPU."""
    if platform != "cpu":
        return Machine(platform, num_devices, chip_of_device_kind(device.device_kind), "")
    return Machine(platform, num_devices, *native.find(cache_directory() / "native"))


def _devices(platform: str | None) -> list[jax.Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise ConfigError(f"platform {platform}: {str(error).splitlines()[0]}") from error


def _live_config(live: Live) -> tuple[Family, ModelConfig]:
    if isinstance(live.config, ModelConfig):
        return family_by_name(live.config.family), live.config
    family = family_of(live.config)
    return family, family.config_from_hf(live.config)


def _budget(args: EngineArgs, config: ModelConfig, dtype: np.dtype, mesh: Mesh) -> int:
    """Bytes of the pool over all devices."""
    if args.kv_cache_memory is not None:
        return args.kv_cache_memory
    if platform_of(mesh) == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(total * choose_utilization(args, "cpu"))
    stats = mesh.devices.flat[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError("this device does not tell its memory size: give --kv-cache-memory or --num-pages")
    weights = config.num_parameters * dtype.itemsize // mesh.size
    return pool_budget(args, config, mesh, stats["bytes_limit"], weights)


def _weights(
    checkpoint: Checkpoint | None, live: Live | None, skeleton: ModelSkeleton, report: Report
) -> Weights:
    if live is not None:
        return weights_from(live.model, skeleton)
    assert checkpoint is not None
    shown = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown > 2.0 and shown:
            report(f"loading weights: {done} of {total} tensors")
        if now - shown > 2.0:
            shown = now

    return load_weights(checkpoint, skeleton, progress)


def _tokenizer(args: EngineArgs, live: Live | None, checkpoint: Checkpoint | None) -> Tokenizer | None:
    template = load_chat_template(args.chat_template) if args.chat_template else None
    if live is not None:
        if template is not None:
            raise ConfigError("chat_template: with live weights, give it to the Tokenizer")
        return live.tokenizer
    source = open_checkpoint(resolve_model(args.tokenizer)) if args.tokenizer else checkpoint
    assets = source.tokenizer() if source is not None else None
    if assets is None:
        if template is not None or args.tokenizer:
            raise ConfigError(f"{args.tokenizer or args.model} has no tokenizer")
        return None
    return Tokenizer(assets, template)


def _generation_config(args: EngineArgs, checkpoint: Checkpoint | None) -> Mapping[str, Any]:
    if args.generation_config == "auto":
        return checkpoint.generation_config if checkpoint is not None else {}
    if args.generation_config == "none":
        return {}
    path = Path(args.generation_config) / "generation_config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"generation_config: cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"generation_config: {path} is not a JSON object")
    return values


def _default_sampling(args: EngineArgs, checkpoint: Checkpoint | None) -> dict[str, Any]:
    values = _generation_config(args, checkpoint)
    defaults = {key: values[key] for key in _SAMPLING_KEYS if values.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ConfigError(f"generation_config.json: {error} (--generation-config none ignores it)") from error
    return defaults


def _eos(
    args: EngineArgs, config: ModelConfig, tokenizer: Tokenizer | None, checkpoint: Checkpoint | None
) -> frozenset[int]:
    """generation_config's list goes before the config's, as in transformers; the tokenizer's joins it.

    `generation_config="none"` drops the checkpoint's sampling defaults and keeps its ends of sequence.
    """
    values = _generation_config(args, checkpoint)
    if args.generation_config == "none" and checkpoint is not None:
        values = checkpoint.generation_config
    listed = values.get("eos_token_id")
    ids = listed if isinstance(listed, list) else [listed] if listed is not None else config.eos_token_ids
    if not all(type(i) is int for i in ids):
        raise ConfigError(
            f"generation_config.json: eos_token_id must be a token id or a list of them, got {listed!r}"
        )
    # Some checkpoints write -1 for "none".
    return frozenset(i for i in (*ids, *(tokenizer.eos_token_ids if tokenizer else ())) if i >= 0)
