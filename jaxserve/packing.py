"""Which matrices stay at 4 or 8 bits in memory: what `--quantization` comes to for a model on a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import PackedForm
from jaxserve.models.names import Path
from jaxserve.models.registry import Family
from jaxserve_checkpoints import Checkpoint, TensorRef

INT8 = PackedForm(bits=8, has_mins=False)  # what floats are quantised to
_GROUP = 32  # inputs of one scale


@dataclass(frozen=True)
class Packing:
    """The packed matrices of a model, by their path without a layer's number."""

    forms: Mapping[Path, PackedForm]
    chip: str | None  # the CPU's instruction set; None: without native kernels

    @property
    def bits(self) -> str:
        """ "4", "8" or "4/8" """
        return "/".join(str(bits) for bits in sorted({form.bits for form in self.forms.values()}))


@dataclass(frozen=True)
class Machine:
    """What decides whether packed weights are served."""

    platform: str
    num_devices: int
    chip: str | None  # of a CPU its instruction set, where native kernels can be used
    native: str  # why they can, or cannot


def check_quantization(quantization: str, platform: str, num_devices: int) -> None:
    """Raise ConfigError where int8 is not supported."""
    if quantization == "int8" and (platform != "cpu" or num_devices > 1):
        raise ConfigError(
            f"quantization: int8 is supported on one CPU device, not on {platform} x {num_devices} "
            "(have: auto, none)"
        )


def choose_packing(
    quantization: str,  # as in EngineArgs
    machine: Machine,
    family: Family,
    config: ModelConfig,
    checkpoint: Checkpoint | None,  # None: live weights
    dtype: str,
) -> tuple[Packing | None, list[str]]:
    """The packing, None where all weights are floats; and lines that say what runs and why.

    Reads headers only. Raises ConfigError where int8 is not supported.
    """
    exact = f"mode: exact {dtype}"
    if quantization == "none":
        return None, [exact]
    check_quantization(quantization, machine.platform, machine.num_devices)
    on_one_cpu = machine.platform == "cpu" and machine.num_devices == 1
    tensors = _tensors(family, config, checkpoint)
    if quantization == "auto" and not any(ref.packing for refs in tensors.values() for ref in refs):
        return None, [exact]
    if quantization == "auto" and not (on_one_cpu and machine.chip):
        reason = machine.native if on_one_cpu else "they stay packed on one CPU device alone"
        return None, [f"{exact}: packed weights are expanded ({reason})"]

    forms: dict[Path, PackedForm] = {}
    floats: list[str] = []
    for path, refs in tensors.items():
        form = _form(refs, quantization)
        if form is None or _in_size(path, config) % _GROUP:
            floats.append(str(path[-2]))
        else:
            forms[path] = form
    if config.num_experts:
        floats.append("experts")
    packing = Packing(forms, machine.chip)
    if not forms:
        return None, [f"{exact}: no matrix can be packed"]
    how = machine.chip or f"without native kernels, slow: {machine.native}"
    lines = [
        f"mode: packed {packing.bits}-bit weights, 8-bit activations ({how}); "
        f"--quantization none for exact {dtype}"
    ]
    if floats:
        lines.append(f"kept in {dtype}, for their format or their width: {', '.join(floats)}")
    return packing, lines


def _tensors(
    family: Family, config: ModelConfig, checkpoint: Checkpoint | None
) -> dict[Path, list[TensorRef]]:
    """Of each matrix that may be packed, those of all layers; of live weights none are known."""
    gguf = family.gguf if checkpoint is not None and checkpoint.format == "gguf" else None
    found: dict[Path, list[TensorRef]] = {}
    for path, name in family.name_table(config).items():
        if path[-1] != "weight" or not _in_size(path, config):
            continue
        refs = found.setdefault((path[0], *path[2:]) if path[0] == "layers" else path, [])
        in_file = gguf.name(name) if gguf is not None else name
        if checkpoint is not None and in_file in checkpoint.tensors:  # a missing one is told of later
            refs.append(checkpoint.tensors[in_file])
    return found


def _form(refs: Sequence[TensorRef], quantization: str) -> PackedForm | None:
    """What one matrix of all layers is kept as; None: floats."""
    layouts = [ref.packing for ref in refs if ref.packing is not None]
    # Q4_0 beside Q4_1, as files made with an importance matrix have it: the first has mins of -8 scales.
    if layouts and len(layouts) == len(refs) and len({layout.bits for layout in layouts}) == 1:
        return PackedForm(layouts[0].bits, any(layout.has_mins for layout in layouts))
    return INT8 if quantization == "int8" else None


def _in_size(path: Path, config: ModelConfig) -> int:
    """Inputs of the matrix at a path; 0 for what is never packed: norms, experts and their router."""
    return {
        **dict.fromkeys(
            ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
            config.hidden_size,
        ),
        "o_proj": config.num_heads * config.head_dim,
        "down_proj": config.intermediate_size,
    }.get(str(path[-2]), 0)
