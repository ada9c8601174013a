"""What is refused, before anything reaches the engine, and what is not."""

import io

import pytest
from conftest import messages, running

from jaxserve.errors import ConfigError
from jaxserve_server.config import ServerConfig

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VOCABULARY = 258

WRONG_IN_BOTH = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 0.01),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("n", 0),
    ("n", 17),
    ("n", 1.0),
    ("n", True),
    ("seed", 2**63),
    ("seed", 0.5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", ["a"] * 5),
    ("stop", 5),
    ("stop", {"a": 1}),
    ("stop", [["a"]]),
    ("stop", [{}]),
    ("stop_token_ids", [VOCABULARY]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", "1"),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [VOCABULARY]),
    ("stop_token_ids", [*range(VOCABULARY), 10**6]),
    ("bad_words", [""]),
    ("bad_words", [["a"]]),
    ("bad_words", ["x" * 1025]),
    ("bad_words", "word"),
    ("logit_bias", {str(VOCABULARY): 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1.5": 1}),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", [1]),
    ("logit_bias", {str(i): 1 for i in range(301)}),
    ("min_tokens", -1),
    ("ignore_eos", 1),
    ("ignore_eos", "true"),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),  # without stream
    ("priority", 0.5),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("model", 5),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
    ("structured_outputs", {"regex": "a"}),
    ("guided_json", {}),
    ("guided_choice", ["a"]),
    ("suffix", "x"),
    ("use_beam_search", True),
]
WRONG_IN_COMPLETIONS = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", [[]]),
    ("prompt", ["a", 1]),
    ("prompt", [1, True]),
    ("prompt", [1, 0.5]),
    ("prompt", [-1]),
    ("prompt", [VOCABULARY]),
    ("prompt", [10**30]),
    ("prompt", 5),
    ("prompt", {"a": 1}),
    ("prompt", None),
    ("prompt", ["a"] * 1025),
    ("max_tokens", 0),  # without echo
    ("logprobs", 21),
    ("logprobs", True),
    ("echo", 1),
]
WRONG_IN_CHAT = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", [1]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "", "content": "x"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", None),
    ("max_tokens", 0),
    ("max_completion_tokens", 0),
    ("logprobs", 1),
    ("top_logprobs", 5),  # without logprobs
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("chat_template", "x"),
    ("reasoning_effort", "high"),
    ("chat_template_kwargs", {"tokenize": True}),
    ("chat_template_kwargs", {"add_generation_prompt": False}),
    ("chat_template_kwargs", {"special_tokens_in_content": True}),
]
HARMLESS_IN_CHAT = {
    "tools": [],
    "tool_choice": "auto",
    "functions": [],
    "parallel_tool_calls": False,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "stop": [],
    "logit_bias": {},
    "stop_token_ids": [],
}


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [(path, *case) for case in WRONG_IN_BOTH for path in (CHAT, COMPLETIONS)]
    + [(COMPLETIONS, *case) for case in WRONG_IN_COMPLETIONS]
    + [(CHAT, *case) for case in WRONG_IN_CHAT],
    ids=str,
)
async def test_a_wrong_value_is_a_400_that_names_the_field(api, engine, path, field, value):
    body = {"prompt": "hi", "max_tokens": 4} if path == COMPLETIONS else {"messages": messages("hi")}
    status, answer = await api.post(path, **{**body, field: value})
    assert (status, answer["error"]["param"]) == (400, field)
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]
    assert engine.seen == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        (COMPLETIONS, {}, "prompt"),
        (CHAT, {}, "messages"),
        (
            CHAT,
            {"messages": messages("x"), "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": messages("x")}, "prompt"),
        ("/detokenize", {"tokens": [VOCABULARY]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
    ids=str,
)
async def test_values_that_do_not_go_together(api, engine, path, body, param):
    status, answer = await api.post(path, **body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert engine.seen == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_null_is_absent(api, path):
    fields = "model temperature top_p top_k min_p n seed stop stop_token_ids logit_bias logprobs max_tokens "
    fields += "presence_penalty stream stream_options tools tool_choice response_format suffix best_of user"
    body = {"prompt": "hi", "messages": messages("hi"), **dict.fromkeys(fields.split())}
    status, answer = await api.post(path, **body)
    assert status == 200, answer


async def test_values_that_ask_for_nothing_are_accepted(api):
    await api.chat("hi", max_tokens=1, **HARMLESS_IN_CHAT)
    await api.complete("hi", suffix="", best_of=1, n=1)


@pytest.mark.parametrize("temperature", [0, 1e-30, 2, 2.0])
async def test_the_ends_of_a_range_are_in_it(api, temperature):
    await api.complete("hi", temperature=temperature, top_p=1e-4, top_k=-1, min_p=1, n=16, max_tokens=1)


@pytest.mark.parametrize("name", ["", "fake", None])
async def test_the_served_model_may_be_left_open(api, name):
    assert (await api.complete("hi", model=name))["model"] == "fake"


async def test_an_unknown_model_is_a_404(api):
    status, answer = await api.post(COMPLETIONS, prompt="hi", model="other")
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (404, "model", "model_not_found")
    assert answer["error"]["message"].endswith("; served: fake")


async def test_the_404_of_a_model_lists_a_bounded_number_of_names(engine):
    names = tuple(f"a-model-with-a-name-{i}" for i in range(1000))
    async with running(engine, names=names) as api:
        _, answer = await api.post(COMPLETIONS, prompt="hi", model="x" * 10_000)
    message = answer["error"]["message"]
    assert "served: a-model-with-a-name-0, a-model-with-a-name-1, " in message
    assert message.endswith(" ...")
    assert len(message) < 600


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": [65] * 512}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 4000}, "prompt"),
        (CHAT, {"messages": messages("x" * 4000)}, "messages"),
    ],
)
async def test_a_prompt_beyond_the_context_names_the_limit(api, engine, path, body, param):
    status, answer = await api.post(path, **body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert "maximum context length is 512 tokens" in answer["error"]["message"]
    assert answer["error"]["code"] == "context_length_exceeded"
    assert engine.seen == []


async def test_echo_alone_may_fill_the_context(api):
    status, _ = await api.post(COMPLETIONS, prompt=[65] * 512, echo=True, max_tokens=0)
    assert status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x"} y',
        b'{"prompt": "x", "user": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"prompt": "x", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda raw: repr(raw[:40]),
)
async def test_a_body_that_is_not_the_json_it_should_be(api, engine, raw):
    headers = {"Content-Type": "application/json"}
    async with api.http.post(COMPLETIONS, data=raw, headers=headers) as response:
        answer = await response.json()
    assert response.status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert engine.seen == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
    ids=str,
)
async def test_a_body_of_another_kind(api, headers):
    async with api.http.post(COMPLETIONS, data=b'{"prompt": "x"}', headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]


async def test_a_body_over_the_cap_is_a_413(api):
    raw = io.BytesIO(b'{"prompt": "' + b"x" * 8 * 1024 * 1024 + b'"}')
    async with api.http.post(COMPLETIONS, data=raw, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 413
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_body_over_the_cap_in_chunks_is_a_413(api):
    async def chunks():
        for _ in range(9):
            yield b" " * 1024 * 1024

    headers = {"Content-Type": "application/json"}
    async with api.http.post(COMPLETIONS, data=chunks(), headers=headers) as response:
        assert response.status == 413
        assert (await response.json())["error"]["message"]


async def test_a_long_list_of_wrong_elements_is_refused_once(api):
    status, answer = await api.post("/detokenize", tokens=["x"] * 200_000)
    assert status == 400
    assert len(answer["error"]["message"]) < 200


async def test_depth_up_to_the_cap_is_fine(api):
    nested = 1
    for _ in range(63):
        nested = [nested]
    await api.complete("hi", user=nested, max_tokens=1)


async def test_more_stop_strings_are_taken_where_the_operator_says_so(engine):
    config = ServerConfig(max_stop_strings=6)
    async with running(engine, config) as api:
        await api.complete(max_tokens=1, stop=list("ABCDEF"))
        status, answer = await api.post("/v1/completions", prompt="a", stop=list("ABCDEFG"))
        async with api.http.get("/openapi.json") as response:
            document = await response.json()
    assert status == 400
    assert "at most 6" in answer["error"]["message"]
    for name in ("CompletionBody", "ChatBody"):
        kinds = document["components"]["schemas"][name]["properties"]["stop"]["anyOf"]
        assert [kind["maxItems"] for kind in kinds if kind.get("type") == "array"] == [6]


def test_the_operator_may_not_ask_for_more_stop_strings_than_there_can_be():
    with pytest.raises(ConfigError, match=r"max_stop_strings must be in 1\.\.64"):
        ServerConfig(max_stop_strings=65)
