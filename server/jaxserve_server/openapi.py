"""The OpenAPI document: the application's routes, the bodies they take and the answers they give.

Built from the router and the models, so that it cannot say what the server does not do; a route without an
entry in `OPERATIONS` is an error, which a test finds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

import jaxserve
from jaxserve_server import answer_schemas as answers
from jaxserve_server.embeddings import EmbeddingBody
from jaxserve_server.middleware import is_open
from jaxserve_server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from jaxserve_server.state import STATE

JSON, HTML, METRICS = "application/json", "text/html", "text/plain"
SCHEMAS = "#/components/schemas/"

_ABOUT = (
    "OpenAI's API, with vLLM's extensions. Every optional field takes null as absent; numbers are strict; "
    "unknown fields are ignored; a known field that is not honoured is a 400 that names it. A method that a "
    "path does not take is a 405, a path that does not exist a 404, both with the error's shape."
)
_ERRORS = {
    400: "Something is wrong with the request; `param` names the field.",
    401: "A valid API key is needed.",
    404: "There is no such model.",
    405: "The path does not take that method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests: try again after `Retry-After` seconds.",
    431: "The headers are too large.",
    500: "The engine failed.",
    503: "The model is loading, the server is shutting down, or the engine is dead.",
    504: "The request took longer than the server allows.",
}
_EDGE = (400, 431)  # a wrong Host, wrong headers
_OF_BODIES = (408, 413)
_OF_THE_ENGINE = (404, 429, 500, 503, 504)


@dataclass(frozen=True)
class Operation:
    """A method of a path: what it takes and gives."""

    summary: str
    tag: str
    answer: type[BaseModel] | None = None  # JSON
    media: str = JSON
    body: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None  # of its stream
    errors: tuple[int, ...] = ()  # besides those of the edge


_MODELS = (401, 503)

# By method and path, in the order in which pages show them.
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Go on with a conversation",
        "Generation",
        answers.ChatCompletion,
        body=ChatBody,
        chunk=answers.ChatChunk,
        errors=(401, *_OF_BODIES, *_OF_THE_ENGINE),
    ),
    ("POST", "/v1/completions"): Operation(
        "Go on with texts or token ids",
        "Generation",
        answers.Completion,
        body=CompletionBody,
        chunk=answers.CompletionChunk,
        errors=(401, *_OF_BODIES, *_OF_THE_ENGINE),
    ),
    ("POST", "/v1/embeddings"): Operation(
        "Texts or token ids to vectors",
        "Embeddings",
        answers.Embeddings,
        body=EmbeddingBody,
        errors=(401, *_OF_BODIES, *_OF_THE_ENGINE),
    ),
    ("POST", "/tokenize"): Operation(
        "Text or a conversation to token ids",
        "Tokens",
        answers.Tokens,
        body=TokenizeBody,
        errors=(401, *_OF_BODIES, *_OF_THE_ENGINE),
    ),
    ("POST", "/detokenize"): Operation(
        "Token ids to text",
        "Tokens",
        answers.Detokenized,
        body=DetokenizeBody,
        errors=(401, *_OF_BODIES, *_OF_THE_ENGINE),
    ),
    ("GET", "/tokenizer_info"): Operation(
        "The special tokens and the chat template", "Tokens", answers.TokenizerInfo, errors=_MODELS
    ),
    ("GET", "/v1/models"): Operation("What is served", "Models", answers.ModelList, errors=_MODELS),
    ("GET", "/v1/models/{id}"): Operation(
        "One served model", "Models", answers.ModelCard, errors=(404, *_MODELS)
    ),
    ("GET", "/health"): Operation("Liveness: 503 when the engine is dead", "Probes", answers.Status),
    ("GET", "/ready"): Operation("Readiness: 200 while requests are admitted", "Probes", answers.Status),
    ("GET", "/startup"): Operation("200 once the model is loaded", "Probes", answers.Status),
    ("GET", "/metrics"): Operation("Prometheus metrics", "Operation", media=METRICS, errors=(401,)),
    ("GET", "/version"): Operation("The version", "Operation", answers.Version, errors=(401,)),
    ("GET", "/openapi.json"): Operation("The OpenAPI document", "Operation", errors=(401,)),
    ("GET", "/docs"): Operation("The document as a page", "Pages", media=HTML, errors=(401,)),
    ("GET", "/"): Operation("A page to try the model on", "Pages", media=HTML, errors=(401,)),
}
_PROBES = ("/health", "/ready", "/startup")
Mode = Literal["validation", "serialization"]


class _Schemas(GenerateJsonSchema):
    """In the fields' own order, without titles that repeat names and defaults of null, which say nothing."""

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        return value

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        shown = super().default_schema(schema)
        return {key: value for key, value in shown.items() if not (key == "default" and value is None)}


def routes_of(app: web.Application, root_path: str) -> dict[tuple[str, str], web.AbstractRoute]:
    """The application's routes by method and path, those under `root_path` once."""
    routes = {}
    for route in app.router.routes():
        path = route.resource.canonical if route.resource is not None else ""
        is_copy = root_path and (path.startswith(f"{root_path}/"))
        if route.method != "HEAD" and not is_copy:  # aiohttp answers HEAD where it answers GET
            routes[route.method, path] = route
    return routes


def build_document(app: web.Application) -> dict[str, Any]:
    """The document of this application; raises KeyError for a route that nobody described."""
    config = app[STATE].config
    root_path = config.root_path.rstrip("/")
    routes = routes_of(app, root_path)
    unknown = routes.keys() - OPERATIONS.keys()
    if unknown:
        raise KeyError(f"routes without an entry in OPERATIONS: {sorted(unknown)}")
    served = {key: operation for key, operation in OPERATIONS.items() if key in routes}
    needs_key = bool(config.api_key or config.api_keys_file)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in served.items():
        is_free = not needs_key or is_open(routes[method, path].handler)
        is_free = is_free or (config.metrics_without_key and path == "/metrics")
        paths.setdefault(path, {})[method.lower()] = _operation_json(method, path, operation, is_free)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": jaxserve.__version__, "description": _ABOUT},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": _schemas(served.values(), config.max_stop_strings),
            "responses": {str(status): _error_json(text) for status, text in _ERRORS.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    if needs_key:
        document["security"] = [{"key": []}]
    return document


def _schemas(operations: Iterable[Operation], max_stop_strings: int) -> dict[str, Any]:
    models: list[tuple[type[BaseModel], Mode]] = [(answers.ErrorAnswer, "validation")]
    for operation in operations:
        kinds = (operation.body, operation.answer, operation.chunk)
        models += [(kind, "validation") for kind in kinds if kind is not None]
    _, definitions = models_json_schema(
        list(dict.fromkeys(models)), ref_template=f"{SCHEMAS}{{model}}", schema_generator=_Schemas
    )
    schemas: dict[str, Any] = definitions["$defs"]
    for schema in schemas.values():
        for kind in schema.get("properties", {}).get("stop", {}).get("anyOf", ()):
            if kind.get("type") == "array":
                kind["maxItems"] = max_stop_strings
    return schemas


def _operation_json(method: str, path: str, operation: Operation, is_free: bool) -> dict[str, Any]:
    name = (
        path.strip("/").replace("{", "").replace("}", "").replace("/", "_").replace(".", "_") or "playground"
    )
    shown: dict[str, Any] = {
        "operationId": f"{method.lower()}_{name}",
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": {"200": _answer_json(operation)},
    }
    if "{id}" in path:
        shown["parameters"] = [
            {
                "name": "id",
                "in": "path",
                "required": True,
                "description": "A model's name; it may have a `/`.",
                "schema": {"type": "string", "minLength": 1},
            }
        ]
    if operation.body is not None:
        shown["requestBody"] = {"required": True, "content": {JSON: {"schema": _ref(operation.body)}}}
    if path in _PROBES:
        shown["responses"]["503"] = {**_answer_json(operation), "description": "No"}
    for status in (*_EDGE, *operation.errors):
        if not (status == 401 and is_free):
            shown["responses"][str(status)] = {"$ref": f"#/components/responses/{status}"}
    if is_free:
        shown["security"] = []
    return shown


def _answer_json(operation: Operation) -> dict[str, Any]:
    schema: Mapping[str, Any] = {"type": "object"} if operation.media == JSON else {"type": "string"}
    if operation.answer is not None:
        schema = _ref(operation.answer)
    content: dict[str, Any] = {operation.media: {"schema": schema}}
    description = "Yes" if operation.tag == "Probes" else "The answer"
    if operation.chunk is not None:
        description = "The answer; with `stream: true` events of chunks, then `[DONE]`"
        content["text/event-stream"] = {"schema": _event_json(operation.chunk)}
    return {"description": description, "content": content}


def _event_json(chunk: type[BaseModel]) -> dict[str, Any]:
    content = {"anyOf": [_ref(chunk), _ref(answers.ErrorAnswer)]}
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": content}
    return {
        "description": "An event; an error may be the last one before `[DONE]`.",
        "type": "object",
        "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}},
        "required": ["data"],
    }


def _error_json(text: str) -> dict[str, Any]:
    return {"description": text, "content": {JSON: {"schema": _ref(answers.ErrorAnswer)}}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"{SCHEMAS}{model.__name__}"}


class Document:
    """The application's document, built when it is first asked for: by then every route is there."""

    def __init__(self, app: web.Application) -> None:
        self._app = app

    @cached_property
    def body(self) -> bytes:
        return json.dumps(build_document(self._app), separators=(",", ":")).encode()


DOCUMENT = web.AppKey("openapi_document", Document)


async def openapi_json(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return web.Response(body=request.app[DOCUMENT].body, content_type=JSON)
