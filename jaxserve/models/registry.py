"""The families and the formats they are read from: what `jaxserve models` prints and the loader obeys."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.models import llama
from jaxserve.models.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np

    from jaxserve_checkpoints import Checkpoint


@dataclass(frozen=True)
class Family:
    """A model family: its module, how its configs are read, and its name table."""

    name: str
    architectures: tuple[str, ...]  # of config.json
    gguf_architectures: tuple[str, ...]  # of general.architecture
    module: type[llama.LlamaForCausalLM]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_from_gguf: Callable[[Mapping[str, Any], Mapping[str, Any]], ModelConfig]
    name_table: Callable[[ModelConfig], dict[tuple[str | int, ...], str]]
    ignored_tensor: Callable[[str, ModelConfig], bool]
    gguf_name: Callable[[str], str]
    from_gguf: Callable[[str, np.ndarray, ModelConfig], np.ndarray]
    gguf_rope_factors: str | None


FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        gguf_architectures=("llama",),
        module=llama.LlamaForCausalLM,
        config_from_hf=llama.config_from_hf,
        config_from_gguf=llama.config_from_gguf,
        name_table=llama.name_table,
        ignored_tensor=llama.ignored_tensor,
        gguf_name=llama.gguf_name,
        from_gguf=llama.from_gguf,
        gguf_rope_factors=llama.GGUF_ROPE_FACTORS,
    ),
)

GGUF_TENSOR_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS",
)  # fmt: skip
SAFETENSORS_TENSOR_TYPES = ("F32", "F16", "BF16")


def family_by_name(name: str) -> Family:
    for family in FAMILIES:
        if family.name == name:
            return family
    raise _unknown(name, [f.name for f in FAMILIES])


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a config.json names. Raises UnsupportedModelError, with the nearest known names."""
    names = config.get("architectures") or []
    architecture = names[0] if isinstance(names, list) and names else str(config.get("model_type", ""))
    for family in FAMILIES:
        if architecture in family.architectures or architecture == family.name:
            return family
    raise _unknown(architecture, [a for f in FAMILIES for a in f.architectures])


def read_model(checkpoint: Checkpoint) -> tuple[Family, ModelConfig]:
    """The family a checkpoint belongs to and its config.

    Raises UnsupportedModelError for an unknown architecture, with the nearest known names.
    """
    if checkpoint.config is None:
        architecture = str(checkpoint.metadata.get("general.architecture", ""))
        for family in FAMILIES:
            if architecture in family.gguf_architectures:
                return family, family.config_from_gguf(checkpoint.metadata, checkpoint.tensors)
        raise _unknown(architecture, [a for f in FAMILIES for a in f.gguf_architectures])
    family = family_of(checkpoint.config)
    return family, family.config_from_hf(checkpoint.config)


def _unknown(name: str, known: list[str]) -> UnsupportedModelError:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return UnsupportedModelError(f"architecture {name!r} is not supported; nearest known: {', '.join(near)}")
