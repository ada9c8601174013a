"""POST /v1/completions, whole: what the body says, against outputs computed by hand (see fake_engine)."""

from types import SimpleNamespace

import pytest
from conftest import running
from fake_engine import BOS, EOS, FakeEngine
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from jaxserve.tokenizer import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def rule(num_prompt_tokens, num_tokens, choice=0):
    return "".join(LETTERS[(num_prompt_tokens + i + choice) % 26] for i in range(num_tokens))


async def test_the_body_of_a_completion(api):
    answer = await api.complete("hi", max_tokens=5)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake"
    assert answer["choices"] == [
        # <bos>, h, i: three prompt tokens
        {"index": 0, "text": rule(3, 5), "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_sixteen_tokens_by_default(api):
    assert (await api.complete("hi"))["usage"]["completion_tokens"] == 16


async def test_the_end_of_text_has_no_text_and_no_stop_reason(api, engine):
    engine.eos_after = 2
    (choice,) = (await api.complete("hi", max_tokens=9))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (rule(3, 2), "stop", None)


async def test_ignore_eos_goes_on(api, engine):
    engine.eos_after = 2
    (choice,) = (await api.complete("hi", max_tokens=9, ignore_eos=True))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (rule(3, 9), "length")


async def test_a_stop_string_is_cut_and_named(api):
    (choice,) = (await api.complete("hi", max_tokens=9, stop=["zz", "fg"]))["choices"]  # d e f g
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("de", "stop", "fg")


async def test_a_stop_string_is_kept_when_asked_for(api):
    answer = await api.complete("hi", max_tokens=9, stop="fg", include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == "defg"


async def test_a_stop_token_id_is_named(api):
    (choice,) = (await api.complete("hi", max_tokens=9, stop_token_ids=[ord("f")]))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("de", "stop", ord("f"))


@pytest.mark.parametrize(
    ("prompt", "counts"),
    [
        ("hi", [3]),
        (["hi", "there"], [3, 6]),
        ([7, 8, 9], [3]),
        ([[7], [8, 9]], [1, 2]),
    ],
)
async def test_every_form_of_prompt(api, engine, prompt, counts):
    answer = await api.complete(prompt, max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == [rule(count, 2) for count in counts]
    assert answer["usage"]["prompt_tokens"] == sum(counts)


async def test_no_special_tokens_when_they_are_not_wanted(api, engine):
    await api.complete("hi", add_special_tokens=False)
    assert engine.seen[-1][0] == list(b"hi")


async def test_the_index_of_a_choice_counts_prompts_first(api):
    answer = await api.complete(["a", "bcd"], n=2, max_tokens=2)
    expected = [rule(2, 2), rule(2, 2, 1), rule(4, 2), rule(4, 2, 1)]
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(expected))
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 8


async def test_best_of_returns_the_n_most_likely(api, engine):
    answer = await api.complete("hi", n=2, best_of=4, max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert engine.seen[-1][1].n == 4
    assert answer["usage"]["completion_tokens"] == 12


async def test_echo_shows_the_prompt(api):
    assert (await api.complete("hi", echo=True, max_tokens=3))["choices"][0]["text"] == "hi" + rule(3, 3)


async def test_echo_shows_the_text_of_a_prompt_of_ids(api):
    answer = await api.complete(list(b"hey"), echo=True, max_tokens=1)
    assert answer["choices"][0]["text"] == "hey" + rule(3, 1)


async def test_logprobs_are_four_lists_of_one_length(api):
    (choice,) = (await api.complete("hi", max_tokens=3, logprobs=2))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["d", "e", "f"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"d": -0.5, "e": -1.0}, {"e": -0.5, "f": -1.0}, {"f": -0.5, "g": -1.0}],
        "text_offset": [0, 1, 2],
    }


async def test_logprobs_of_zero_show_the_chosen_token(api):
    (choice,) = (await api.complete("hi", max_tokens=2, logprobs=0))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"d": -0.5}, {"e": -0.5}]


async def test_echo_with_logprobs_begins_with_null(api):
    (choice,) = (await api.complete("hi", max_tokens=1, logprobs=1, echo=True))["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<bos>", "h", "i", "d"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 0, 1, 2]


async def test_echo_with_no_tokens_scores_the_prompt_only(api, engine):
    (choice,) = (await api.complete("hi", max_tokens=0, logprobs=1, echo=True))["choices"]
    assert choice["text"] == "hi"
    assert choice["logprobs"]["tokens"] == ["<bos>", "h", "i"]
    assert choice["finish_reason"] == "length"


async def test_logprobs_agree_with_a_text_cut_at_a_stop_string(api):
    (choice,) = (await api.complete("hi", max_tokens=9, logprobs=0, stop="fg"))["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == "de"


async def test_prompt_logprobs_have_one_entry_for_each_token(api):
    (choice,) = (await api.complete("hi", max_tokens=1, prompt_logprobs=1))["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert rest[0] == {str(ord("h")): {"logprob": -0.5, "rank": 1, "decoded_token": "h"}}
    assert len(rest) == 2


async def test_parts_of_characters_have_labels_of_their_own():
    async with running(FakeEngine(alphabet="é€".encode())) as api:
        (choice,) = (await api.complete([1, 2, 3, 4, 5], max_tokens=5, logprobs=3))["choices"]
    assert choice["text"] == "é€"
    assert choice["logprobs"]["tokens"] == [rf"bytes:\x{byte:02x}" for byte in "é€".encode()]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1]
    assert all(len(top) == 3 for top in choice["logprobs"]["top_logprobs"])


async def test_a_prompt_may_end_inside_a_character():
    async with running(FakeEngine(alphabet=b"\xac")) as api:
        answer = await api.complete(list("a€".encode()[:-1]), max_tokens=1, echo=True, logprobs=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "a€"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1]


async def test_a_limit_inside_a_character_gives_the_replacement_character():
    async with running(FakeEngine(alphabet="€".encode())) as api:
        (choice,) = (await api.complete([1, 2, 3], max_tokens=2))["choices"]
    assert choice["text"] == "\ufffd"


async def test_a_limit_beyond_the_context_is_clamped(api, engine):
    answer = await api.complete([65] * 500, max_tokens=10**6)
    assert answer["usage"]["completion_tokens"] == engine.max_model_len - 500


async def test_what_the_client_leaves_open_is_the_models_own_default(engine):
    engine.default_sampling_params = {"temperature": 0.25, "top_k": 7}
    async with running(engine) as api:
        await api.complete("hi", top_k=3)
        await api.complete("hi", temperature=None)
    first, second = (params for _, params, _ in engine.seen)
    assert (first.temperature, first.top_k, first.top_p) == (0.25, 3, 1.0)
    assert (second.temperature, second.top_k) == (0.25, 7)


async def test_every_sampling_field_reaches_the_engine(api, engine):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": -(2**63),
        "min_tokens": 2,
        "max_tokens": 3,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
    }
    lists = {"stop_token_ids": [1, 2], "allowed_token_ids": [3, 100], "bad_words": ["x"]}
    await api.complete("hi", **fields, **lists, logit_bias={"5": 200, "7": -1}, priority=-3, cache_salt="s")
    _, params, other = engine.seen[-1]
    assert {name: getattr(params, name) for name in fields} == fields
    assert {name: list(getattr(params, name)) for name in lists} == lists
    assert params.logit_bias == {5: 100.0, 7: -1.0}
    assert other == {"priority": -3, "cache_salt": "s"}


async def test_fields_that_are_documented_as_ignored(api):
    await api.complete("hi", user="u", metadata={"a": "b"}, store=True, service_tier="auto", unknown=[1])


async def test_a_model_without_a_tokenizer_takes_token_ids(engine):
    engine.tokenizer = None
    async with running(engine) as api:
        answer = await api.complete([BOS, 1, 2], max_tokens=3, logprobs=1)
        status, refusal = await api.post("/v1/completions", prompt="hi")
    assert answer["choices"][0]["logprobs"]["tokens"] == [f"token_id:{ord(c)}" for c in rule(3, 3)]
    assert (status, refusal["error"]["param"]) == (400, "prompt")


async def test_special_tokens_are_shown_when_asked_for(api, engine):
    engine.eos_after, engine.alphabet = None, b"a"
    answer = await api.complete([EOS, 1], max_tokens=1, echo=True, skip_special_tokens=False)
    assert answer["choices"][0]["text"] == "<eos>\x01a"


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "rld"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "<bos>he"),
        ({"truncate_prompt_tokens": 100}, "<bos>hello world"),
        ({"truncate_prompt_tokens": -1}, "<bos>hello world"),
    ],
)
async def test_a_prompt_is_cut_where_the_client_asks_for_it(api, engine, options, kept):
    answer = await api.complete("hello world", max_tokens=1, echo=True, logprobs=0, **options)
    (choice,) = answer["choices"]
    text = kept.removeprefix("<bos>")
    assert choice["text"][:-1] == text
    assert "".join(choice["logprobs"]["tokens"][:-1]) == kept
    assert choice["logprobs"]["text_offset"][-1] == len(text)
    assert answer["usage"]["prompt_tokens"] == len(choice["logprobs"]["tokens"]) - 1
    await api.chat("hello world", max_tokens=1, **options)
    assert len(engine.seen[-1][0]) == min(options["truncate_prompt_tokens"] % 10**3, 28)


async def test_a_prompt_is_cut_to_leave_room_for_the_answer(api, engine):
    for limit, kept in [(12, 500), (10**6, 511)]:
        answer = await api.complete([65] * 600, max_tokens=limit, truncate_prompt_tokens=-1)
        assert answer["usage"]["prompt_tokens"] == kept
        assert answer["usage"]["completion_tokens"] == engine.max_model_len - kept
        await api.chat("x" * 600, max_tokens=limit, truncate_prompt_tokens=-1)
        assert len(engine.seen[-1][0]) == kept


async def test_the_text_of_ids_has_no_space_that_the_tokenizer_put_first(engine):
    hf = HfTokenizer(models.WordLevel({"<unk>": 0, "▁he": 1, "llo": 2, "▁you": 3}, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    hf.decoder = decoders.Sequence(parts)
    assets = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chat_template"))
    engine.tokenizer = Tokenizer(
        SimpleNamespace(tokenizer=hf, eos_token_ids=(), special_tokens_map={}, **assets)
    )
    async with running(engine) as api:
        answer = await api.complete([1, 2, 3], echo=True, logprobs=0, max_tokens=0)
    assert answer["choices"][0]["text"] == hf.decode([1, 2, 3]) == "hello you"
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 2, 5]
