"""`EngineArgs`: every setting of an engine. The command line makes its flags from these fields."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxserve.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"


def _arg(
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    metavar: str | None = None,  # what the help calls the value; N for an integer, else the name's last word
) -> Any:
    about = {"help": help_text, "choices": choices, "aliases": aliases, "metavar": metavar}
    return field(default=default, metadata=about)


@dataclass
class EngineArgs:
    """Settings of an engine; None means chosen from the model and the machine, and printed at start.

    Raises ConfigError, which names the argument, for a value that cannot work.
    """

    model: str = _arg(DEFAULT_MODEL, "path, org/name, hf:org/name, or a built-in short name")
    revision: str | None = _arg(None, "revision on the Hugging Face hub")
    tokenizer: str | None = _arg(
        None, "tokenizer of another model: a path or a model reference", metavar="MODEL"
    )
    chat_template: str | None = _arg(
        None, "file with a Jinja chat template, in place of the model's own", metavar="FILE"
    )
    generation_config: str = _arg(
        "auto",
        "where default sampling parameters come from: auto (the model), none, or a directory",
        metavar="{auto,none,DIR}",
    )
    max_model_len: int | None = _arg(None, "tokens of one request, prompt and output")
    max_num_seqs: int | None = _arg(None, "requests that run at once (32 on a CPU, else 256)")
    max_num_batched_tokens: int | None = _arg(None, "tokens computed in one step (512 on a CPU, else 2048)")
    page_size: int | None = _arg(None, "tokens of one KV page", aliases=("block_size",))
    num_pages: int | None = _arg(
        None, "pages of the KV pool, in place of a memory budget; what cannot be used is left out"
    )
    kv_cache_memory: int | None = _arg(None, "bytes of the KV pool", metavar="BYTES")
    memory_utilization: float | None = _arg(
        None,
        "share of the device's memory for weights and KV pool (0.9); on a CPU for the pool alone (0.05)",
        aliases=("gpu_memory_utilization",),
        metavar="FRACTION",
    )
    tensor_parallel_size: int = _arg(1, "devices that one copy of the model is split over")
    dtype: str = _arg(
        "auto",
        "weights and activations: auto is float32 on a CPU, else bfloat16",
        choices=("auto", "float32", "bfloat16"),
    )
    quantization: str = _arg(
        "auto",
        "weights in memory: auto keeps those of 4 or 8 bits packed on one CPU device with native kernels; "
        "none expands them to --dtype, exact; int8 keeps them and quantises the others at load",
        choices=("auto", "none", "int8"),
    )
    kv_cache_dtype: str = _arg(
        "auto",
        "keys and values in the pool: auto is --dtype, or bfloat16 beside packed weights and native kernels; "
        "float8_e4m3fn holds twice the tokens of bfloat16, unscaled",
        choices=("auto", "float32", "bfloat16", "float8_e4m3fn"),
    )
    enable_prefix_caching: bool = _arg(True, "compute a prefix that requests share once")
    pin_prefix: tuple[str, ...] = _arg(
        (),
        "a system prompt that is computed at the start and stays cached: a text, or .json with messages of a "
        "chat; repeatable",
        metavar="FILE",
    )
    enable_chunked_prefill: bool = _arg(True, "let a long prompt take several steps")
    max_token_gap: float = _arg(
        2.5,
        "how much longer prompts may make the steps of running requests, as a ratio; 0: no limit",
        metavar="RATIO",
    )
    scheduling_policy: str = _arg("fcfs", "who is served next", choices=("fcfs", "priority"))
    scheduler_delay: float = _arg(
        0.0, "seconds a new request may be held so that others join its step", metavar="SECONDS"
    )
    max_queue: int | None = _arg(
        None, "requests that may wait beside those that run; one more is refused (default: no limit)"
    )
    max_logprobs: int = _arg(20, "most log-probabilities a request may ask for (0 to 20)")
    seed: int | None = _arg(None, "seed of requests that give none; without it each draws its own")
    platform: str | None = _arg(
        None, "device to use; by default JAX's own choice", choices=("cpu", "gpu", "tpu")
    )
    attention_implementation: str = _arg(
        "auto", "auto, or one of the support table (jaxserve models)", metavar="NAME"
    )
    warmup: str = _arg(
        "lazy",
        "compile before serving: lazy (programs that serve anything; others in the background as they are "
        "needed), full, none",
        choices=("lazy", "full", "none"),
    )
    compilation_cache_dir: str | None = _arg(
        None, "where XLA's compiled programs are kept (default: the cache directory)", metavar="DIR"
    )
    profile: str | None = _arg(
        None, "write a trace of the first steps there, for Perfetto and XProf", metavar="DIR"
    )
    profile_steps: int = _arg(50, "steps that --profile traces")

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "page_size",
            "kv_cache_memory",
        ):
            _check_int(name, getattr(self, name), 1)
        _check_int("num_pages", self.num_pages, 2)
        _check_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        _check_int("max_queue", self.max_queue, 0)
        _check_int("profile_steps", self.profile_steps, 1)
        _check_int("max_logprobs", self.max_logprobs, 0)
        if self.max_logprobs > 20:
            raise ConfigError(f"max_logprobs must be at most 20, got {self.max_logprobs}")
        paths = self.pin_prefix
        if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
            raise ConfigError(f"pin_prefix must be a list of files, got {self.pin_prefix!r}")
        if self.max_token_gap != 0 and not 1.0 < self.max_token_gap < math.inf:
            raise ConfigError(f"max_token_gap must be above 1, or 0 for no limit, got {self.max_token_gap}")
        if self.memory_utilization is not None and not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization must be in (0, 1], got {self.memory_utilization}")
        for spec in fields(self):
            choices, value = spec.metadata["choices"], getattr(self, spec.name)
            if choices and value is not None and value not in choices:
                raise ConfigError(f"{spec.name} must be one of {', '.join(choices)}, got {value!r}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineArgs:
        """From a dict; an unknown key is an error with the nearest name."""
        aliases = {alias: spec.name for spec in fields(cls) for alias in spec.metadata["aliases"]}
        known = {spec.name for spec in fields(cls)}
        chosen = {}
        for key, value in values.items():
            name = aliases.get(key, key)
            if name not in known:
                near = difflib.get_close_matches(key, [*known, *aliases], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown engine argument {key!r}{hint}")
            if name in chosen:
                raise ConfigError(f"engine argument {name!r} is given twice")
            chosen[name] = value
        return cls(**chosen)


def _check_int(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
