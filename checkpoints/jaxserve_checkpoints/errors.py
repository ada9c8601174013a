"""What can go wrong with a checkpoint.

    CheckpointError        a file is malformed, incomplete or of a kind that is not read
      SourceError          a model reference cannot be resolved or fetched

Every message is one line that names the file and, where there is one, the tensor or key.
"""

from __future__ import annotations

from pathlib import Path


def one_line(text: object, limit: int = 400) -> str:
    """`text` without control characters or line breaks, cut to `limit` characters.

    Names inside a file are untrusted: they must not forge further lines in a terminal or a log.
    """
    line = "".join(c if c.isprintable() else " " for c in str(text))
    return line if len(line) <= limit else line[: limit - 3] + "..."


class CheckpointError(Exception):
    """A checkpoint that cannot be read; `str()` is one line naming the file and tensor or key."""

    def __init__(self, message: str, *, file: Path | str | None = None, item: str | None = None) -> None:
        where = "" if file is None else f"{one_line(file)}: "
        what = "" if item is None else f"{one_line(item, 120)}: "
        super().__init__(f"{where}{what}{one_line(message)}")


class SourceError(CheckpointError):
    """A model reference that names nothing, or that cannot be fetched."""
