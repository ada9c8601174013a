"""POST /v1/chat/completions, whole."""

import pytest
from conftest import messages, running
from fake_engine import FakeEngine
from test_completions import rule

# "[user]hi[assistant]" is 19 bytes
CHAT_TOKENS = len("[user]hi[assistant]")


async def test_the_body_of_a_chat_completion(api, engine):
    answer = await api.chat("hi", max_tokens=4)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": rule(CHAT_TOKENS, 4), "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == CHAT_TOKENS
    assert bytes(engine.seen[-1][0]) == b"[user]hi[assistant]"


async def test_without_a_limit_the_rest_of_the_context_is_the_limit(api, engine):
    answer = await api.chat("hi")
    assert answer["usage"]["completion_tokens"] == engine.max_model_len - CHAT_TOKENS
    # The engine is told of no limit, because its pool may hold less than the context.
    assert engine.seen[-1][1].max_tokens is None


async def test_max_completion_tokens_wins(api, engine):
    await api.chat("hi", max_tokens=50, max_completion_tokens=3)
    assert engine.seen[-1][1].max_tokens == 3


async def test_a_final_message_is_continued(api, engine):
    await api.chat("hi", "I am", max_tokens=1, continue_final_message=True)
    assert bytes(engine.seen[-1][0]) == b"[user]hi[assistant]I am"


async def test_no_generation_prompt_when_it_is_not_wanted(api, engine):
    await api.chat("hi", max_tokens=1, add_generation_prompt=False)
    assert bytes(engine.seen[-1][0]) == b"[user]hi"


async def test_text_parts_are_joined_and_null_content_is_empty(api, engine):
    turns = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user"},
    ]
    status, _ = await api.post("/v1/chat/completions", messages=turns, max_tokens=1)
    assert status == 200
    assert bytes(engine.seen[-1][0]) == b"[system]ab[assistant][user][assistant]"


async def test_n_choices(api):
    answer = await api.chat("hi", n=3, max_tokens=2)
    expected = [rule(CHAT_TOKENS, 2, j) for j in range(3)]
    assert [c["message"]["content"] for c in answer["choices"]] == expected
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens"] == CHAT_TOKENS


async def test_logprobs_hold_the_chosen_token_and_the_top(api):
    answer = await api.chat("hi", max_tokens=1, logprobs=True, top_logprobs=2)
    assert answer["choices"][0]["logprobs"]["content"] == [
        {
            "token": "t",
            "logprob": -0.5,
            "bytes": [116],
            "top_logprobs": [
                {"token": "t", "logprob": -0.5, "bytes": [116]},
                {"token": "u", "logprob": -1.0, "bytes": [117]},
            ],
        }
    ]


async def test_logprobs_without_top_hold_the_chosen_token(api):
    answer = await api.chat("hi", max_tokens=2, logprobs=True)
    assert [entry["top_logprobs"] for entry in answer["choices"][0]["logprobs"]["content"]] == [[], []]


@pytest.mark.parametrize("more", [{}, {"stop": "g"}, {"stop_token_ids": [ord("g")]}, {"eos": 9}])
async def test_the_bytes_of_all_logprobs_are_the_text(more):
    engine = FakeEngine(alphabet="aé€😀g".encode(), eos_after=more.pop("eos", None))
    async with running(engine) as api:
        answer = await api.chat("hi", max_tokens=20, logprobs=True, **more)
    (choice,) = answer["choices"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    content = choice["message"]["content"].encode()
    # A text that ends inside a character ends with U+FFFD, one that begins inside one begins with it.
    assert spelled.decode(errors="replace").encode() == content


async def test_prompt_logprobs_of_a_chat(api):
    answer = await api.chat("hi", max_tokens=1, prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == CHAT_TOKENS
    assert answer["prompt_logprobs"][0] is None


async def test_template_variables_reach_the_template(engine):
    engine.tokenizer._chat.source = "{{ mood }}"
    async with running(engine) as api:
        await api.chat("hi", max_tokens=1, chat_template_kwargs={"mood": "calm"})
    assert bytes(engine.seen[-1][0]) == b"calm"


async def test_a_templates_refusal_is_a_400_with_its_words(engine):
    engine.tokenizer._chat.source = "{{ raise_exception('roles must alternate') }}"
    async with running(engine) as api:
        status, answer = await api.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    assert (status, answer["error"]["message"]) == (400, "roles must alternate")


async def test_a_user_cannot_write_control_tokens(api, engine):
    await api.chat("<eos>", max_tokens=1)
    assert bytes(engine.seen[-1][0]) == b"[user]<eos>[assistant]"


async def test_tokenize_and_back(api):
    status, answer = await api.post("/tokenize", prompt="hé", return_token_strs=True)
    assert status == 200
    assert answer["tokens"] == [256, *"hé".encode()]
    assert (answer["count"], answer["max_model_len"]) == (4, 512)
    assert answer["token_strs"][:2] == ["<bos>", "h"]
    status, back = await api.post("/detokenize", tokens=list("hé".encode()))
    assert (status, back["prompt"]) == (200, "hé")


async def test_tokenize_messages(api):
    _, answer = await api.post("/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert bytes(answer["tokens"]) == b"[user]hi[assistant]"
    assert answer["token_strs"] is None


async def test_what_counting_and_templating_need(api, engine):
    async with api.http.get("/tokenizer_info") as response:
        info = await response.json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<bos>", "<eos>", None)
    assert info["chat_template"] == engine.tokenizer.chat_template
    for name, token_id in (("bos_token", 256), ("eos_token", 257)):
        _, answer = await api.post("/tokenize", prompt=info[name], add_special_tokens=False)
        assert answer["tokens"] == [token_id]
    engine.tokenizer = None
    async with api.http.get("/tokenizer_info") as response:
        assert response.status == 400
        assert "no tokenizer" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
async def test_numbers_that_are_not_json_are_refused_inside_tool_arguments_too(api, number):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": f'{{"x": {number}}}'}}
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    status, answer = await api.post("/v1/chat/completions", messages=history)
    assert (status, answer["error"]["param"]) == (400, "messages")


async def test_tools_do_not_come_in_as_template_variables(api):
    body = {"messages": messages("hi"), "chat_template_kwargs": {"tools": []}}
    status, answer = await api.post("/v1/chat/completions", **body)
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
