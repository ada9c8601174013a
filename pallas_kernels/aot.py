"""Devices to compile for that nobody has at hand: the vendors' own compilers need none.

`libtpu` compiles for any TPU slice, the CUDA plugin for any NVIDIA GPU that a target description describes
(the `[aot]` extra installs both). What comes back is fit to be compiled for and cannot run anything.

    devices = abstract_devices("v6e:2x4")
    mesh = Mesh(np.array(devices).reshape(1, 8), ("data", "model"))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(f).trace(*avals).lower().compile()
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from pallas_kernels.chips import CHIPS, Chip, chip_by_name

_CUDA_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "NVIDIA {name}"
  runtime_version: "13.0.0" driver_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "NVIDIA {name}"
"""
# What libtpu asks of its environment where there is no TPU. It must be set before libtpu is loaded.
_TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
_TPU_SHAPES = {
    "v5e": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"},
    "v6e": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"},
    "v5p": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"},
    "tpu7x": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"},
}


class CompilerMissingError(RuntimeError):
    """The compiler for a target is not installed, or does not know it."""


def parse_topology(text: str) -> tuple[Chip, str]:
    """ "v6e:2x4", "v6e-8", "h200", "H200:4" -> the chip, and the slice's shape ("2x4") or GPU count ("4").

    Raises NotImplementedError with what is known.
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?:[:-]([0-9]+(?:x[0-9]+)*))?", text.strip().lower())
    name = {"v7x": "tpu7x", "v5litepod": "v5e"}.get(match[1], match[1]) if match else ""
    if match is None or name not in CHIPS:
        raise NotImplementedError(
            f"topology {text!r} is not known: give a chip ({', '.join(CHIPS)}) and a shape or a count, "
            "as in v6e:2x4, v5e-8, h200 or h200:4"
        )
    chip, shape = chip_by_name(name), match[2] or "1"
    if chip.platform == "gpu":
        count = math.prod(int(n) for n in shape.split("x"))
        if not count:
            raise NotImplementedError(f"topology {text!r} has no device")
        return chip, str(count)
    if "x" not in shape:
        shapes = _TPU_SHAPES[name]
        count = int(shape) if match[2] else min(shapes)
        if count not in shapes:
            raise NotImplementedError(
                f"topology {text!r}: {name} comes in {', '.join(map(str, shapes))} chips"
            )
        shape = shapes[count]
    dims = len(next(iter(_TPU_SHAPES[name].values())).split("x"))
    if len(shape.split("x")) != dims:
        raise NotImplementedError(f"topology {text!r}: slices of {name} have {dims} dimensions")
    return chip, shape


def _is_installed(platform: str) -> bool:
    if platform == "tpu":
        return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None
    try:
        return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    except ModuleNotFoundError:
        return False


def abstract_devices(topology: str) -> Sequence[jax.Device]:
    """The devices of a topology (see `parse_topology`), to compile for.

    Raises NotImplementedError for an unknown name, CompilerMissingError where its compiler is missing.
    """
    chip, shape = parse_topology(topology)
    try:
        if chip.platform == "tpu":
            for key, value in _TPU_ENVIRONMENT.items():
                os.environ.setdefault(key, value)
            # One chip is described as the first of the smallest host's.
            layout = "2x2" if shape == "1x1" else shape
            found = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip.name}:{layout}")
        else:
            target = _CUDA_TARGET.format(
                bandwidth=int(chip.memory_bandwidth), memory=chip.memory_bytes, name=chip.name.upper()
            )
            found = topologies.get_topology_desc(
                platform="cuda", topology_name="", topology=f"1x1x{shape}", target_config=target
            )
    except Exception as error:  # the plugin's own, of many kinds
        if _is_installed(chip.platform):
            reason = " ".join(str(error).split())[:200]
            raise NotImplementedError(f"topology {topology!r} cannot be compiled for: {reason}") from error
        package = "libtpu" if chip.platform == "tpu" else "jax-cuda13-plugin and jax-cuda13-pjrt"
        reason = " ".join(str(error).split())[:300]
        raise CompilerMissingError(
            f"cannot compile for {topology}: {package} of this jax's version needed "
            f"(pip install '.[aot]' in a clone): {reason}"
        ) from error
    return found.devices[:1] if shape == "1x1" else found.devices
