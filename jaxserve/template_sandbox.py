"""A sandbox for chat templates that also bounds what a rendering takes: seconds, and characters it builds.

A template has no `while`; what can run for ever is nested loops and macros that call each other. So the clock
is looked at whenever a loop takes its next item and whenever a filter, a test or a macro is called. What lies
between is one operation, and the size of what operations make is bounded: every text, list and dict that an
expression builds is weighed, and those that could swell are weighed before they are built.

The weight of a value is about the characters it prints as: a text's length, and 8 for each element of a list
or dict beside the element's own. What is shared counts each time it appears.
"""

# ruff: noqa: N802 - methods that Jinja calls by its own names

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_join
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context

RENDER_SECONDS = 5.0
MAX_WEIGHT = 16 * 1024 * 1024  # of one value
MAX_TOTAL_WEIGHT = 256 * 1024 * 1024  # of all values that one rendering builds
_ELEMENT = 8
_MAX_INT_BITS = 4096
_MAX_COMPARISONS = 1 << 30  # of characters, in one call

# Of Jinja's own: they search with slow regular expressions, or print without an end, and no chat needs them.
_LEFT_OUT_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")


class TemplateLimitError(Exception):
    """A rendering took too long or built too much."""


class _Spent(threading.local):
    """What the rendering on this thread may take and has taken; no limit outside of a rendering."""

    deadline = math.inf  # time.monotonic()
    seconds = math.inf
    weight = 0


_spent = _Spent()


@contextmanager
def limited(seconds: float = RENDER_SECONDS) -> Iterator[None]:
    """Bounds the rendering within; TemplateLimitError is raised out of it where it goes over."""
    _spent.deadline, _spent.seconds, _spent.weight = time.monotonic() + seconds, seconds, 0
    try:
        yield
    finally:
        _spent.deadline, _spent.weight = math.inf, 0


def _tick() -> None:
    if time.monotonic() > _spent.deadline:
        raise TemplateLimitError(f"the chat template took longer than {_spent.seconds:g} seconds")


def _allow(weight: int) -> None:
    """Raises TemplateLimitError where a value of this weight may not be built."""
    if weight > MAX_WEIGHT:
        raise TemplateLimitError("the chat template builds a value that is too large")


def _charge(value: Any) -> Any:
    """`value`, once its weight is counted."""
    if isinstance(value, str | bytes):
        weight = len(value)
    elif isinstance(value, list | tuple | dict | set | int):
        weight = _weigh(value)
    else:
        return value
    _allow(weight)
    _spent.weight += weight
    if _spent.weight > MAX_TOTAL_WEIGHT:
        raise TemplateLimitError("the chat template builds too many large values")
    return value


def _weigh(value: Any) -> int:
    """See the module's text; each object is looked at once."""
    return _weigh_in(value, {})


def _weigh_in(value: Any, known: dict[int, int]) -> int:
    if isinstance(value, str | bytes):
        return _ELEMENT + len(value)
    if isinstance(value, int):
        return _ELEMENT + value.bit_length() // 3
    if not isinstance(value, list | tuple | dict | set):
        return _ELEMENT
    weight = known.get(id(value))
    if weight is None:
        known[id(value)] = 0
        weight = _ELEMENT + sum(_weigh_in(item, known) for item in value)
        if isinstance(value, dict):
            weight += sum(_weigh_in(item, known) for item in value.values())
        known[id(value)] = weight
    return weight


class _Watched:
    """An iterable of a `for`, with a look at the clock before every item."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _tick()
            yield item


class _Namespace(Namespace):
    def __repr__(self) -> str:  # Jinja's prints all that is in it, other namespaces too
        return "<Namespace>"


def _is_constant(items: Iterable[nodes.Expr]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


class _Generator(CodeGenerator):
    """Jinja's, with a weighing around whatever expression builds a value by itself."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        watch = nodes.EnvironmentAttribute("watched", lineno=node.lineno)
        node.iter = nodes.Call(watch, [node.iter], [], None, None, lineno=node.lineno)
        node.iter.set_environment(self.environment)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _weighed(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.weighed(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        if _is_constant(node.items):
            super().visit_List(node, frame)
        else:
            self._weighed(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._weighed(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load" or _is_constant(node.items):
            super().visit_Tuple(node, frame)
        else:
            self._weighed(super().visit_Tuple, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._weighed(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Use `limited` around a rendering. Methods below are called by compiled templates."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]  # text without an end
        for name in _LEFT_OUT_FILTERS:
            del self.filters[name]
        self.filters["join"] = _join
        for name in self.filters:
            self.set_filter(name, self.filters[name])

    def set_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter whose time and results are counted."""
        check = _FILTER_CHECKS.get(name)
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own first argument

        @wraps(function)  # `jinja_pass_arg` too
        def bounded(*args: Any, **kwargs: Any) -> Any:
            _tick()
            if check is not None:
                check(*args[skipped:], **kwargs)
            return _charge(function(*args, **kwargs))

        self.filters[name] = bounded

    watched = staticmethod(_Watched)
    weighed = staticmethod(_charge)

    @staticmethod
    def joined(values: Iterable[Any]) -> str:
        """The operator `~`."""
        texts = [str(value) for value in values]
        _allow(sum(map(len, texts)))
        text: str = _charge("".join(texts))
        return text

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The text of a macro, a call block or a `set` block."""
        texts = list(pieces)
        _allow(sum(map(len, texts)))
        text: str = _charge("".join(texts))
        return text

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Names as in Jinja's: a template's keyword arguments may have any other.
        _tick()
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str | bytes | int):
            if __obj.__name__ == "join" and args:
                args = (_countable(args[0]), *args[1:])
            check = _METHOD_CHECKS.get(__obj.__name__)
            if check is not None:
                # `_loop_vars` and `_block_vars` are Jinja's own, for functions that ask for them.
                check(__obj.__self__, *args, **{k: v for k, v in kwargs.items() if k[:1] != "_"})
        return _charge(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _BINOP_CHECKS[operator](left, right)
        return _charge(super().call_binop(context, operator, left, right))

    def _filter_test_common(self, *args: Any, **kwargs: Any) -> Any:
        _tick()  # filters and tests that `map`, `select` and the like apply to every item
        return super()._filter_test_common(*args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        function = super().wrap_str_format(value)
        if function is None:
            return None

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, args, kwargs)
            return function(*args, **kwargs)

        return bounded


# Checks before an operation that could make something large out of little.


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _check_add(left: Any, right: Any) -> None:
    _allow(_length(left) + _length(right))


def _check_multiply(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise TemplateLimitError("the chat template computes with numbers that are too large")
    elif isinstance(left, int):
        _check_multiply(right, left)
    elif isinstance(right, int) and hasattr(left, "__len__"):
        _allow((len(left) if isinstance(left, str | bytes) else _weigh(left)) * max(right, 0))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_INT_BITS:
        raise TemplateLimitError("the chat template computes with numbers that are too large")


_NUMBER = re.compile(r"\d+")


def _widths(template: str) -> int:
    """The sum of all numbers in a format, widths and precisions among them."""
    numbers = _NUMBER.findall(template)
    return sum(int(number) if len(number) < 10 else MAX_WEIGHT + 1 for number in numbers)


def _check_modulo(left: Any, right: Any) -> None:
    """The operator `%`: of numbers, or the formatting of a text."""
    if not isinstance(left, str | bytes):
        return
    template = left if isinstance(left, str) else left.decode("latin-1")
    if "*" in template:
        raise TemplateLimitError("a width of * is not available in chat templates")
    times = template.count("%") if isinstance(right, Mapping) else 1
    _allow(len(template) + _widths(template) + times * _weigh(right))


def _check_format(template: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """`str.format` and `str.format_map`."""
    if re.search(r":[^{}]*\{", template):
        raise TemplateLimitError("a width that is itself a field is not available in chat templates")
    weight = max(map(_weigh, (*args, *kwargs.values())), default=0)
    _allow(len(template) + _widths(template) + template.count("{") * weight)


def _check_width(text: Any, width: Any = 80, *rest: Any) -> None:
    """`center` and its like."""
    if isinstance(width, int):
        _allow(width)


def _check_tabs(text: Any, tabsize: Any = 8) -> None:
    if isinstance(tabsize, int):
        _allow(len(text) + text.count("\t" if isinstance(text, str) else b"\t") * tabsize)


def _check_replace(text: Any, old: Any, new: Any, count: Any = None) -> None:
    text, old = (text, old) if isinstance(text, bytes) else (str(text), str(old))
    new = new if isinstance(new, bytes) else str(new)
    _allow(len(text) + text.count(old) * len(new))


def _countable(parts: Any) -> Any:
    return parts if hasattr(parts, "__len__") or not hasattr(parts, "__iter__") else list(parts)


def _check_join(separator: Any, parts: Any) -> None:
    """`str.join`."""
    _allow(_weigh(parts) + len(separator) * _length(parts))


@pass_eval_context
def _join(eval_ctx: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's filter."""
    value = _countable(value)
    _allow(_weigh(value) + _length(d) * _length(value))
    text: str = do_join(eval_ctx, value, d, attribute)
    return text


def _check_indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    text = str(s)
    _allow(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else _length(width)))


def _check_count(
    value: Any, count: Any = None, fill_with: Any = None, linecount: Any = None, slices: Any = None
) -> None:
    """`batch` and `slice`."""
    count = count or linecount or slices
    if isinstance(count, int):
        _allow(count * (_ELEMENT + _weigh(fill_with)))


def _check_round(value: Any, precision: Any = 0, method: str = "common") -> None:
    if isinstance(precision, int) and abs(precision) > 100:
        raise TemplateLimitError("the chat template rounds to too many digits")


def _check_sum(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):  # each addition would copy a list
        raise TemplateLimitError("in chat templates, sum adds numbers only")


def _check_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> None:
    extra = (indent if isinstance(indent, int) else _length(indent)) + sum(map(_length, separators or ()))
    weight = _weigh(value)
    _allow(weight + weight // _ELEMENT * extra)


def _check_search(text: Any, what: Any = "", *rest: Any) -> None:
    """Methods that compare every place of a text with all of another one."""
    if isinstance(what, str | bytes) and len(text) * len(what) > _MAX_COMPARISONS:
        raise TemplateLimitError("the chat template searches for a text that is too long")


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise TemplateLimitError("the chat template uses a method that is not available")


Check = Callable[..., None]
_BINOP_CHECKS: dict[str, Check] = {
    "+": _check_add,
    "*": _check_multiply,
    "**": _check_power,
    "%": _check_modulo,
}
_FILTER_CHECKS: dict[str, Check] = {
    "batch": _check_count,
    "center": _check_width,
    "format": lambda value, *args, **kwargs: _check_modulo(str(value), kwargs or args),
    "indent": _check_indent,
    "replace": _check_replace,
    "round": _check_round,
    "slice": _check_count,
    "sum": _check_sum,
    "tojson": _check_json,
}
# By name alone: str's and bytes' first of all.
_METHOD_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_width),
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"), _check_search),
    "expandtabs": _check_tabs,
    "join": _check_join,
    "replace": _check_replace,
    "to_bytes": _refuse,
    "translate": _refuse,
}
