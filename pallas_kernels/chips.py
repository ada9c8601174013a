"""The accelerators we compile for, with the figures of their data sheets: what a bound on time is made of.

A `Chip` is one device as JAX counts them. A TPU7x chip is two devices, so its figures here are half of the
chip's. Sources: the vendors' public data sheets (Google Cloud TPU system architecture pages; NVIDIA H100 and
H200 SXM data sheets, dense rates).
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Chip:
    """Per device: bytes, bytes/s, and operations/s (a multiply-add is two)."""

    name: str
    platform: str  # "tpu" or "gpu"
    memory_bytes: int
    memory_bandwidth: float  # bytes/s
    flops_bf16: float
    ops_8bit: float  # int8, or fp8 where the chip has no int8 rate of its own
    scratch_bytes: int  # VMEM of a TPU core, shared memory of a streaming multiprocessor
    link_bandwidth: float  # bytes/s out of a device to its peers, all links together
    num_cores: int = 1  # TensorCores of a device, or streaming multiprocessors


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", 16 * GIB, 819e9, 197e12, 394e12, 128 * MIB, 200e9),
        Chip("v5p", "tpu", 95 * GIB, 2765e9, 459e12, 918e12, 64 * MIB, 600e9, 2),
        Chip("v6e", "tpu", 32 * GIB, 1640e9, 918e12, 1836e12, 128 * MIB, 400e9),
        Chip("tpu7x", "tpu", 96 * GIB, 3690e9, 1153.5e12, 2307e12, 64 * MIB, 600e9),
        Chip("h100", "gpu", 80 * 10**9, 3350e9, 989e12, 1979e12, 227 * 1024, 450e9, 132),
        Chip("h200", "gpu", 141 * 10**9, 4800e9, 989e12, 1979e12, 227 * 1024, 450e9, 132),
    )
}


def chip_by_name(name: str) -> Chip:
    """Raises NotImplementedError for a chip we have no figures of."""
    if name not in CHIPS:
        raise NotImplementedError(f"chip {name!r} is not known (have: {', '.join(CHIPS)})")
    return CHIPS[name]


def chip_of_device_kind(device_kind: str) -> str | None:
    """The name here of what `jax.Device.device_kind` says; None for one without an entry."""
    kind = device_kind.lower()
    for mark, name in (
        ("v5 lite", "v5e"),
        ("v5e", "v5e"),
        ("v5p", "v5p"),
        ("v5", "v5p"),
        ("v6 lite", "v6e"),
        ("v6e", "v6e"),
        ("7x", "tpu7x"),
        ("h200", "h200"),
        ("h100", "h100"),
    ):
        if mark in kind:
            return name
    return None
