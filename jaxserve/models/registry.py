"""The families and the formats they are read from: what `jaxserve models` prints and the loader obeys."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.models import gemma3, llama, llama_gguf, qwen3
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.names import Path, decoder_names, ignored_tensor

if TYPE_CHECKING:
    import numpy as np

    from jaxserve_checkpoints import Checkpoint


@dataclass(frozen=True)
class GgufNames:
    """How a family is read from GGUF files."""

    config: Callable[[Mapping[str, Any], Mapping[str, Any]], ModelConfig]
    name: Callable[[str], str]  # from the Hugging Face name
    value: Callable[[str, np.ndarray, ModelConfig], np.ndarray]  # as Hugging Face files order it
    rope_factors: str | None  # a tensor that divides the frequencies


@dataclass(frozen=True)
class Family:
    """A model family: its module, how its configs are read, and its name table."""

    name: str
    architectures: tuple[str, ...]  # of config.json
    module: type[Decoder]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    name_table: Callable[[ModelConfig], dict[Path, str]] = decoder_names
    ignored_tensor: Callable[[str, ModelConfig], bool] = ignored_tensor
    gguf_architectures: tuple[str, ...] = ()  # of general.architecture
    gguf: GgufNames | None = None


FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        module=llama.LlamaForCausalLM,
        config_from_hf=llama.config_from_hf,
        gguf_architectures=("llama",),
        gguf=GgufNames(
            config=llama_gguf.config_from_gguf,
            name=llama_gguf.gguf_name,
            value=llama_gguf.from_gguf,
            rope_factors=llama_gguf.GGUF_ROPE_FACTORS,
        ),
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        module=qwen3.Qwen3ForCausalLM,
        config_from_hf=qwen3.config_from_hf,
    ),
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        module=qwen3.Qwen3ForCausalLM,
        config_from_hf=qwen3.moe_config_from_hf,
    ),
    Family(
        name="gemma3_text",
        architectures=("Gemma3ForCausalLM",),
        module=gemma3.Gemma3ForCausalLM,
        config_from_hf=gemma3.config_from_hf,
        name_table=gemma3.name_table,
    ),
    Family(
        name="gemma3",
        architectures=("Gemma3ForConditionalGeneration",),
        module=gemma3.Gemma3ForCausalLM,
        config_from_hf=gemma3.conditional_config_from_hf,
        name_table=gemma3.conditional_name_table,
        ignored_tensor=gemma3.conditional_ignored_tensor,
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
    # Embedding models are saved from the class without an output matrix.
    is_base = architecture.endswith("Model")
    whole = f"{architecture.removesuffix('Model')}ForCausalLM" if is_base else architecture
    for family in FAMILIES:
        if whole in family.architectures or architecture == family.name:
            return family
    raise _unknown(architecture, [a for f in FAMILIES for a in f.architectures])


def read_model(checkpoint: Checkpoint) -> tuple[Family, ModelConfig]:
    """The family a checkpoint belongs to and its config.

    Raises UnsupportedModelError for an unknown architecture, with the nearest known names.
    """
    if checkpoint.config is None:
        architecture = str(checkpoint.metadata.get("general.architecture", ""))
        for family in FAMILIES:
            if family.gguf is not None and architecture in family.gguf_architectures:
                return family, family.gguf.config(checkpoint.metadata, checkpoint.tensors)
        raise _unknown(architecture, [a for f in FAMILIES for a in f.gguf_architectures])
    family = family_of(checkpoint.config)
    return family, family.config_from_hf(checkpoint.config)


def _unknown(name: str, known: list[str]) -> UnsupportedModelError:
    # GGUF names some architectures without the underscore that config.json has, as in qwen3moe.
    if any(name == f.name.replace("_", "") or name == f.name for f in FAMILIES):
        return UnsupportedModelError(
            f"architecture {name!r} is not read from GGUF files, only from safetensors"
        )
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return UnsupportedModelError(f"architecture {name!r} is not supported; nearest known: {', '.join(near)}")
