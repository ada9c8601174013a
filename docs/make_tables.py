"""Writes the tables of routes and fields into README.md and http-api.md: `python docs/make_tables.py`.

They come from the models and the router, as the OpenAPI document does; a test fails when a file is behind.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jaxserve_server.app import create_app
from jaxserve_server.config import ServerConfig
from jaxserve_server.embeddings import EmbeddingBody
from jaxserve_server.lifecycle import Lifecycle
from jaxserve_server.openapi import build_document
from jaxserve_server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)

ROOT = Path(__file__).parents[1]
FILES = (ROOT / "README.md", ROOT / "docs" / "http-api.md")
Schema = dict[str, Any]


def routes() -> str:
    """Method, path, whether it needs a key, and what it does."""

    def load() -> Any:
        raise NotImplementedError  # the document needs no engine

    document = build_document(create_app(ServerConfig(api_key=("key",)), Lifecycle(load), ("model",)))
    lines = ["| route | key | |", "|---|---|---|"]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            key = "no" if operation.get("security") == [] else "yes"
            lines.append(f"| `{method.upper()} {path}` | {key} | {operation['summary']} |")
    return "\n".join(lines)


def fields(kind: type[Body], without: type[Body] | None = None) -> str:
    """The honoured fields of a body, but for those of `without`."""
    schema = kind.model_json_schema()
    lines = ["| field | takes | default | |", "|---|---|---|---|"]
    required = schema.get("required", ())
    own = [name for name in kind.model_fields if without is None or name not in without.model_fields]
    for name in sorted(own, key=lambda name: name not in required):
        field = schema["properties"][name]
        default = json.dumps(field["default"]) if field.get("default") not in (None, "") else ""
        default = "required" if name in required else f"`{default}`" if default else ""
        takes = words(field).replace("|", "\\|")
        lines.append(f"| `{name}` | {takes} | {default} | {field['description']} |")
    return "\n".join(lines)


def not_honoured(kind: type[Body], without: type[Body] | None = None) -> str:
    """What is refused, and which values are taken nevertheless; but for what `without` says."""
    lines = ["| field | taken |", "|---|---|"]
    for name, harmless in kind.not_honoured.items():
        if without is None or name not in without.not_honoured:
            taken = ", ".join(f"`{json.dumps(value)}`" for value in (*harmless, None))
            lines.append(f"| `{name}` | {taken} |")
    return "\n".join(lines)


def words(schema: Schema) -> str:
    """A schema in a few words: `integer 1..16`; null is left out, since every optional field takes it."""
    if "anyOf" in schema:
        options = [option for option in schema["anyOf"] if option.get("type") != "null"]
        return ", or ".join(dict.fromkeys(map(words, options)))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    if "$ref" in schema:
        return "object"
    match schema["type"]:
        case "array":
            most = f"≤ {schema['maxItems']} × " if "maxItems" in schema else "list of "
            return most + words(schema["items"])
        case "string":
            return "string" + (f" ≤ {schema['maxLength']} characters" if "maxLength" in schema else "")
        case "boolean":
            return "true or false"
        case "object":
            return "object" + (f" ≤ {schema['maxProperties']} entries" if "maxProperties" in schema else "")
    return schema["type"] + span(schema)


def span(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    # The bounds of integer types say nothing to people.
    low = None if low is not None and low <= -(2**31) else low
    high = None if high is not None and high >= 2**31 - 1 else high
    if "exclusiveMinimum" in schema:
        return f" > {schema['exclusiveMinimum']}" + (f", ≤ {high}" if high is not None else "")
    if low is not None:
        return f" {low}..{high}" if high is not None else f" ≥ {low}"
    return ""


TABLES = {
    "routes": routes,
    "both": lambda: fields(GenerationBody),
    "completions": lambda: fields(CompletionBody, without=GenerationBody),
    "chat": lambda: fields(ChatBody, without=GenerationBody),
    "embeddings": lambda: fields(EmbeddingBody),
    "tokenize": lambda: fields(TokenizeBody),
    "detokenize": lambda: fields(DetokenizeBody),
    "not honoured": lambda: not_honoured(GenerationBody),
    "not honoured in completions": lambda: not_honoured(CompletionBody, without=GenerationBody),
    "not honoured in chat": lambda: not_honoured(ChatBody, without=GenerationBody),
    "not honoured in embeddings": lambda: not_honoured(EmbeddingBody),
}


def updated(text: str) -> str:
    """The text with each table between its marks as it is now."""
    mark = re.compile(r"(<!-- table: ([a-z ]+) -->\n).*?(<!-- end -->)", re.S)
    return mark.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


if __name__ == "__main__":
    for path in FILES:
        path.write_text(updated(path.read_text("utf-8")), "utf-8")
