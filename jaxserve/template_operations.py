"""What chat templates may do: the filters, tests and methods there are, and how much they take and build.

Only what chat templates use exists. Each works on a text of at most MAX_TEXT characters or on a list or dict
of at most MAX_WEIGHT, so that none takes long by itself; between them, at every item of a loop and at every
call, the clock is looked at.

The weight of a value is about the characters it prints as: a text's length, and `_ELEMENT` for each element
of a list or dict beside the element's own. What is shared counts each time it appears.
"""

from __future__ import annotations

import math
import re
import string
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2.defaults import DEFAULT_FILTERS
from jinja2.exceptions import TemplateRuntimeError
from markupsafe import escape

RENDER_SECONDS = 5.0
MAX_TEXT = 4 * 1024 * 1024  # characters of one text
MAX_WEIGHT = 16 * 1024 * 1024  # of one list or dict
MAX_TOTAL = 192 * 1024 * 1024  # bytes, about, of all values that one rendering builds
_ELEMENT = 64  # bytes, about, that an element takes
_MAX_ELEMENTS = MAX_WEIGHT // _ELEMENT
_MAX_INT_BITS = 4096
_MAX_COMPARISONS = 1 << 26  # of characters, in one call
_MAX_SHORT = 64 * 1024  # characters of what goes through Python code: formats, titles
_MAX_NAME = 4096  # characters of an attribute's path


class TemplateLimitError(TemplateRuntimeError):
    """A rendering took too long, built too much, or used what is not available."""


class _Spent(threading.local):
    """What the rendering on this thread may take and has taken; no limit outside of a rendering."""

    deadline = math.inf  # time.monotonic()
    seconds = math.inf
    total = 0


_spent = _Spent()


@contextmanager
def limited(seconds: float = RENDER_SECONDS) -> Iterator[None]:
    """Bounds the rendering within; TemplateLimitError is raised out of it where it goes over."""
    _spent.deadline, _spent.seconds, _spent.total = time.monotonic() + seconds, seconds, 0
    try:
        yield
    finally:
        _spent.deadline, _spent.total = math.inf, 0


def tick() -> None:
    if time.monotonic() > _spent.deadline:
        raise TemplateLimitError(f"the chat template took longer than {_spent.seconds:g} seconds")


def allow(size: int, most: int = MAX_TEXT) -> None:
    """Raises TemplateLimitError where a value of this size may not be built."""
    if size > most:
        raise TemplateLimitError("the chat template builds a value that is too large")


def _spend(size: int) -> None:
    _spent.total += size
    if _spent.total > MAX_TOTAL:
        raise TemplateLimitError("the chat template builds too many large values")


def built(value: Any, parts_are_new: bool = True) -> Any:
    """`value`, once it is counted."""
    if isinstance(value, str):
        allow(len(value))
        _spend(sys.getsizeof(value))
    elif isinstance(value, list | tuple | dict | int):
        weight = _weigh(value)
        allow(weight, MAX_WEIGHT)
        _spend(weight if parts_are_new or isinstance(value, int) else _ELEMENT * (1 + len(value)))
    return value


def combined(value: Any) -> Any:
    """`value`, once it is counted: made of parts that are there already."""
    return built(value, parts_are_new=False)


def _weigh(value: Any) -> int:
    """See the module's text; each object is looked at once."""
    return _weigh_in(value, {})


def _weigh_in(value: Any, known: dict[int, int]) -> int:
    if isinstance(value, str):
        return _ELEMENT + len(value)
    if isinstance(value, int):
        return _ELEMENT + value.bit_length() // 3
    if not isinstance(value, list | tuple | dict):
        return _ELEMENT
    weight = known.get(id(value))
    if weight is None:
        known[id(value)] = 0
        weight = _ELEMENT + sum(_weigh_in(item, known) for item in value)
        if isinstance(value, dict):
            weight += sum(_weigh_in(item, known) for item in value.values())
        known[id(value)] = weight
    return weight


# What filters get: a text, or a list of bounded size.


def text_of(value: Any) -> str:
    if not isinstance(value, str):
        allow(_weigh(value), MAX_WEIGHT)
    text = str(value)
    allow(len(text))
    return text


def _short(value: Any) -> Any:
    if isinstance(value, str):
        allow(len(value), _MAX_SHORT)
    return value


def _listed(value: Any) -> Any:
    if isinstance(value, str):
        allow(len(value) * (_ELEMENT + 1), MAX_WEIGHT)
    elif hasattr(value, "__len__"):
        allow(len(value) * _ELEMENT, MAX_WEIGHT)
    elif hasattr(value, "__iter__"):
        items: list[Any] = []
        weight, known = 0, {}  # type: int, dict[int, int]
        for item in value:
            tick()
            items.append(item)  # keeps it alive, and its id its own
            weight += _weigh_in(item, known)
            allow(weight, MAX_WEIGHT)
        return items
    return value


def same(value: Any) -> Any:
    return value


# Texts: methods, and filters of the same names.


def _compared(text: str, other: Any) -> None:
    """Before a search that may compare every character of a text with all of another one."""
    if isinstance(other, str) and len(text) * len(other) > _MAX_COMPARISONS:
        raise TemplateLimitError("the chat template searches for a text that is too long")


def _searching(method: Callable[..., Any]) -> Callable[..., Any]:
    def search(text: str, what: str | None = None, *rest: Any) -> Any:
        _compared(text, what)
        return method(text, what, *rest)

    return search


def _splitting(method: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def split(text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        if method is str.rsplit:
            _compared(text, sep)
        parts = method(text, sep, maxsplit if 0 <= maxsplit < _MAX_ELEMENTS else _MAX_ELEMENTS)
        allow(len(parts), _MAX_ELEMENTS)
        return parts

    return split


def _lines(text: str) -> int:
    """The most lines that `str.splitlines` can find."""
    return 1 + sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))


def _splitlines(text: str, keepends: bool = False) -> list[str]:
    allow(len(text) + _lines(text) * _ELEMENT, MAX_WEIGHT)
    return text.splitlines(keepends)


def _replace(text: str, old: Any, new: Any, count: int | None = -1) -> str:
    old, new = text_of(old), text_of(new)
    allow(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _join(separator: str, parts: Any) -> str:
    parts = _listed(parts)
    allow(_weigh(parts) + len(separator) * (len(parts) if hasattr(parts, "__len__") else 0), MAX_WEIGHT)
    return separator.join(parts)


_NUMBER = re.compile(r"\d+")


def _widths(spec: str) -> int:
    """The sum of all numbers in a format, widths and precisions among them."""
    numbers = _NUMBER.findall(spec)
    return sum(int(number) if len(number) < 10 else MAX_TEXT + 1 for number in numbers)


def modulo(text: str, values: Any) -> str:
    """The operator `%`, for a text."""
    _short(text)
    if "*" in text:
        raise TemplateLimitError("a width of * is not available in chat templates")
    times = text.count("%") if isinstance(values, Mapping) else 1
    allow(len(text) + _widths(text) + times * _weigh(values))
    return text % values


def _plain(name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(str, name)
    return method


_PLAIN = (
    "capitalize count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace "
    "isupper lower partition removeprefix removesuffix startswith title upper"
).split()
METHODS: dict[type, dict[str, Callable[..., Any]]] = {
    str: {
        **{name: _plain(name) for name in _PLAIN},
        **{name: _searching(_plain(name)) for name in ("lstrip", "rstrip", "strip", "rfind")},
        "format": same,  # see `call`
        "join": _join,
        "replace": _replace,
        "rsplit": _splitting(str.rsplit),
        "split": _splitting(str.split),
        "splitlines": _splitlines,
    },
    # Lists, because views would print without being weighed.
    dict: {
        "get": dict.get,
        "items": lambda value: list(value.items()),
        "keys": lambda value: list(value.keys()),
        "values": lambda value: list(value.values()),
    },
    list: {"count": list.count, "index": list.index},
}


# Filters.


def _round(value: Any, precision: Any = 0, method: str = "common") -> Any:
    if not isinstance(precision, int) or abs(precision) > 100:
        raise TemplateLimitError("the chat template rounds to too many digits")
    return DEFAULT_FILTERS["round"](value, precision, method)


def _indent(text: str, width: Any = 4, first: bool = False, blank: bool = False) -> Any:
    lines = _lines(text)
    allow(lines, _MAX_ELEMENTS)
    allow(len(text) + lines * (width if isinstance(width, int) else len(width)))
    return DEFAULT_FILTERS["indent"](text, width, first, blank)


def _check_names(values: Any, *args: Any, **kwargs: Any) -> None:
    """Paths of attributes, each part of which is looked up in every element."""
    for name in (*args, *kwargs.values()):
        if isinstance(name, str):
            allow(len(name), _MAX_NAME)


def _check_sum(values: Any, attribute: Any = None, start: Any = 0) -> None:
    _check_names(values, attribute)
    if not isinstance(start, int | float):  # each addition would copy a list
        raise TemplateLimitError("in chat templates, sum adds numbers only")


def _check_join(values: Any, d: Any = "", attribute: Any = None) -> None:
    _check_names(values, attribute)
    length = len(values) if hasattr(values, "__len__") else 0
    allow(_weigh(values) + len(text_of(d)) * length, MAX_WEIGHT)


def _check_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> None:
    extra = (indent if isinstance(indent, int) else len(indent or "")) + sum(map(len, separators or ()))
    weight = _weigh(value)
    allow(weight + weight // _ELEMENT * extra, MAX_WEIGHT)


Filter = Callable[..., Any]
_LIST_FILTERS = (
    "dictsort items join list map max min reject rejectattr reverse select selectattr sort sum unique"
).split()
_PLAIN_FILTERS = "abs count d default first last length".split()
_TEXT_FILTERS: dict[str, Filter] = {
    **{name: _plain(name) for name in ("capitalize", "lower", "upper")},
    **dict.fromkeys(("e", "escape"), lambda text: str(escape(text))),
    "format": lambda text, *args, **kwargs: modulo(text, kwargs or args),
    "indent": _indent,
    "replace": _replace,
    "safe": same,  # nothing is ever escaped by itself
    "string": same,
    "title": lambda text: DEFAULT_FILTERS["title"](_short(text)),
    "trim": lambda text, chars=None: METHODS[str]["strip"](text, chars),
}
# What a filter gets first, and the filter.
FILTERS: dict[str, tuple[Callable[[Any], Any], Filter]] = {
    **{name: (_listed, DEFAULT_FILTERS[name]) for name in _LIST_FILTERS},
    **{name: (text_of, function) for name, function in _TEXT_FILTERS.items()},
    **{name: (same, DEFAULT_FILTERS[name]) for name in _PLAIN_FILTERS},
    **{name: (_short, DEFAULT_FILTERS[name]) for name in ("float", "int")},
    "round": (same, _round),
}
# Before filters that keep Jinja's own function, and `tojson`.
CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("max", "min", "sort", "unique"), _check_names),
    **dict.fromkeys(
        ("map", "reject", "rejectattr", "select", "selectattr"),
        lambda values, first="", *rest, attribute="", **named: _check_names(values, first, attribute),
    ),
    "join": _check_join,
    "sum": _check_sum,
    "tojson": _check_json,
}
TESTS = (
    "boolean defined divisibleby eq equalto even false float ge greaterthan gt in integer iterable le "
    "lessthan lt mapping ne none number odd sameas sequence string true undefined "
    "== != < <= > >="
).split()
TEXT_TESTS: dict[str, Callable[[Any], bool]] = {
    "lower": lambda value: text_of(value).islower(),
    "upper": lambda value: text_of(value).isupper(),
}


# Numbers and texts that operators and formats make.


def check_multiply(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise TemplateLimitError("the chat template computes with numbers that are too large")
    elif isinstance(left, int):
        check_multiply(right, left)
    elif isinstance(right, int) and isinstance(left, str):
        allow(len(left) * right)
    elif isinstance(right, int):
        allow(_weigh(left) * right, MAX_WEIGHT)


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_INT_BITS:
        raise TemplateLimitError("the chat template computes with numbers that are too large")


def check_format(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """`str.format`."""
    size = len(_short(text))
    heaviest = max(map(_weigh, (*args, *kwargs.values())), default=0)
    for _, field, spec, _ in string.Formatter().parse(text):
        if "{" in (spec or ""):
            raise TemplateLimitError("a width that is itself a field is not available in chat templates")
        size += _widths(spec or "") + (heaviest if field is not None else 0)
    allow(size)
