"""The known traps of generation, one test each: tokens, text, stops, log-probabilities.

What is right is said by known bytes, Python's codecs and the `tokenizers` library. Sequences of tokens are
forced (`forced`), since random weights say nothing in particular.
"""

import codecs
import contextlib
import itertools
import json
from pathlib import Path

import pytest
import pytest_asyncio
from conftest import messages
from live import byte_ids, forced, live, tokens_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
KINDS = ["gpt2", "llama"]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers():
    async with contextlib.AsyncExitStack() as stack:
        yield {kind: await stack.enter_async_context(live(kind)) for kind in KINDS}


async def both_ways(api, **body):
    """The first choice of a completion, after checking that the stream says the same."""
    whole = (await api.complete(**body))["choices"]
    texts, ends = ["" for _ in whole], [None for _ in whole]
    for event in await api.events(COMPLETIONS, **body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                ends[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole]
    assert ends == [choice["finish_reason"] for choice in whole]
    return whole[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["rest of the character", "something else"])
async def test_a_prompt_of_token_ids_ending_inside_a_character(servers, kind, end):
    api = servers[kind]
    spelled = byte_ids(api, "aé😀".encode())
    prompt, rest = spelled[:-1], spelled[-1:] if end == "rest of the character" else byte_ids(api, b"x")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    before = decoder.decode("aé😀".encode()[:-1])
    after = decoder.decode(b"\x80" if end == "rest of the character" else b"x", final=True)
    choice = await both_ways(api, prompt=prompt, **forced(rest))
    assert (choice["text"], choice["finish_reason"]) == (after, "length")
    echoed = await both_ways(api, prompt=prompt, echo=True, logprobs=0, **forced(rest))
    assert echoed["text"] == before + after
    # a, é in two bytes, three of the four bytes of the emoji, and the token that came.
    assert echoed["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 2 if after == "😀" else 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("limit", "text"), [(2, "é"), (3, "é\ufffd"), (5, "é\ufffd"), (6, "é😀")])
async def test_a_length_limit_inside_a_multi_byte_character(servers, kind, limit, text):
    api = servers[kind]
    body = {**forced(byte_ids(api, "é😀".encode())), "max_tokens": limit}
    choice = await both_ways(api, prompt=[300], **body)
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    answer = await api.chat("", logprobs=True, **body)
    assert answer["choices"][0]["message"]["content"] == text
    spelled = b"".join(bytes(entry["bytes"]) for entry in answer["choices"][0]["logprobs"]["content"])
    assert spelled == "é😀".encode()[:limit]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_random_byte_tokens_and_every_frame_parses(servers, kind, path):
    api = servers[kind]
    byte_of = {token: bytes([byte]) for byte, token in enumerate(byte_ids(api, bytes(range(256))))}
    body = {
        "prompt": "x",
        "messages": [{"role": "user", "content": "x"}],
        "n": 3,
        "temperature": 2,
        "seed": 5,
    }
    body |= {"allowed_token_ids": list(byte_of), "max_tokens": 80, "return_token_ids": True, "stream": True}
    body |= {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3}
    async with api.http.post(path, json=body) as response:
        raw = await response.read()
    frames = raw.decode("utf-8").split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    texts, ids = {}, {}
    for frame in frames[:-2]:
        assert "\n" not in frame
        for choice in json.loads(frame.removeprefix("data: "))["choices"]:
            piece = choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    assert len(texts) == 3
    for index, text in texts.items():
        assert len(ids[index]) == 80
        assert text == b"".join(byte_of[token] for token in ids[index]).decode("utf-8", "replace")


async def test_sentencepiece_leading_spaces(servers):
    api = servers["llama"]
    hf = api.engine.tokenizer._hf
    world = tokens_of(api, "▁w", "or", "ld")
    body = {"logprobs": 0, **forced(world)}
    # A continuation does not begin a text: the space of its first token stays.
    choice = await both_ways(api, prompt="hello", **body)
    assert choice["text"] == " world"
    assert choice["logprobs"]["text_offset"] == [0, 2, 4]
    # The space that the tokenizer puts before a prompt is not a part of it.
    echoed = await both_ways(api, prompt="hello", echo=True, **body)
    assert echoed["text"] == "hello world"
    assert hf.decode(hf.encode("hello").ids + world) == " hello world"
    assert [hf.id_to_token(i) for i in hf.encode("hello").ids] == ["<s>", "▁he", "llo"]
    assert echoed["logprobs"]["text_offset"] == [0, 0, 2, 5, 7, 9]
    # Where the text of ids is asked for, it is what the ids say.
    echoed = await both_ways(api, prompt=hf.encode("hello").ids, echo=True, **body)
    assert echoed["text"] == " hello world"
    assert echoed["logprobs"]["text_offset"] == [0, 0, 3, 6, 8, 10]
    answer = await api.chat("", logprobs=True, **forced(world))
    assert answer["choices"][0]["message"]["content"] == " world"


async def test_special_tokens_and_spaces_in_an_echoed_prompt_have_their_places(servers):
    api = servers["llama"]
    prompt = "<|user|>hi</s> 日"
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = (await api.complete(**body))["choices"]
    names = [api.engine.tokenizer._hf.id_to_token(i) for i in api.engine.tokenizer._hf.encode(prompt).ids]
    assert names == ["<s>", "<|user|>", "▁", "hi", "</s>", "▁", "▁", "<0xE6>", "<0x97>", "<0xA5>"]
    assert choice["text"] == prompt
    assert choice["logprobs"]["text_offset"] == [0, 0, 8, 8, 10, 14, 14, 15, 15, 15]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stop_over_three_tokens(servers, kind):
    api = servers[kind]
    body = {"prompt": [300], **forced(byte_ids(api, b"abcdefgh"))}
    for stop, text in [("cde", "ab"), (["xx", "bcde"], "a"), (["cdef", "de"], "abc"), ("abc", "")]:
        choice = await both_ways(api, stop=stop, **body)
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert choice["stop_reason"] == (stop if isinstance(stop, str) else stop[1])
        shown = await both_ways(api, stop=stop, include_stop_str_in_output=True, **body)
        assert shown["text"] == text + choice["stop_reason"]
    # The beginning of a stop string that does not come is text after all.
    assert (await both_ways(api, stop="ghi", **body))["text"] == "abcdefgh"


async def test_a_stop_that_ends_inside_a_token(servers):
    api = servers["gpt2"]
    body = forced(tokens_of(api, "th", "ing", "co", "ber"))
    for stop, text, shown in [
        ("hi", "t", "thi"),
        ("in", "th", "thin"),
        ("n", "thi", "thin"),
        ("cob", "thing", "thingcob"),
    ]:
        assert (await both_ways(api, prompt=[300], stop=stop, **body))["text"] == text
        kept = {**body, "stop": stop, "include_stop_str_in_output": True}
        assert (await both_ways(api, prompt=[300], **kept))["text"] == shown
        for options, content in [({**body, "stop": stop}, text), (kept, shown)]:
            answer = await api.chat("", logprobs=True, **options)
            (choice,) = answer["choices"]
            spelled = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
            assert choice["message"]["content"] == content == spelled.decode()


@pytest.mark.parametrize("stop", ["ng", "c", "thi", "obe", ["er", "zz"], "x", None])
async def test_stop_and_logprobs_lengths(servers, stop):
    api = servers["gpt2"]
    names = ["th", "ing", "co", "ber"]
    body = {"prompt": [300], "stop": stop, "return_token_ids": True, **forced(tokens_of(api, *names))}
    choice = await both_ways(api, logprobs=2, **body)
    whole = "thingcober"
    cuts = [whole.find(s) for s in ([stop] if isinstance(stop, str) else stop or []) if s in whole]
    text = whole[: min(cuts, default=None)]
    assert choice["text"] == text
    # A token is shown where some of its text is.
    begins = [0, *itertools.accumulate(len(name) for name in names[:-1])]
    count = sum(begin < len(text) for begin in begins)
    assert choice["logprobs"]["tokens"] == names[:count]
    assert choice["logprobs"]["text_offset"] == begins[:count]
    assert {len(values) for values in choice["logprobs"].values()} == {count}
    assert choice["token_ids"] == tokens_of(api, *names)[:count]


async def test_top_logprobs_of_byte_tokens(servers):
    api = servers["llama"]
    hf = api.engine.tokenizer._hf
    body = {
        "prompt": "the ",
        "temperature": 2,
        "seed": 1,
        "max_tokens": 60,
        "ignore_eos": True,
        "logprobs": 20,
    }
    body |= {"return_token_ids": True}
    (choice,) = (await api.complete(**body))["choices"]
    (by_id,) = (await api.complete(**body, return_tokens_as_token_ids=True))["choices"]
    assert by_id["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    same_text = 0
    for token, label, logprob, top, ids in zip(
        choice["token_ids"],
        choice["logprobs"]["tokens"],
        choice["logprobs"]["token_logprobs"],
        choice["logprobs"]["top_logprobs"],
        by_id["logprobs"]["top_logprobs"],
        strict=True,
    ):
        # No token is lost to another with the same text, and the chosen one keeps its own value.
        assert len(top) == len(ids)
        assert sorted(top.values()) == pytest.approx(sorted(ids.values()), abs=1e-4)
        assert top[label] == logprob == pytest.approx(ids[f"token_id:{token}"], abs=1e-4)
        names = [hf.id_to_token(int(name.removeprefix("token_id:"))) for name in ids]
        same_text += any(f"<0x{ord(name):02X}>" in names for name in names if len(name) == 1 and name < "~")
    assert same_text, "the case that this test is about did not come"
    answer = await api.chat("x", temperature=2, seed=1, max_tokens=60, logprobs=True, top_logprobs=20)
    half = 0
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 20
        for candidate in entry["top_logprobs"]:
            if candidate["token"].startswith("bytes:"):
                half += 1
                assert candidate["token"] == "bytes:" + "".join(f"\\x{b:02x}" for b in candidate["bytes"])
                with pytest.raises(UnicodeDecodeError):
                    bytes(candidate["bytes"]).decode()
            elif candidate["bytes"]:
                assert bytes(candidate["bytes"]).decode() == candidate["token"]
    assert half


@pytest.mark.parametrize("kind", KINDS)
async def test_echo_with_max_tokens_0(servers, kind):
    api = servers[kind]
    prompt = "The words " * 12  # more than one chunk of prefill
    ids = api.engine.tokenizer._hf.encode(prompt).ids
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
    choice = await both_ways(api, **body)
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(ids)}
    assert [logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]] == [None, None]
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    answer = await api.complete(prompt, max_tokens=1, prompt_logprobs=0)
    scores = [
        entry[str(i)]["logprob"]
        for i, entry in zip(ids[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True)
    ]
    assert logprobs["token_logprobs"][1:] == pytest.approx(scores, abs=1e-4)
    assert (await api.complete(**body))["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_stream_and_echo_and_logprobs(servers, kind):
    api = servers[kind]
    prompts = ["The words " * 12, "日本 é", "a"]
    body = {
        "prompt": prompts,
        "echo": True,
        "logprobs": 3,
        "n": 2,
        "max_tokens": 9,
        "seed": 3,
        "temperature": 2,
    }
    whole = (await api.complete(**body))["choices"]
    lists = {}
    for event in await api.events(COMPLETIONS, **body):
        for choice in event["choices"]:
            mine = lists.setdefault(choice["index"], {"text": ""})
            mine["text"] += choice["text"]
            for name, values in choice["logprobs"].items():
                mine.setdefault(name, []).extend(values)
    assert len(lists) == len(whole) == 6
    for choice in whole:
        mine, prompt = lists[choice["index"]], prompts[choice["index"] // 2]
        num_prompt = len(api.engine.tokenizer._hf.encode(prompt).ids)
        assert choice["text"].startswith(prompt)
        assert mine.pop("text") == choice["text"]
        assert {name: values for name, values in mine.items() if name in ("tokens", "text_offset")} == {
            name: choice["logprobs"][name] for name in ("tokens", "text_offset")
        }
        assert len(mine["tokens"]) == num_prompt + 9
        assert mine["text_offset"][num_prompt] == len(prompt)
        assert mine["text_offset"] == sorted(mine["text_offset"])
        assert [mine["token_logprobs"][0], mine["top_logprobs"][0]] == [None, None]
        assert mine["token_logprobs"][1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-4)
        for tops in zip(mine["top_logprobs"][1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
            assert tops[0] == pytest.approx(tops[1], abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
async def test_prompt_logprobs_with_a_cached_prefix(servers, kind):
    api = servers[kind]
    prompt = "And so the sea was there. " * 4
    body = {"max_tokens": 1, "temperature": 0, "cache_salt": "with a cached prefix"}
    await api.complete(prompt, **body)
    warm = await api.complete(prompt, **body)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the prefix was not cached"
    cached = await api.complete(prompt, prompt_logprobs=2, **body)
    fresh = await api.complete(prompt, prompt_logprobs=2, **{**body, "cache_salt": "another"})
    first, *scores = cached["choices"][0]["prompt_logprobs"]
    expected = fresh["choices"][0]["prompt_logprobs"][1:]
    ids = api.engine.tokenizer._hf.encode(prompt).ids
    assert first is None
    assert len(scores) == len(ids) - 1 == cached["usage"]["prompt_tokens"] - 1
    for token, score, other in zip(ids[1:], scores, expected, strict=True):
        assert str(token) in score
        assert score.keys() == other.keys()
        for key in score:
            assert score[key]["logprob"] == pytest.approx(other[key]["logprob"], abs=1e-4)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_n_3_finish_reasons_one_per_index(servers, path):
    api = servers["gpt2"]
    body = {"n": 3, "max_tokens": 12, "temperature": 2, "seed": 11}
    body |= {"prompt": "x"} if path == COMPLETIONS else {"messages": messages("x")}
    # Half of what comes is EOS, so the choices end at different places.
    body |= {"allowed_token_ids": [0, *byte_ids(api, b"abc")], "logit_bias": {"0": 1}}
    whole = (await api.post(path, **body))[1]["choices"]
    ends = {}
    for event in await api.events(path, **body):
        for choice in event["choices"]:
            assert choice["index"] not in ends, "a chunk after the finish reason"
            if choice["finish_reason"] is not None:
                ends[choice["index"]] = choice["finish_reason"]
    assert [ends[index] for index in range(3)] == [choice["finish_reason"] for choice in whole]
    assert len(ends) == 3
    assert "stop" in ends.values()


async def test_generation_config_with_two_eos_ids(tmp_path: Path):
    ends = [2, 4]  # </s> and <|end|>
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    async with live("llama", generation_config=str(tmp_path)) as api:
        (letter,) = byte_ids(api, b"a")
        for end in ends:
            choice = await both_ways(api, prompt=[300], **{**forced([letter, end]), "max_tokens": 9})
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", None)
            # min_tokens holds back either; ignore_eos both.
            body = {"allowed_token_ids": [letter, *ends], "logit_bias": {str(end): 100}, "temperature": 0}
            answer = await api.complete([300], min_tokens=3, max_tokens=9, **body)
            assert answer["choices"][0]["text"] == "aaa"
            answer = await api.complete(
                [300], ignore_eos=True, max_tokens=9, skip_special_tokens=False, **body
            )
            name = api.engine.tokenizer._hf.id_to_token(end)
            assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (
                name * 9,
                "length",
            )
