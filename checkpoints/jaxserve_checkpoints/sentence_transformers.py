"""The files that sentence-transformers puts beside a model's weights: which modules make an embedding.

`modules.json` lists them in order; each may have a directory with a config.json. A type is a Python name,
of which only the last part is read; nothing is ever imported by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from jaxserve_checkpoints.errors import CheckpointError
from jaxserve_checkpoints.json_files import read_json_list, read_optional_json

MODULES = "modules.json"


@dataclass(frozen=True)
class EncoderModule:
    """One module: its class (`Transformer`, `Pooling`, `Normalize`, ...) and its configuration."""

    kind: str
    file: Path  # where `config` is read from
    config: dict[str, Any]  # {} when there is no such file


def read_modules(directory: Path) -> tuple[EncoderModule, ...] | None:
    """The modules in order, None when there is no list of them. Raises CheckpointError."""
    path = directory / MODULES
    if not path.is_file():
        return None
    return tuple(_module(directory, entry, i) for i, entry in enumerate(read_json_list(path)))


def _module(directory: Path, entry: Any, index: int) -> EncoderModule:
    listing, item = directory / MODULES, f"entry {index}"
    if not isinstance(entry, dict):
        raise CheckpointError("is not an object", file=listing, item=item)
    kind, place = entry.get("type"), entry.get("path", "")
    if not isinstance(kind, str) or not kind:
        raise CheckpointError("has no type", file=listing, item=item)
    if not isinstance(place, str) or not place.isprintable() or not _is_inside(place):
        raise CheckpointError("its path is not one inside this directory", file=listing, item=item)
    file = directory / place / "config.json"
    # A module without a directory of its own shares the model's, whose config.json is the model's.
    return EncoderModule(kind.rsplit(".", 1)[-1], file, read_optional_json(file) if place else {})


def _is_inside(place: str) -> bool:
    path = PurePosixPath(place)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in place and ":" not in place
