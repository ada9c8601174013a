"""JSON objects from disk, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve_checkpoints.errors import CheckpointError


def parse_json(text: bytes, path: Path, what: str = "file") -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises CheckpointError naming `path`."""
    parsed = _parse(text, path, what)
    if not isinstance(parsed, dict):
        raise CheckpointError(f"the {what} is not a JSON object", file=path)
    return parsed


def _parse(text: bytes, path: Path, what: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CheckpointError(f"appears twice in the {what}", file=path, item=key)
            result[key] = value
        return result

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the {what} is not JSON: {error}", file=path) from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises CheckpointError when it is missing, unreadable or not an object."""
    return parse_json(_read(path), path)


def read_json_list(path: Path) -> list[Any]:
    """The list in `path`. Raises CheckpointError when it is missing, unreadable or not a list."""
    parsed = _parse(_read(path), path, "file")
    if not isinstance(parsed, list):
        raise CheckpointError("the file is not a JSON list", file=path)
    return parsed


def read_optional_json(path: Path) -> dict[str, Any]:
    """The object in `path`, {} when there is no such file."""
    return read_json(path) if path.is_file() else {}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(error.strerror or str(error), file=path) from None
