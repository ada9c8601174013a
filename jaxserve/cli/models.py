"""`jaxserve models`: what can be served, from the tables the code itself obeys."""

from __future__ import annotations

from rich.table import Table

from jaxserve.cli.command import Command, Values
from jaxserve.cli.terminal import console


def run(values: Values) -> int:
    from jaxserve.models.registry import FAMILIES, GGUF_TENSOR_TYPES, SAFETENSORS_TENSOR_TYPES
    from jaxserve_checkpoints import BUILTIN_MODELS

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
    for table in (names, families, formats):
        console().print(table)
    console().print("MODEL may also be a path or org/name on the Hugging Face hub.")
    return 0


COMMAND = Command(
    name="models",
    help="list what can be served: built-in names, families, file formats",
    examples="  jaxserve models",
    run=run,
    takes_model=False,
)
