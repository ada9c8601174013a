"""`jaxserve doctor`: what this machine has, and whether the engine computes right on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterator

from jaxserve.cli.command import Command, Values
from jaxserve.cli.terminal import console

_PACKAGES = ("jaxserve", "jax", "jaxlib", "flax", "numpy", "tokenizers", "gguf", "safetensors", "aiohttp")
_PROMPTS = ([1, 2, 3, 4, 5], [200, 100, 50], list(range(40)))
_NUM_TOKENS = 12


def run(values: Values) -> int:
    """Print the report; exit code 1 where the self-test fails."""
    out = console()
    out.print("versions", style="bold")
    out.print(f"  python {platform.python_version()} on {platform.platform()}")
    for package in _PACKAGES:
        out.print(f"  {package} {_version(package)}")
    out.print("devices", style="bold")
    import jax

    out.print(f"  host: {os.cpu_count()} cores{_memory()}")
    for device in jax.devices():
        out.print(f"  {device.platform}:{device.id} {device.device_kind}{_device_memory(device)}")
    if jax.default_backend() == "cpu":
        from jaxserve.loading import cache_directory
        from pallas_kernels import native

        out.print(f"  {native.find(cache_directory() / 'native')[1]}")
    out.print("environment", style="bold")
    variables = [name for name in sorted(os.environ) if name.startswith(("JAXSERVE_", "JAX_", "XLA_"))]
    for name in variables:
        out.print(f"  {name}={'(set)' if 'KEY' in name else os.environ[name]}")
    if not variables:
        out.print("  no JAXSERVE_, JAX_ or XLA_ variable is set")
    out.print("self-test", style="bold")
    start = time.monotonic()
    problems = list(_problems())
    for problem in problems:
        out.print(f"  {problem}")
    seconds = time.monotonic() - start
    if problems:
        out.print(f"FAILED: the engine does not compute right here ({seconds:.0f} s)", style="bold red")
        return 1
    out.print(f"  {len(_PROMPTS)} prompts, {_NUM_TOKENS} greedy tokens each: all as computed by numpy")
    out.print(f"OK: the engine works on this machine ({seconds:.0f} s)", style="bold green")
    return 0


def _problems() -> Iterator[str]:
    """What is wrong with the engine's answers, a line each."""
    from jaxserve.cli import self_test
    from jaxserve.llm import LLM
    from jaxserve.sampling_params import SamplingParams

    weights = self_test.random_weights()
    params = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [list(prompt) for prompt in _PROMPTS]
    with LLM(
        model=weights,
        config=self_test.CONFIG,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        page_size=16,
    ) as llm:
        outputs = llm.generate(prompts, params, progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = self_test.greedy(weights, prompt, _NUM_TOKENS)
        found = list(output.outputs[0].token_ids)
        if found != expected:
            yield f"prompt of {len(prompt)} tokens: numpy says {expected}, the engine {found}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _memory() -> str:
    if sys.platform != "linux":
        return ""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f", {gib:.1f} GiB memory"


def _device_memory(device: object) -> str:
    stats = getattr(device, "memory_stats", lambda: None)()
    limit = (stats or {}).get("bytes_limit")
    return f", {limit / 2**30:.1f} GiB" if limit else ""


COMMAND = Command(
    name="doctor",
    help="devices, versions, settings, and a self-test of the engine in under a minute",
    examples="  jaxserve doctor",
    run=run,
    takes_model=False,
)
