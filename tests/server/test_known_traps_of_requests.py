"""The known traps of requests, one test each: refusals, templates, clients that leave."""

import asyncio
import contextlib
import json

import pytest
import pytest_asyncio
from conftest import messages
from live import byte_ids, forced, is_idle, live

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VOCABULARY, CONTEXT = 400, 512

# As Llama 2's and Mistral's: it writes the BOS, joins strings, insists on roles, opens tool calls.
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '[' + m.role + ']' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '(' + call.function.name + ' ' + call.function.arguments.city + ')' }}{% endfor %}"
    "<|end|>{% endfor %}"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api():
    async with live("llama", chat_template=STRICT) as api:
        yield api


async def refusal(api, path, **body):
    """The error's (param, message), after which the server goes on."""
    body = {"prompt": "hi", "messages": messages("hi"), "max_tokens": 2, **body}
    status, answer = await api.post(path, **body)
    assert status == 400, answer
    async with api.http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 400  # before the 200 of a stream
        assert (await response.json()) == answer
    assert (await api.complete("hi", max_tokens=2, ignore_eos=True))["usage"]["completion_tokens"] == 2
    assert answer["error"]["type"] == "invalid_request_error"
    return answer["error"]["param"], answer["error"]["message"]


async def ids_of(api, turns, **options):
    status, answer = await api.post("/tokenize", messages=turns, **options)
    assert status == 200, answer
    return answer["tokens"]


def names(api, ids):
    return [api.engine.tokenizer._hf.id_to_token(token) for token in ids]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [-1], [VOCABULARY], [[5], [VOCABULARY]]])
async def test_prompts_that_are_empty_or_out_of_the_vocabulary(api, prompt):
    param, _ = await refusal(api, COMPLETIONS, prompt=prompt)
    assert param == "prompt"


async def test_the_last_id_of_the_vocabulary_is_a_prompt(api):
    assert (await api.complete([VOCABULARY - 1], max_tokens=1))["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_logit_bias_of_an_id_out_of_the_vocabulary_beside_another_request(api, path):
    other = {"max_tokens": 150, "temperature": 1, "seed": 4, "ignore_eos": True, "return_token_ids": True}
    alone = await api.complete("beside", **other)
    running = asyncio.create_task(api.complete("beside", **other))
    refusals = 0
    while not running.done():
        status, answer = await api.post(
            path, prompt="x", messages=messages("x"), logit_bias={str(VOCABULARY): 5}
        )
        assert (status, answer["error"]["param"]) == (400, "logit_bias")
        refusals += 1
    assert refusals >= 2
    assert (await running)["choices"] == alone["choices"]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("ids", [[VOCABULARY], [-1], [5, 2**31], [2**63 - 1]])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stop_token_ids_out_of_the_vocabulary(api, path, field, ids):
    param, _ = await refusal(api, path, **{field: ids})
    assert param == field


async def test_a_stop_token_id_in_the_vocabulary_stops(api):
    letters = byte_ids(api, b"abc")
    answer = await api.complete([300], **forced(letters), stop_token_ids=[letters[1]])
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", letters[1])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_temperature_nan(api, path, number):
    raw = json.dumps({"prompt": "x", "messages": messages("x"), "temperature": 0}).replace(
        ": 0}", f": {number}}}"
    )
    headers = {"Content-Type": "application/json"}
    async with api.http.post(path, data=raw, headers=headers) as response:
        answer = await response.json()
    assert response.status == 400
    assert answer["error"]["type"] == "invalid_request_error"


async def greedy(api):
    return (await api.complete("the", temperature=0, max_tokens=12, return_token_ids=True))["choices"]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-30},
        {"temperature": 5e-324},
        {"temperature": 2, "top_p": 1e-4},
        {"temperature": 2, "top_p": 5e-324},
        {"temperature": 2, "top_k": 1},
        {"temperature": 2, "min_p": 1},
    ],
)
async def test_top_p_1e_4_and_other_extremes_are_greedy(api, options):
    answer = await api.complete("the", max_tokens=12, return_token_ids=True, seed=9, **options)
    assert answer["choices"] == await greedy(api)


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1e30, 1.7e308])
async def test_a_repetition_penalty_beyond_float32(api, penalty):
    a, b = byte_ids(api, b"ab")
    body = {"allowed_token_ids": [a, b], "max_tokens": 6, "repetition_penalty": penalty, "seed": 1}
    (choice,) = (await api.complete([a], logit_bias={a: 9, b: 9}, **body))["choices"]
    # Logits are positive: what has come is all that comes, or the other one comes first.
    assert choice["text"] == "aaaaaa" if penalty < 1 else choice["text"].startswith("b")


@pytest.mark.parametrize("value", [0.01, 1.5, "1", True, -2])
async def test_top_k_0_01(api, value):
    param, _ = await refusal(api, COMPLETIONS, top_k=value)
    assert param == "top_k"


async def test_two_requests_with_one_x_request_id(api):
    async def ask(prompt, stream):
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": stream}
        async with api.http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "twice"}) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (200, "twice")
            raw = await response.text()
        if not stream:
            return json.loads(raw)["choices"][0]["text"]
        events = [json.loads(line[6:]) for line in raw.split("\n\n")[:-2]]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    prompts = ["one", "another"]
    alone = [await ask(prompt, False) for prompt in prompts]
    together = await asyncio.gather(*(ask(prompt, stream) for prompt in prompts for stream in (False, True)))
    assert together == [alone[0], alone[0], alone[1], alone[1]]
    assert alone[0] != alone[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_disconnect_while_queued(api, path, stream):
    assert await is_idle(api.engine)
    long = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
    busy = [asyncio.create_task(api.complete([7, n], **long)) for n in range(8)]  # every slot
    await until(lambda: api.engine.stats().num_running == 8)
    body = {"prompt": "late", "messages": messages("late"), "n": 3, "stream": stream, **long}
    late = asyncio.create_task(api.http.post(path, json=body))
    await until(lambda: api.engine.stats().num_waiting == 3)
    if stream:
        (await late).close()
    else:
        late.cancel()
    await until(lambda: api.engine.stats().num_waiting == 0)
    assert not any(task.done() for task in busy), "the queue emptied only because a slot came free"
    answers = await asyncio.gather(*busy)
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {400}
    assert await is_idle(api.engine)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_disconnect_while_running(api, path, stream):
    assert await is_idle(api.engine)
    body = {"prompt": ["a", "b"], "messages": messages("x"), "n": 2, "ignore_eos": True, "max_tokens": 450}
    task = asyncio.create_task(api.http.post(path, json={**body, "stream": stream}))
    await until(lambda: api.engine.stats().num_running >= 2)
    if stream:
        response = await task
        await response.content.readline()
        response.close()
    else:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    before = api.engine.stats().generation_tokens
    assert await is_idle(api.engine)
    assert api.engine.stats().generation_tokens - before < 450, "it ran to its end"


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_second_bos_from_a_template_that_already_wrote_one(api):
    bos = api.engine.tokenizer.bos_token_id
    for options in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        ids = await ids_of(api, messages("hi"), **options)
        assert (ids[0], ids.count(bos)) == (bos, 1)
        answer = await api.chat("hi", max_tokens=1, return_token_ids=True, **options)
        assert answer["prompt_token_ids"] == ids
        assert answer["usage"]["prompt_tokens"] == len(ids)
    # Nor from a prompt that holds one.
    answer = await api.complete("<s>hi", max_tokens=1, return_token_ids=True)
    assert names(api, answer["choices"][0]["prompt_token_ids"]) == ["<s>", "▁", "hi"]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["user", "user"], "Conversation roles must alternate"),
        (["system", "user"], "System role not supported"),
        (["developer", "user"], "System role not supported"),
        (["assistant"], "Conversation roles must alternate"),
    ],
)
async def test_user_user_or_system_roles_with_a_strict_template(api, roles, message):
    turns = [{"role": role, "content": "x"} for role in roles]
    assert await refusal(api, CHAT, messages=turns) == ("messages", message)


async def test_content_parts_with_a_string_only_template(api):
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    ids = await ids_of(api, [{"role": "user", "content": parts}])
    assert ids == await ids_of(api, messages("hello"))
    await api.chat(parts, max_tokens=1)
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    param, message = await refusal(api, CHAT, messages=[{"role": "user", "content": image}])
    assert param == "messages"
    assert "image_url" in message


CALL = {"id": "chatcmpl-tool-1", "type": "function"}


def tool_turns(arguments):
    call = CALL | {"function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi", "name": "someone"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
    ]


async def test_null_content_with_tool_calls(api):
    ids = await ids_of(api, tool_turns('{"city": "Ulm"}'))
    expected = api.engine.tokenizer._hf.encode("[user]hi<|end|>[assistant](weather Ulm)<|end|>").ids
    assert ids == expected
    status, answer = await api.post(CHAT, messages=tool_turns('{"city": "Ulm"}'), max_tokens=1)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, len(expected))


async def test_string_tool_arguments_replayed(api):
    as_text = await ids_of(api, tool_turns('{"city": "Köln"}'))
    assert as_text == await ids_of(api, tool_turns({"city": "Köln"}))
    assert api.engine.tokenizer._hf.decode(as_text).endswith("(weather Köln)")
    for wrong in ("{", "[1]", "3", [1]):
        param, _ = await refusal(api, CHAT, messages=tool_turns(wrong))
        assert param == "messages"


async def test_special_token_text_in_user_content(api):
    hf = api.engine.tokenizer._hf
    ids = await ids_of(api, messages("a<|end|></s><s>b"))
    # Of the template: one BOS, one end. What the user wrote is text.
    assert [name for name in names(api, ids) if name in ("<s>", "</s>", "<|end|>")] == ["<s>", "<|end|>"]
    assert hf.decode(ids) == " [user]a<|end|></s><s>b"
    parts = [{"type": "text", "text": "a<|e"}, {"type": "text", "text": "nd|></s><s>b"}]
    assert await ids_of(api, [{"role": "user", "content": parts}]) == ids
    # A text prompt is the client's own: there a control token is one.
    answer = await api.complete("a<|end|>", max_tokens=1, return_token_ids=True)
    assert names(api, answer["choices"][0]["prompt_token_ids"]) == ["<s>", "▁a", "<|end|>"]


async def test_max_tokens_inside_a_tool_call(api):
    """Tools are not served: they are refused by name, and the limit then ends a plain answer."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    assert (await refusal(api, CHAT, tools=tools))[0] == "tools"
    named = {"type": "function", "function": {"name": "weather"}}
    assert (await refusal(api, CHAT, tool_choice=named))[0] == "tool_choice"
    assert (await refusal(api, CHAT, tool_choice="required"))[0] == "tool_choice"
    answer = await api.chat("hi", tools=[], tool_choice=None, max_tokens=2, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert not answer["choices"][0]["message"].get("tool_calls")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 1}}},
        ),
        ("structured_outputs", {"regex": "(["}),
        ("structured_outputs", {"json": "{"}),
        ("structured_outputs", {"grammar": "root ::= "}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_bad_regex_or_schema_then_a_plain_request(api, path, field, value):
    """Structured output is not served: it is refused by name, good or bad, and nothing stays behind."""
    before = await greedy(api)
    assert (await refusal(api, path, **{field: value}))[0] == field
    assert await greedy(api) == before


@pytest.mark.parametrize("limit", [10**6, 2**31, 2**63 - 1])
async def test_prompt_and_max_tokens_over_the_context(api, limit):
    answer = await api.complete([7] * 500, max_tokens=limit, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == CONTEXT - 500
    assert answer["choices"][0]["finish_reason"] == "length"
    for field in ("max_tokens", "max_completion_tokens"):
        answer = await api.chat("hi " * 100, **{field: limit}, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == CONTEXT
        assert answer["choices"][0]["finish_reason"] == "length"
    param, message = await refusal(api, COMPLETIONS, prompt=[7] * CONTEXT, max_tokens=limit)
    assert param == "prompt"
    assert f"maximum context length is {CONTEXT} tokens" in message
    param, message = await refusal(api, CHAT, messages=messages("hi " * 600))
    assert param == "messages"
    assert f"maximum context length is {CONTEXT} tokens" in message
