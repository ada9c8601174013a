"""Chat templates: Jinja texts of a checkpoint or an operator that turn messages into a prompt.

The environment is that of transformers (`utils/chat_template_utils.py`): sandboxed and immutable,
`trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, a `tojson` that does not
escape HTML, and a `{% generation %}` tag that changes nothing. Time, memory and the text's length are
bounded, and what a template may use is listed (see `template_operations`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import pydantic_core
from jinja2 import nodes
from jinja2.parser import Parser

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.template_operations import RENDER_SECONDS, TemplateLimitError, limited
from jaxserve.template_sandbox import BoundedEnvironment

# Characters of one rendered conversation: a million tokens and more, and far below what hurts a server.
MAX_RENDERED_CHARS = 4 * 1024 * 1024

_MAX_TIME_FORMAT = 256  # characters

# Names a caller's template variables may not take: what the render call sets itself, and the arguments of
# transformers' apply_chat_template that are no template variables at all.
RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "conversation",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "add_special_tokens",
        "special_tokens_in_content",
        "max_tokens",
        "raise_exception",
        "strftime_now",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
    }
)

# Ends the content of a message to be continued, so that its place in the rendered text is found. It begins
# with a noncharacter, and its space shows whether the template trims contents.
_CONTINUE_TAG = "\ufdd3CONTINUE_FINAL_MESSAGE "


class _TemplateRefusal(jinja2.TemplateError):
    """`raise_exception(message)` in a template."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's text for training; here it is only its
    body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_TIME_FORMAT:
        raise TemplateLimitError("the chat template's time format is too long")
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        allow_nan=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache(maxsize=1)
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.set_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """The compiled template. An unknown filter or test inside an `if` is found only when it runs.

    Raises:
        InvalidRequestError: a syntax error, or a filter or test that does not exist; the message names the
            line where it can.
    """
    try:
        with limited():  # filters of constants are applied here
            return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(
            f"the chat template does not compile: line {error.lineno}: {error.message}", param="messages"
        ) from error
    except (SyntaxError, RecursionError) as error:  # of the Python code that Jinja makes of it
        raise InvalidRequestError(
            f"the chat template does not compile: {type(error).__name__}: it is nested too deeply",
            param="messages",
        ) from error


def check_template(source: str) -> None:
    """Compiles an operator's template, and looks inside its `if`s too.

    Raises:
        ConfigError: names the line.
    """
    try:
        compile_template(source)
    except InvalidRequestError as error:
        raise ConfigError(str(error)) from error
    tree, kinds = _environment().parse(source), {"filter": nodes.Filter, "test": nodes.Test}
    for kind, known in (("filter", _environment().filters), ("test", _environment().tests)):
        for node in tree.find_all(kinds[kind]):
            if node.name not in known:
                why = f"line {node.lineno}: No {kind} named {node.name!r}."
                raise ConfigError(f"the chat template does not compile: {why}")


@lru_cache(maxsize=64)
def wants_parts(source: str) -> bool:
    """Whether a template takes a message's content only as a list of parts.

    It has a loop over `content`, and no `is string` that would tell a text from a list.
    """
    try:
        template = _environment().parse(source)
    except (jinja2.TemplateSyntaxError, RecursionError):
        return False  # `compile_template` says so
    if any(test.name == "string" for test in template.find_all(nodes.Test)):
        return False
    return any(_is_content(loop.iter) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Name(name=name) | nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=name)):
            return bool(name == "content")
        case nodes.Filter(node=nodes.Expr() as inner):
            return _is_content(inner)
    return False


def load_chat_template(value: str) -> str:
    """The template an operator names: a file's content, or the Jinja text itself.

    Raises:
        ConfigError: `value` is neither a readable file nor a template.
    """
    if "{" in value:  # a Jinja text without a brace would answer every conversation with the same prompt
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat template {value!r} is neither a readable file nor a Jinja text") from error


def check_template_kwargs(kwargs: Mapping[str, Any], param: str = "chat_template_kwargs") -> None:
    """Refuses template variables that would replace what the render call sets itself.

    Raises:
        InvalidRequestError: names the variable.
    """
    for name in kwargs:
        if name in RESERVED_VARIABLES:
            raise InvalidRequestError(f"{name!r} may not be given as a chat template variable", param=param)


def _fail(where: str, what: str) -> NoReturn:
    raise InvalidRequestError(f"{where}: {what}", param="messages")


def _content_texts(content: Any, where: str) -> list[str]:
    """The texts that a message's content consists of."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        _fail(where, "content must be a string, a list of parts, or null")
    texts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
            continue
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "text":
            _fail(where, "a text part needs a string `text`")
        _fail(where, f"content parts of type {kind!r} are not supported")
    return texts


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose `function.arguments` is an object (OpenAI's API carries it as a JSON string)."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        _fail(where, "each of tool_calls must be an object with a `function`")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = pydantic_core.from_json(arguments, allow_inf_nan=False) if arguments.strip() else {}
        except ValueError:
            _fail(where, "the arguments of a tool call are not valid JSON")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        _fail(where, "the arguments of a tool call must be a JSON object")
    function["arguments"] = arguments
    return {**call, "function": function}


def normalise_messages(
    messages: Any, *, keep_developer: bool = False, as_parts: bool = False
) -> list[dict[str, Any]]:
    """Messages of OpenAI's API as chat templates expect them (new dicts; the caller's stay as they are).

    `content` becomes a string (null or missing: empty; parts are joined without a separator), or with
    `as_parts` a list of `{"type": "text", "text": ...}`; other null fields and an empty `tool_calls` are
    dropped; the arguments of tool calls become objects; the role `developer` becomes `system` unless the
    template knows it.

    Raises:
        InvalidRequestError: param `messages`; names the message by its index.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages must be a non-empty list", param="messages")
    result = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            _fail(where, "must be an object")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            _fail(where, "role must be a non-empty string")
        normal = {key: value for key, value in message.items() if value is not None}
        texts = _content_texts(message.get("content"), where)
        normal["content"] = [{"type": "text", "text": text} for text in texts] if as_parts else "".join(texts)
        if role == "developer" and not keep_developer:
            normal["role"] = "system"
        calls = normal.pop("tool_calls", None)
        if calls is not None and not isinstance(calls, list):
            _fail(where, "tool_calls must be a list")
        if calls:
            normal["tool_calls"] = [_tool_call(call, where) for call in calls]
        result.append(normal)
    return result


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to every string in it; keys too, which a template may print."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _write_out_arguments(chat: list[dict[str, Any]], guard: Callable[[str], str] | None) -> bool:
    """Make the arguments of all tool calls JSON texts; whether there are any."""
    functions = [call["function"] for message in chat for call in message.get("tool_calls", ())]
    for function in functions:
        text = json.dumps(function["arguments"], ensure_ascii=False)
        function["arguments"] = text if guard is None else guard(text)
    return bool(functions)


class ChatTemplate:
    """A template with the variables that come from its checkpoint.

    Args:
        source: the Jinja text; None where the checkpoint has none.
        special_tokens: `bos_token`, `eos_token` and others by name, as the template knows them.
        max_chars: cap on the rendered text, in characters.
        max_seconds: cap on a rendering's time.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: dict[str, str],
        max_chars: int = MAX_RENDERED_CHARS,
        max_seconds: float = RENDER_SECONDS,
    ) -> None:
        self.source = source
        self.special_tokens = special_tokens
        self.max_chars = max_chars
        self.max_seconds = max_seconds

    def render(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        guard: Callable[[str], str] | None = None,
    ) -> str:
        """The prompt's text.

        Args:
            messages: see `normalise_messages`.
            add_generation_prompt: end with the opening of an assistant's turn.
            continue_final_message: end inside the last message; `add_generation_prompt` is then ignored.
            template_kwargs: further variables of the template.
            guard: applied to every string a caller gave, before the template sees it.

        Raises:
            InvalidRequestError: no template, a wrong message, a variable that may not be set, a text over
                the cap, or an error in the template; where the template called `raise_exception`, that
                message alone.
        """
        if self.source is None:
            raise InvalidRequestError(
                "the model has no chat template; pass one with --chat-template (chat_template= in Python), "
                "or use text completions",
                param="messages",
            )
        variables = dict(template_kwargs or {})
        check_template_kwargs(variables)
        template = compile_template(self.source)
        as_parts = wants_parts(self.source)
        chat = normalise_messages(messages, keep_developer="developer" in self.source, as_parts=as_parts)
        if guard is not None:
            try:
                chat = _map_strings(chat, guard)
                variables = _map_strings(variables, guard)
            except RecursionError:
                raise InvalidRequestError("messages are nested too deeply", param="messages") from None
        if continue_final_message:
            _tag_end(chat[-1])
        variables = {"tools": None, "documents": None, **self.special_tokens, **variables}
        variables |= {
            "messages": chat,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self._generate(template, variables)
        except InvalidRequestError as error:
            # Some templates (DeepSeek's) join the arguments of a tool call as the text that OpenAI's API has.
            if not (isinstance(error.__cause__, TypeError) and _write_out_arguments(chat, guard)):
                raise
            text = self._generate(template, variables)
        return _cut_at_tag(text) if continue_final_message else text

    def _generate(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        pieces = []
        length = 0
        try:
            with limited(self.max_seconds):
                for piece in template.generate(variables):
                    length += len(piece)
                    if length > self.max_chars:
                        raise TemplateLimitError(
                            f"the chat template's text is longer than {self.max_chars} characters"
                        )
                    pieces.append(piece)
        except TemplateLimitError as error:
            raise InvalidRequestError(str(error), param="messages") from error
        except _TemplateRefusal as error:
            raise InvalidRequestError(str(error), param="messages") from error
        except Exception as error:  # a template is a program: anything it raises is about these messages
            raise InvalidRequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error
        return "".join(pieces)


def _tag_end(message: dict[str, Any]) -> None:
    """Marks where the content ends."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_TAG
    elif content:
        content[-1]["text"] += _CONTINUE_TAG
    else:
        content.append({"type": "text", "text": _CONTINUE_TAG})


def _cut_at_tag(text: str) -> str:
    """The text up to the end of the last message's content, found by the tag put there."""
    tag = _CONTINUE_TAG.strip()
    place = text.rfind(tag)
    if place < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the last message's content as it is",
            param="continue_final_message",
        )
    kept = text[:place]
    # A template that trims contents has removed the tag's trailing space; it would have trimmed the
    # content's too.
    return kept if text.startswith(_CONTINUE_TAG, place) else kept.rstrip()
