"""What people see: colours on a terminal, plain text anywhere else."""

from __future__ import annotations

import sys
from functools import cache

from rich.console import Console


@cache
def console() -> Console:
    """Standard output."""
    return Console(highlight=False, soft_wrap=True, markup=False)


def show(text: str, style: str | None = None) -> None:
    """Text to standard output, at once and byte for byte where it is not a terminal."""
    if not text:
        return
    if style is not None and sys.stdout.isatty():
        console().print(text, style=style, end="")
    else:
        sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str, end: str = "\n") -> None:
    """A remark for whoever sits there, on standard error and only on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\x1b[2m{text}\x1b[0m\x1b[K{end}")
        sys.stderr.flush()
