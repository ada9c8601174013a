"""What a subcommand is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxserve.cli.options import Option, options_of

T = TypeVar("T")


@dataclass(frozen=True)
class Values:
    """The values given to a command; `make` builds one of its dataclasses from them."""

    given: Mapping[str, Any]
    debug: bool = False

    def make(self, cls: type[T], **fixed: Any) -> T:
        names = {option.name for option in options_of(cls)} | {"model"}
        fields = getattr(cls, "__dataclass_fields__", {})
        return cls(
            **{k: v for k, v in self.given.items() if k in names and k in fields and k not in fixed}, **fixed
        )


@dataclass(frozen=True)
class Command:
    """A subcommand: its name, its help, the dataclasses whose fields are its flags, and what it does.

    `run` returns the exit code. A positional MODEL is taken where `takes_model`.
    """

    name: str
    help: str
    examples: str
    run: Callable[[Values], int]
    groups: Callable[[], Mapping[str, type]] = field(default=lambda: {})
    takes_model: bool = True

    def options(self) -> dict[str, dict[str, Option]]:
        """By group title, then by name. The first group that has a name keeps it."""
        groups: dict[str, dict[str, Option]] = {}
        seen: set[str] = set()
        for title, cls in self.groups().items():
            mine = {option.name: option for option in options_of(cls, skip=seen)}
            seen |= mine.keys()
            groups[title] = mine
        return groups
