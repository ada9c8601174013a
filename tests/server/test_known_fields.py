"""Fields that clients of OpenAI and vLLM know: honoured, refused by name, or ignored with reason."""

import pytest
from conftest import messages
from live import live

from jaxserve_server.protocol import ChatBody, CompletionBody

BODIES = {
    "/v1/completions": (CompletionBody, {"prompt": "hi", "max_tokens": 1}),
    "/v1/chat/completions": (ChatBody, {"messages": messages("hi"), "max_tokens": 1}),
}

# All parameters of openai 3.57 and of vLLM's chat and completion requests, at the time of writing.
CHAT_FIELDS = """
audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
top_logprobs top_p user verbosity web_search_options thinking_token_budget include_reasoning
use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
add_generation_prompt continue_final_message add_special_tokens documents chat_template
chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id
session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_prompt_text
cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
""".split()
COMPLETION_FIELDS = """
best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
stream stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty
watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
allowed_token_ids prompt_logprobs logprob_token_ids bad_words prompt_embeds add_special_tokens
response_format structured_outputs priority request_id session_id return_tokens_as_token_ids
return_token_ids routed_experts_prompt_start cache_salt kv_transfer_params ec_transfer_params vllm_xargs
repetition_detection thinking_token_budget stream_interval
""".split()


@pytest.mark.parametrize(("kind", "names"), [(ChatBody, CHAT_FIELDS), (CompletionBody, COMPLETION_FIELDS)])
def test_every_field_of_openai_and_vllm_has_been_decided_on(kind, names):
    decided = {*kind.model_fields, *kind.not_honoured, *kind.ignored}
    assert set(names) <= decided
    assert not kind.model_fields.keys() & {*kind.not_honoured, *kind.ignored}


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_that_is_not_honoured_is_refused_by_its_name(api, engine, path):
    kind, body = BODIES[path]
    for name in kind.not_honoured:
        for value in ({"changes": "something"}, [1], "changes", 7):
            status, answer = await api.post(path, **body, **{name: value})
            assert (status, answer["error"]["param"]) == (400, name)
            assert name in answer["error"]["message"]
    assert engine.seen == []


@pytest.mark.parametrize("path", BODIES)
async def test_its_values_that_ask_for_nothing_are_taken(api, path):
    kind, body = BODIES[path]
    for name, harmless in kind.not_honoured.items():
        for value in (*harmless, None):
            status, answer = await api.post(path, **body, **{name: value})
            assert status == 200, (name, value, answer)


@pytest.mark.parametrize("path", BODIES)
async def test_what_changes_nothing_is_ignored_whatever_it_is(api, path):
    kind, body = BODIES[path]
    for value in ("x", 1, {"a": [1]}, None):
        status, answer = await api.post(path, **body, **dict.fromkeys(kind.ignored, value))
        assert status == 200, answer


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
    ],
    ids=str,
)
async def test_what_a_later_version_serves_says_so(api, field):
    status, answer = await api.post("/v1/chat/completions", messages=messages("hi"), **field)
    assert status == 400
    assert "is not served yet" in answer["error"]["message"]


@pytest.mark.parametrize("value", [0, -2, 1.5, "3", True, [1]])
@pytest.mark.parametrize("path", [*BODIES, "/tokenize"])
async def test_a_truncation_that_keeps_nothing_is_refused(api, path, value):
    _, body = BODIES.get(path, (None, {"prompt": "hi"}))
    status, answer = await api.post(path, **body, truncate_prompt_tokens=value)
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_a_conversation_is_cut_to_its_last_tokens(api, engine):
    whole = await api.chat("x" * 300, max_tokens=1)
    assert whole["usage"]["prompt_tokens"] > 300
    cut = await api.chat("x" * 300, max_tokens=1, truncate_prompt_tokens=20)
    assert cut["usage"]["prompt_tokens"] == 20
    assert engine.seen[1][0] == engine.seen[0][0][-20:]
    status, _ = await api.post("/v1/chat/completions", messages=messages("x" * 4000))
    assert status == 400
    longest = await api.chat("x" * 4000, max_tokens=12, truncate_prompt_tokens=-1)
    assert longest["usage"]["prompt_tokens"] == engine.max_model_len - 12


async def test_tokenizing_is_cut_as_a_prompt_is(api, engine):
    async def tokens(**body):
        status, answer = await api.post("/tokenize", prompt="abcdef", **body)
        assert status == 200
        assert answer["count"] == len(answer["tokens"])
        return answer["tokens"]

    whole = await tokens()
    assert await tokens(truncate_prompt_tokens=3) == whole[-3:]
    assert await tokens(truncate_prompt_tokens=3, truncation_side="right") == whole[:3]
    assert await tokens(truncate_prompt_tokens=300) == await tokens(truncate_prompt_tokens=-1) == whole


async def test_a_cut_prompt_is_answered_as_its_rest_alone():
    async with live("llama") as api:
        ids = [50 + i for i in range(40)]
        for side, rest in (("left", ids[-11:]), ("right", ids[:11])):
            asked = {"max_tokens": 8, "temperature": 0, "echo": True, "logprobs": 0}
            cut = await api.complete(ids, truncate_prompt_tokens=11, truncation_side=side, **asked)
            alone = await api.complete(rest, **asked)
            assert cut["choices"] == alone["choices"]
            assert cut["usage"]["prompt_tokens"] == 11
