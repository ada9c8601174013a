"""The OpenAPI document: the application's routes, the bodies they take and the answers they give.

Built from the router and the models, so that it cannot say what the server does not do; a route without an
entry in `OPERATIONS` is an error, which a test finds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

import jaxserve
from jaxserve_server import answer_schemas as answers
from jaxserve_server.embeddings import EmbeddingBody
from jaxserve_server.field_schemas import stop_strings
from jaxserve_server.middleware import is_open
from jaxserve_server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from jaxserve_server.state import STATE
from jaxserve_server.workers import off_loop

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
    about: tuple[str, str] | None = None  # of a probe: what 200 and 503 mean


_MODELS = (401, 503)
_HEALTH = ("The process works, also while it loads or drains.", "The engine is dead: restart the server.")
_READY = ("Requests are admitted.", "The model is loading, the server is draining, or the engine is dead.")
_STARTUP = ("The model is loaded.", "The model is loading, or could not be loaded, or the engine is dead.")

# By method and path, in the order in which pages show them.
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Create a chat completion",
        "Generation",
        answers.ChatCompletion,
        body=ChatBody,
        chunk=answers.ChatChunk,
        errors=(401, *_OF_BODIES, *_OF_THE_ENGINE),
    ),
    ("POST", "/v1/completions"): Operation(
        "Create a completion",
        "Generation",
        answers.Completion,
        body=CompletionBody,
        chunk=answers.CompletionChunk,
        errors=(401, *_OF_BODIES, *_OF_THE_ENGINE),
    ),
    ("POST", "/v1/embeddings"): Operation(
        "Create embeddings",
        "Embeddings",
        answers.Embeddings,
        body=EmbeddingBody,
        errors=(401, *_OF_BODIES, *_OF_THE_ENGINE),
    ),
    ("POST", "/tokenize"): Operation(
        "Tokenize a text or a conversation",
        "Tokens",
        answers.Tokens,
        body=TokenizeBody,
        errors=(401, *_OF_BODIES, *_OF_THE_ENGINE),
    ),
    ("POST", "/detokenize"): Operation(
        "Detokenize token ids",
        "Tokens",
        answers.Detokenized,
        body=DetokenizeBody,
        errors=(401, *_OF_BODIES, *_OF_THE_ENGINE),
    ),
    ("GET", "/tokenizer_info"): Operation(
        "Get the tokenizer's special tokens and chat template",
        "Tokens",
        answers.TokenizerInfo,
        errors=_MODELS,
    ),
    ("GET", "/v1/models"): Operation("List models", "Models", answers.ModelList, errors=_MODELS),
    ("GET", "/v1/models/{id}"): Operation(
        "Retrieve a model", "Models", answers.ModelCard, errors=(404, *_MODELS)
    ),
    ("GET", "/health"): Operation("Liveness probe", "Probes", answers.Status, about=_HEALTH),
    ("GET", "/ready"): Operation("Readiness probe", "Probes", answers.Status, about=_READY),
    ("GET", "/startup"): Operation("Startup probe", "Probes", answers.Status, about=_STARTUP),
    ("GET", "/metrics"): Operation("Get Prometheus metrics", "Operation", media=METRICS, errors=(401,)),
    ("GET", "/version"): Operation("Get the version", "Operation", answers.Version, errors=(401,)),
    ("GET", "/openapi.json"): Operation("Get the OpenAPI document", "Operation", errors=(401,)),
    ("GET", "/docs"): Operation("Read the API documentation", "Pages", media=HTML, errors=(401,)),
    ("GET", "/"): Operation("Open the playground", "Pages", media=HTML, errors=(401,)),
}
HEADERS = {
    "X-Request-Id": (
        "The request's own `X-Request-Id`, or one made for it; logs and traces carry it.",
        "string",
    ),
    "Retry-After": ("Seconds to wait before the next try.", "integer"),
    "x-ratelimit-limit-requests": ("Requests that the key may make in a minute.", "integer"),
    "x-ratelimit-remaining-requests": ("Requests that are left of them.", "integer"),
    "x-ratelimit-reset-requests": ("Time until all of them are there again, such as `1m2s`.", "string"),
    "x-ratelimit-limit-tokens": ("Tokens that the key may spend in a minute, prompts included.", "integer"),
    "x-ratelimit-remaining-tokens": ("Tokens that are left of them.", "integer"),
    "x-ratelimit-reset-tokens": ("Time until all of them are there again, such as `1m2s`.", "string"),
}
_RATE_HEADERS = tuple(name for name in HEADERS if name.startswith("x-ratelimit-"))
_ERROR_HEADERS = {429: ("Retry-After", *_RATE_HEADERS), 503: ("Retry-After",)}
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
            "responses": {str(status): _error_json(status, text) for status, text in _ERRORS.items()},
            "headers": {
                name: {"description": about, "schema": {"type": kind}}
                for name, (about, kind) in HEADERS.items()
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "browser": {
                    "type": "http",
                    "scheme": "basic",
                    "description": "The key as the password; any user name.",
                },
            },
        },
    }
    if needs_key:
        document["security"] = [{"key": []}, {"browser": []}]
    return document


def _schemas(operations: Iterable[Operation], max_stop_strings: int) -> dict[str, Any]:
    models: list[tuple[type[BaseModel], Mode]] = [(answers.ErrorAnswer, "validation")]
    for operation in operations:
        kinds = (operation.body, operation.answer, operation.chunk)
        models += [(kind, "validation") for kind in kinds if kind is not None]
    with stop_strings(max_stop_strings):
        _, definitions = models_json_schema(
            list(dict.fromkeys(models)), ref_template=f"{SCHEMAS}{{model}}", schema_generator=_Schemas
        )
    schemas: dict[str, Any] = definitions["$defs"]
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
    if operation.about is not None:
        shown["responses"]["503"] = {**shown["responses"]["200"], "description": operation.about[1]}
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
    description = "The answer" if operation.about is None else operation.about[0]
    if operation.chunk is not None:
        description = "The answer; with `stream: true` events of chunks, then `[DONE]`"
        content["text/event-stream"] = {"schema": _event_json(operation.chunk)}
    names = _RATE_HEADERS if operation.body is not None else ()
    return {"description": description, "headers": _headers_json(*names), "content": content}


def _headers_json(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", *names)}


def _event_json(chunk: type[BaseModel]) -> dict[str, Any]:
    content = {"anyOf": [_ref(chunk), _ref(answers.ErrorAnswer)]}
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": content}
    return {
        "description": "An event; an error may be the last one before `[DONE]`.",
        "type": "object",
        "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}},
        "required": ["data"],
    }


def _error_json(status: int, text: str) -> dict[str, Any]:
    return {
        "description": text,
        "headers": _headers_json(*_ERROR_HEADERS.get(status, ())),
        "content": {JSON: {"schema": _ref(answers.ErrorAnswer)}},
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"{SCHEMAS}{model.__name__}"}


class Document:
    """The application's document, built when it is first asked for: by then every route is there."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._body: bytes | None = None

    async def body(self) -> bytes:
        """Its JSON; made on a thread, since it takes a tenth of a second."""
        if self._body is None:
            self._body = await off_loop(0, self._build)
        return self._body

    def _build(self) -> bytes:
        return json.dumps(build_document(self._app), separators=(",", ":")).encode()


DOCUMENT = web.AppKey("openapi_document", Document)


async def openapi_json(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return web.Response(body=await request.app[DOCUMENT].body(), content_type=JSON)
