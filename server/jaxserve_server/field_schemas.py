"""JSON Schemas of the fields that are checked by hand, and what all bodies' schemas have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import Field

from jaxserve.chat_template import RESERVED_VARIABLES
from jaxserve.sampling_params import MAX_BAD_WORD_LENGTH, MAX_LOGIT_BIAS, MAX_STOP_LENGTH
from jaxserve_server.config import DEFAULT_STOP_STRINGS

JsonSchema = dict[str, Any]

ShortText = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]

_TEXT: JsonSchema = {"type": "string", "minLength": 1}
_TOKEN_IDS: JsonSchema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STOP_TEXT: JsonSchema = {**_TEXT, "maxLength": MAX_STOP_LENGTH}


def prompts(most: int) -> JsonSchema:
    """A text, token ids, or up to `most` of either."""
    return {
        "anyOf": [
            _TEXT,
            {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": most},
            _TOKEN_IDS,
            {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": most},
        ]
    }


PROMPT = prompts(1024)

_most_stop_strings = ContextVar("_most_stop_strings", default=DEFAULT_STOP_STRINGS)


@contextmanager
def stop_strings(most: int) -> Iterator[None]:
    """Schemas that are made meanwhile say that `stop` takes up to `most` strings, as this server's do."""
    token = _most_stop_strings.set(most)
    try:
        yield
    finally:
        _most_stop_strings.reset(token)


class StopSchema:
    """Annotation of `stop`: its schema depends on the server's configuration."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> JsonSchema:
        texts = {"type": "array", "items": _STOP_TEXT, "maxItems": _most_stop_strings.get()}
        return {"anyOf": [_STOP_TEXT, texts]}


LOGIT_BIAS: JsonSchema = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,18}$"},
    "additionalProperties": {"type": "number"},
    "maxProperties": MAX_LOGIT_BIAS,
}

TEMPLATE_KWARGS: JsonSchema = {
    "type": "object",
    "propertyNames": {"not": {"enum": sorted(RESERVED_VARIABLES)}},
}

_PART: JsonSchema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TOOL_CALL: JsonSchema = {
    "type": "object",
    "properties": {
        "function": {
            "type": "object",
            "properties": {
                "name": {"description": "The function's name."},
                "arguments": {
                    "anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}],
                    "description": "An object, or its JSON.",
                },
            },
        }
    },
    "required": ["function"],
}
MESSAGES: JsonSchema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {
                **_TEXT,
                "description": "`system`, `user`, `assistant`, `tool` or what the template knows; "
                "`developer` is `system` where it does not know it.",
            },
            "content": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}],
                "description": "A text, or text parts, which are joined.",
            },
            "tool_calls": {"anyOf": [{"type": "array", "items": _TOOL_CALL}, {"type": "null"}]},
        },
        "required": ["role"],
    },
}


def complete(
    schema: JsonSchema, not_honoured: Mapping[str, Sequence[Any]], ignored: Sequence[str]
) -> JsonSchema:
    """A body's schema with what pydantic does not know.

    Optional fields take null; `not_honoured` maps a field to the values that are taken, `ignored` fields take
    anything.
    """
    properties = schema.setdefault("properties", {})
    required = schema.get("required", ())
    for name, field in properties.items():
        if name not in required:
            properties[name] = nullable(field)
    for name, harmless in not_honoured.items():
        shown = ", ".join(f"`{json.dumps(value)}`" for value in (*harmless, None))
        properties[name] = {"enum": [*harmless, None], "description": f"Not honoured: only {shown} is taken."}
    for name in ignored:
        properties[name] = {"description": "Accepted and ignored."}
    return schema


def nullable(field: JsonSchema) -> JsonSchema:
    """The schema that takes null too; a default of null says no more than that."""
    about = {key: field[key] for key in ("description", "default") if field.get(key) is not None}
    kinds = {key: value for key, value in field.items() if key not in ("description", "default", "title")}
    alternatives = kinds["anyOf"] if kinds.keys() == {"anyOf"} else [kinds]
    if {"type": "null"} not in alternatives:
        alternatives = [*alternatives, {"type": "null"}]
    return {**about, "anyOf": alternatives}
