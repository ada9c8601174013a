"""The document says what the server does: every route, every body, every answer."""

import json
import threading
from typing import Any

import pytest
from conftest import messages, running
from fake_engine import FakeEngine
from jsonschema import Draft202012Validator
from live import is_idle, live
from openapi_spec_validator import OpenAPIV31SpecValidator

from jaxserve_server import answer_schemas, metrics, openapi
from jaxserve_server.config import ServerConfig
from jaxserve_server.openapi import HEADERS, OPERATIONS, routes_of
from jaxserve_server.protocol import ChatBody, CompletionBody

KNOWN_HEADERS = {name.lower(): name for name in HEADERS}


async def document_of(api, **headers):
    async with api.http.get("/openapi.json", headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/json"
        return await response.json()


def closed(schema):
    """The schema with no room for keys that it does not name."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {key: closed(value) for key, value in schema.items()}
    if "properties" in inside and inside.get("type") == "object":
        inside.setdefault("additionalProperties", False)
    return inside


def check(document, name, value):
    """Hold a value against one of the document's schemas, which must name everything in it."""
    schemas = {"components": {"schemas": closed(document["components"]["schemas"])}}
    schema = {**schemas, "$ref": f"#/components/schemas/{name}"}
    errors = [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(value)
    ]
    assert errors == []


async def test_the_document_is_valid(api):
    OpenAPIV31SpecValidator(await document_of(api)).validate()


@pytest.mark.parametrize("root_path", ["", "/llm", "/llm/"])
async def test_every_route_is_in_the_document_and_the_reverse(engine, root_path):
    async with running(engine, ServerConfig(root_path=root_path)) as api:
        document = await document_of(api)
        routes = routes_of(api.http.server.app, root_path.rstrip("/"))
    shown = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert shown == set(routes) == set(OPERATIONS)
    assert document["servers"] == [{"url": root_path.rstrip("/") or "/"}]


async def test_which_routes_need_a_key(engine):
    async with running(engine, ServerConfig(api_key=("k",))) as api:
        assert (await api.http.get("/openapi.json")).status == 401
        document = await document_of(api, Authorization="Bearer k")
        for path, item in document["paths"].items():
            for method, operation in item.items():
                async with api.http.request(method, path.replace("{id}", "fake")) as response:
                    assert (response.status == 401) == ("401" in operation["responses"]), path
                    assert (response.status == 401) == (operation.get("security") != []), path
    assert document["security"] == [{"key": []}, {"browser": []}]


async def test_without_keys_nothing_needs_one(api):
    document = await document_of(api)
    assert "security" not in document
    assert "401" not in json.dumps(document["paths"])


def test_every_field_of_an_answer_says_what_it_is():
    for operation in OPERATIONS.values():
        for kind in filter(None, (operation.answer, operation.chunk, answer_schemas.ErrorAnswer)):
            schema = kind.model_json_schema()
            for shape in (schema, *schema["$defs"].values()) if "$defs" in schema else (schema,):
                for name, field in shape["properties"].items():
                    assert field.get("description"), f"{kind.__name__}.{name}"


async def test_every_header_that_answers_have_of_ours_is_in_the_document(tmp_path):
    (tmp_path / "keys").write_text("k requests-per-minute=1 tokens-per-minute=100\n")
    headers = {"Authorization": "Bearer k"}
    async with running(FakeEngine(), ServerConfig(api_keys_file=str(tmp_path / "keys"))) as api:
        document = await document_of(api, **headers)
        seen = set()
        for path, item in document["paths"].items():
            for method, operation in item.items():
                async with api.http.request(
                    method, path.replace("{id}", "fake"), json={"prompt": "a"}, headers=headers
                ) as response:
                    shown = operation["responses"][str(response.status)]
                    if "$ref" in shown:
                        shown = document["components"]["responses"][str(response.status)]
                    ours = {
                        KNOWN_HEADERS[name.lower()]
                        for name in response.headers
                        if name.lower() in KNOWN_HEADERS
                    }
                assert "X-Request-Id" in ours
                missing = ours - shown["headers"].keys()
                assert response.status not in (200, 429) or not missing, (path, missing)
                seen |= ours
    assert seen == set(HEADERS) == document["components"]["headers"].keys()


@pytest.mark.parametrize("most", [1, 4, 16])
async def test_the_document_has_this_servers_limit_of_stop_strings(engine, most):
    def limits(document):
        schemas = document["components"]["schemas"]
        return {
            kind["maxItems"]
            for name in ("ChatBody", "CompletionBody")
            for kind in schemas[name]["properties"]["stop"]["anyOf"]
            if kind.get("type") == "array"
        }

    async with running(engine, ServerConfig(max_stop_strings=most)) as api:
        assert limits(await document_of(api)) == {most}
    async with running(engine) as api:
        assert limits(await document_of(api)) == {4}


async def test_the_document_and_the_metrics_are_not_made_on_the_event_loop(api, monkeypatch):
    made = []

    def noting(fn):
        def wrapped(*args):
            made.append(threading.current_thread() is threading.main_thread())
            return fn(*args)

        return wrapped

    monkeypatch.setattr(openapi, "build_document", noting(openapi.build_document))
    monkeypatch.setattr(metrics, "generate_latest", noting(metrics.generate_latest))
    for path in ("/openapi.json", "/openapi.json", "/metrics"):
        async with api.http.get(path) as response:
            assert response.status == 200
    assert made == [False, False]  # the document once


def test_every_field_says_what_it_is():
    for body in (ChatBody, CompletionBody):
        schema = body.model_json_schema()
        for name, field in schema["properties"].items():
            assert field.get("description"), f"{body.__name__}.{name}"
            assert name in schema["required"] or takes_null(field), f"{body.__name__}.{name}"


def takes_null(field: dict[str, Any]) -> bool:
    return Draft202012Validator(field | {"$defs": {"StreamOptions": {}}}).is_valid(None)


# Values at the edges: the models and their schemas must agree on each.
CASES = [
    ("stop", ["a", "b", "c", "d"]),
    ("stop", ["a"] * 5),
    ("stop", ""),
    ("stop", []),
    ("stop", 1),
    ("prompt", [1, 2]),
    ("prompt", [[1], [2]]),
    ("prompt", [[]]),
    ("prompt", [1, "a"]),
    ("prompt", None),
    ("logit_bias", {"1": 5}),
    ("logit_bias", {"x": 5}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {str(i): 1 for i in range(301)}),
    ("tools", []),
    ("tools", [{}]),
    ("tools", None),
    ("use_beam_search", False),
    ("use_beam_search", 0),
    ("length_penalty", 1.0),
    ("length_penalty", True),
    ("response_format", {"type": "text"}),
    ("response_format", {"type": "json_object"}),
    ("truncate_prompt_tokens", -1),
    ("truncate_prompt_tokens", 0),
    ("truncation_side", "right"),
    ("truncation_side", "middle"),
    ("temperature", 2),
    ("temperature", True),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1] * 1025),
    ("bad_words", [""]),
    ("user", {"any": ["thing"]}),
    ("stream_options", {"include_usage": 1}),
]


@pytest.mark.parametrize(("field", "value"), CASES, ids=str)
async def test_the_schema_takes_what_the_server_takes(api, field, value):
    body = {"prompt": "hi", "max_tokens": 1, field: value}
    is_valid = Draft202012Validator(CompletionBody.model_json_schema()).is_valid(body)
    status, answer = await api.post("/v1/completions", **body)
    assert (status == 200) == is_valid, answer
    if not is_valid:
        assert answer["error"]["param"] == field


GENERATION = [
    {},
    {"n": 2, "stop": "e"},
    {"logprobs": 2, "n": 2},
    {"prompt_logprobs": 1},
    {"return_token_ids": True, "logprobs": 0, "return_tokens_as_token_ids": True},
]


async def test_live_answers_are_as_the_document_says():
    async with live("gpt2") as api:
        document = await document_of(api)
        for extra in GENERATION:
            body = {"max_tokens": 6, "seed": 1, **extra}
            check(document, "Completion", await api.complete(["ab", "c"], echo=True, **body))
            chat = (
                {**body, "logprobs": True, "top_logprobs": body["logprobs"]} if "logprobs" in body else body
            )
            check(document, "ChatCompletion", await api.chat("hi", **chat))
            if "prompt_logprobs" in extra:
                continue
            options = {"include_usage": True, "continuous_usage_stats": len(extra) == 1}
            for event in await api.events("/v1/completions", prompt="ab", stream_options=options, **body):
                check(document, "CompletionChunk", event)
            chat = {**chat, "messages": messages("hi")}
            for event in await api.events("/v1/chat/completions", stream_options=options, **chat):
                check(document, "ChatChunk", event)
        for path, schema in [
            ("/v1/models", "ModelList"),
            ("/v1/models/gpt2", "ModelCard"),
            ("/tokenizer_info", "TokenizerInfo"),
            ("/version", "Version"),
            ("/health", "Status"),
            ("/ready", "Status"),
            ("/startup", "Status"),
            ("/nowhere", "ErrorAnswer"),
            ("/tokenize", "ErrorAnswer"),
        ]:
            check(document, schema, await (await api.http.get(path)).json())
        for strs in (True, False):
            check(document, "Tokens", (await api.post("/tokenize", prompt="hi", return_token_strs=strs))[1])
        check(document, "Detokenized", (await api.post("/detokenize", tokens=[5, 6]))[1])
        for encoding in ("float", "base64"):
            status, vectors = await api.post("/v1/embeddings", input=["a", "b"], encoding_format=encoding)
            assert status == 200
            check(document, "Embeddings", vectors)
        check(document, "ErrorAnswer", (await api.post("/v1/completions", prompt=""))[1])
        check(document, "ErrorAnswer", (await api.post("/v1/completions", prompt="x", model="y"))[1])
        assert await is_idle(api.engine)
