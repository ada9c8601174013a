"""The sandbox of chat templates: nothing but what `template_operations` lists, and within its limits."""

# ruff: noqa: N802 - methods that Jinja calls by its own names

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.defaults import DEFAULT_TESTS
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Namespace

from jaxserve.template_operations import (
    CHECKS,
    FILTERS,
    METHODS,
    TESTS,
    TEXT_TESTS,
    Filter,
    TemplateLimitError,
    allow,
    built,
    check_format,
    check_multiply,
    check_power,
    combined,
    modulo,
    same,
    text_of,
    tick,
)


class _Watched:
    """An iterable of a `for`, with a look at the clock before every item."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            tick()
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

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier, frame: Frame) -> None:
        self.fail("autoescape is not available in chat templates", node.lineno)

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
        self.globals = {"namespace": _Namespace, "dict": dict, "range": safe_range}
        self.tests = {name: DEFAULT_TESTS[name] for name in TESTS} | TEXT_TESTS
        self.filters = {}
        for name, (prepare, function) in FILTERS.items():
            self.set_filter(name, function, prepare)

    def set_filter(self, name: str, function: Filter, prepare: Callable[[Any], Any] = same) -> None:
        """Add a filter whose time and results are counted."""
        check = CHECKS.get(name)
        own = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own first argument

        def bounded(*args: Any, **kwargs: Any) -> Any:
            tick()
            value, rest = prepare(args[own]), args[own + 1 :]
            if check is not None:
                check(value, *rest, **kwargs)
            return built(function(*args[:own], value, *rest, **kwargs))

        self.filters[name] = wraps(function)(bounded) if own else bounded  # takes `jinja_pass_arg` over

    watched = staticmethod(_Watched)
    weighed = staticmethod(combined)

    @staticmethod
    def joined(values: Iterable[Any]) -> str:
        """The operator `~`."""
        return BoundedEnvironment.concat(map(text_of, values))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The text of a macro, a call block or a `set` block."""
        texts = list(pieces)
        allow(sum(map(len, texts)))
        text: str = built("".join(texts))
        return text

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Namespace | LoopContext):
            return not attr.startswith("_")
        return attr in METHODS.get(type(obj), ())

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        reason = f"{attribute!r} of a {type(obj).__name__} is not available in chat templates"
        return self.undefined(reason, obj=obj, name=attribute, exc=TemplateLimitError)

    def wrap_str_format(self, value: Any) -> None:
        """Nothing is wrapped: `call` knows `format`."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Names as in Jinja's: a template's keyword arguments may have any other.
        tick()
        owner: Any = getattr(__obj, "__self__", None)
        name = getattr(__obj, "__name__", type(__obj).__name__)
        method = METHODS.get(type(owner), {}).get(name)
        if method is not None:
            # `_loop_vars` and `_block_vars` are Jinja's own, for functions that ask for them.
            kwargs = {key: value for key, value in kwargs.items() if key[:1] != "_"}
            if name == "format":
                check_format(owner, args, kwargs)
                return built(SandboxedFormatter(__self).vformat(owner, args, kwargs))
            return built(method(owner, *args, **kwargs))
        if isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            combined(args)
            combined(kwargs)
        known = (Macro, LoopContext, Undefined)  # the last says what is undefined
        if isinstance(__obj, known) or isinstance(owner, LoopContext):
            return super().call(__context, __obj, *args, **kwargs)
        if __obj is _Watched or any(__obj is function for function in __self.globals.values()):
            return built(super().call(__context, __obj, *args, **kwargs))
        raise TemplateLimitError(f"calling {name!r} is not available in chat templates")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            return built(modulo(left, right))
        if operator == "*":
            check_multiply(left, right)
        elif operator == "**":
            check_power(left, right)
        return combined(super().call_binop(context, operator, left, right))

    def _filter_test_common(self, *args: Any, **kwargs: Any) -> Any:
        tick()  # filters and tests that `map`, `select` and the like apply to every item
        return super()._filter_test_common(*args, **kwargs)
