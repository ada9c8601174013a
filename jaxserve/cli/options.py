"""Flags from dataclass fields, and their values from the command line, the environment and a file.

A field `max_model_len: int | None = field(default=None, metadata={"help": ...})` is `--max-model-len`, the
variable `JAXSERVE_MAX_MODEL_LEN` and the key `max-model-len` of `--config FILE.yaml`; precedence in this
order, then the field's default. Metadata: `help`, `choices`, `aliases` (other names, or flags
such as `-p`), `metavar`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ENV_PREFIX = "JAXSERVE_"
# Variables of this prefix that are no flags.
_OTHER_VARIABLES = frozenset({"CACHE"})
# Kubernetes sets these for a service called "jaxserve".
_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT(_.*)?)|PORT_\d+_(TCP|UDP)(_.*)?")
_SHORT_FLAGS = {"tensor_parallel_size": ("-tp",)}
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


class UsageError(Exception):
    """What was asked for makes no sense; exit code 2."""


@dataclass(frozen=True)
class Option:
    """One field as a flag; `read` turns a text into a value."""

    name: str
    help: str
    default: Any
    read: Callable[[str], Any]
    is_switch: bool
    is_repeatable: bool
    choices: tuple[str, ...] | None
    aliases: tuple[str, ...]
    metavar: str | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def add_to(self, parser: argparse._ArgumentGroup) -> None:
        settings: dict[str, Any] = {"dest": self.name, "default": argparse.SUPPRESS, "help": self.described}
        if self.is_switch:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings |= {"type": self._argument, "metavar": self.shown_as}
            if self.is_repeatable:
                settings["action"] = "append"
        parser.add_argument(self.flag, *map(_as_flag, self.aliases), **settings)

    @property
    def shown_as(self) -> str:
        """What the help calls the value."""
        if self.metavar:
            return self.metavar
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return self.name.rpartition("_")[2].upper()

    @property
    def described(self) -> str:
        """The help, with the default."""
        default = "" if self.default in (None, (), "") else f" (default: {self.default})"
        if self.is_switch:
            default = f" (default: {'on' if self.default else 'off'})"
        return (self.help + default).replace("%", "%%")

    def _argument(self, text: str) -> Any:
        try:
            return self.value(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def value(self, text: str) -> Any:
        """One value from text; raises ValueError that says what would be right."""
        if self.choices and text not in self.choices:
            raise ValueError(f"{text!r} is not one of {', '.join(self.choices)}")
        return self.read(text)

    def from_plain(self, plain: Any) -> Any:
        """A value from the environment (text) or a configuration file (text, number, bool, list)."""
        if plain is None:
            return None
        if self.is_repeatable:
            items = plain if isinstance(plain, list) else str(plain).split(",")
            return tuple(self.value(str(item).strip()) for item in items)
        if isinstance(plain, list | dict):
            raise ValueError("a single value is expected")
        return self.value(str(plain))


def _as_flag(alias: str) -> str:
    """`block_size` as `--block-size`; `-p` is a flag already."""
    return alias if alias.startswith("-") else "--" + alias.replace("_", "-")


def options_of(cls: type, skip: Iterable[str] = ()) -> list[Option]:
    """The options of a dataclass's fields; those without `help` are not for the command line."""
    hints = typing.get_type_hints(cls)
    return [
        _option(field, hints[field.name])
        for field in dataclasses.fields(cls)
        if "help" in field.metadata and field.name not in skip
    ]


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    kinds = _kinds(hint)
    choices = field.metadata.get("choices") or _literal_choices(kinds)
    is_repeatable = any(typing.get_origin(kind) in (list, tuple) for kind in kinds)
    is_switch = kinds == [bool]
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return Option(
        name=field.name,
        help=field.metadata["help"],
        default=None if default is dataclasses.MISSING else default,
        read=_read_switch if is_switch else _reader(kinds),
        is_switch=is_switch,
        is_repeatable=is_repeatable,
        choices=tuple(choices) if choices else None,
        aliases=(*field.metadata.get("aliases", ()), *_SHORT_FLAGS.get(field.name, ())),
        metavar=field.metadata.get("metavar") or {int: "N", float: "NUMBER"}.get(kinds[0]),
    )


def _kinds(hint: Any) -> list[Any]:
    """The alternatives of a type, None left out."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [kind for kind in (typing.get_args(hint) if union else (hint,)) if kind is not type(None)]


def _literal_choices(kinds: list[Any]) -> tuple[str, ...]:
    return tuple(
        str(choice)
        for kind in kinds
        if typing.get_origin(kind) is typing.Literal
        for choice in typing.get_args(kind)
    )


def _reader(kinds: list[Any]) -> Callable[[str], Any]:
    numbers = [kind for kind in (int, float) if kind in kinds]
    takes_text = len(numbers) < len(kinds)

    def read(text: str) -> Any:
        for kind in numbers:
            try:
                return kind(text)
            except ValueError:
                continue
        if takes_text:
            return text
        raise ValueError(f"{text!r} is not {'an integer' if numbers == [int] else 'a number'}")

    return read


def _read_switch(text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError(f"{text!r} is not true or false")


def resolve(
    options: Mapping[str, Option],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    config_path: str | None,
    known_elsewhere: Iterable[str] = (),
) -> dict[str, Any]:
    """The values that were given, by option name: flag, else environment, else configuration file.

    Options that nobody gave are absent: the dataclass has their defaults. A name in `known_elsewhere`
    (another command's option) is passed over; any other raises UsageError with the nearest known one.
    """
    named = {alias: option for option in options.values() for alias in option.aliases} | dict(options)
    known = {*named, *known_elsewhere}
    values: dict[str, Any] = {}
    for source, given in (
        (config_path or "", _from_file(config_path) if config_path else {}),
        ("the environment", _from_environment(environment)),
    ):
        seen = set()
        for key, plain in given.items():
            name = key.lower().replace("-", "_")
            if name not in known:
                raise UsageError(f"{source}: unknown key {key!r}{nearest(name, known)}")
            if name in named:
                option = named[name]
                if option.name in seen:
                    raise UsageError(f"{source}: {option.name} is given twice")
                seen.add(option.name)
                try:
                    values[option.name] = option.from_plain(plain)
                except ValueError as error:
                    raise UsageError(f"{source}: {key}: {error}") from None
    for name, option in options.items():
        if name in flags:
            values[name] = tuple(flags[name]) if option.is_repeatable else flags[name]
    return values


def with_flag(message: str, options: Iterable[str]) -> str:
    """An error's message that begins with the name of a setting, as Python has it, with the flag instead."""
    name, rest = re.match(r"([a-z_]*)(.*)", message, re.S).groups()  # type: ignore[union-attr]
    # Other sentences may begin with a word that is a flag's name too.
    is_name = name in options and ("_" in name or rest.startswith((" must ", ":")))
    return _as_flag(name) + rest if is_name else message


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    given = {}
    for variable, text in environment.items():
        name = variable.removeprefix(ENV_PREFIX)
        service_link = _SERVICE_LINK.fullmatch(name) or text.startswith("tcp://")
        if variable.startswith(ENV_PREFIX) and name not in _OTHER_VARIABLES and not service_link:
            given[name] = text
    return given


def _from_file(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        detail = " ".join(str(error).split())
        raise UsageError(f"{path}: cannot be read as YAML: {detail}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a mapping of flags to values")
    return {str(key): value for key, value in content.items()}
