"""`jaxserve models`: what can be served, from the tables the code itself obeys."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from jaxserve.cli.command import Command, Values
from jaxserve.cli.terminal import console


def run(values: Values) -> int:
    from jaxserve.models.registry import FAMILIES, GGUF_TENSOR_TYPES, SAFETENSORS_TENSOR_TYPES
    from jaxserve_checkpoints import BUILTIN_MODELS
    from pallas_kernels.support import CHIPS, PLATFORMS, SUPPORT

    names = Table("built-in name", "what it is", title="Models to name", title_justify="left")
    for name, builtin in BUILTIN_MODELS.items():
        names.add_row(name, builtin.description)
    families = Table("family", "config.json", "GGUF", title="Model families", title_justify="left")
    for family in FAMILIES:
        families.add_row(
            family.name, ", ".join(family.architectures), ", ".join(family.gguf_architectures) or "-"
        )
    formats = Table("format", "tensor types", title="Files", title_justify="left")
    formats.add_row("safetensors (Hugging Face directory or one file)", ", ".join(SAFETENSORS_TENSOR_TYPES))
    formats.add_row("GGUF (one file)", ", ".join(GGUF_TENSOR_TYPES))
    kernels = Table("operation", *PLATFORMS, title="Implementations, preferred first", title_justify="left")
    for operation, by_platform in SUPPORT.items():
        cells = [", ".join(_with_chips(n, CHIPS) for n in by_platform.get(p, ())) or "-" for p in PLATFORMS]
        kernels.add_row(operation.replace("_", " "), *cells)
    for table in (names, families, formats, kernels):
        console().print(table)
    console().print("MODEL may also be a path or org/name on the Hugging Face hub.")
    return 0


def _with_chips(name: str, chips: Mapping[str, tuple[str, ...]]) -> str:
    return f"{name} ({', '.join(chips[name])})" if name in chips else name


COMMAND = Command(
    name="models",
    help="list what can be served: built-in names, families, file formats, and what runs where",
    examples="  jaxserve models",
    run=run,
    takes_model=False,
)
