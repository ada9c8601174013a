"""300 random requests: the stream says what the whole answer says, and both say what the tokens say.

Both answers come from one engine, with one seed, in the company of 15 other requests. Sampled tokens do not
depend on that company, so texts, ids and counts are equal to the letter; log-probabilities are equal up to
float32 rounding (1e-4), since the padded shapes of the steps differ.
"""

import asyncio
import codecs
import contextlib
import json
import random
from collections import Counter

import pytest
import pytest_asyncio
from live import byte_ids, forced, is_idle, live, true_bytes
from stream_checks import assert_same, joined_stream

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SPECIAL = ("<|", "<s>", "</s>", "<unk>")
REQUESTS = 75  # for each tokenizer and route
AT_ONCE = 16
WORDS = ["The", "sea", "日本語", "é", "😀", "Köln", "and so", "  ", "\n", "10", "<|user|>", "🇫🇷", "naïve"]
# No two of their bytes are equal, so `forced` can spell them.
CHARACTERS = ["д", "€", "海", "😀", "ñ", "~", "^"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers():
    async with contextlib.AsyncExitStack() as stack:
        yield {kind: await stack.enter_async_context(live(kind)) for kind in ("gpt2", "llama")}


def text_of(rng, words=WORDS):
    return f"{rng.randrange(10**6)} " + " ".join(rng.choices(words, k=rng.randint(1, 12)))


def random_request(rng, api, path):
    """Everything but stop strings, which are chosen to be found."""
    limit = rng.randint(1, 40)
    body = {
        "max_tokens": limit,
        "temperature": rng.choice([0, 1, 2, 2]),
        "seed": rng.randrange(2**32),
        "n": rng.randint(1, 3),
        "ignore_eos": rng.random() < 0.3,
        "skip_special_tokens": rng.random() < 0.6,
        "return_token_ids": True,
        "include_stop_str_in_output": rng.random() < 0.3,
        "stop_token_ids": [],
        "logit_bias": {str(end): rng.choice([0, 3, 5]) for end in api.engine.tokenizer.eos_token_ids},
    }
    if rng.random() < 0.3:
        body["min_tokens"] = rng.randint(0, limit)
    kind, words = rng.random(), WORDS
    if kind < 0.25:  # broken characters
        body["allowed_token_ids"] = byte_ids(api, bytes(rng.sample(range(256), 60)))
    elif kind < 0.55:  # whole characters
        data = "".join(rng.sample(CHARACTERS, len(CHARACTERS))).encode()[: rng.randint(1, 12)]
        body |= forced(byte_ids(api, data))
        body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
        words = WORDS[:2]
    if rng.random() < 0.2:
        body["stop_token_ids"] = rng.choices(body.get("allowed_token_ids", range(400)), k=2)
    if path == CHAT:
        turns = [{"role": "user", "content": text_of(rng, words)} for _ in range(rng.randint(1, 3))]
        body["messages"] = turns
        if rng.random() < 0.6:
            body |= {"logprobs": True, "top_logprobs": rng.choice([None, 0, 1, 5])}
    else:
        prompts = [text_of(rng, words) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            ids = [api.engine.tokenizer.encode(prompt) for prompt in prompts]
            prompts = [prompt[: max(1, len(prompt) - rng.randint(0, 3))] for prompt in ids]
        body["prompt"] = prompts if len(prompts) > 1 or rng.random() < 0.5 else prompts[0]
        body["echo"] = rng.random() < 0.4
        if rng.random() < 0.6:
            body["logprobs"] = rng.choice([0, 1, 5])
    return body


def random_stops(rng, text):
    """Stop strings of which some are in `text`: overlapping, one the beginning of another, near misses."""
    stops = []
    for _ in range(rng.randint(1, 3)):
        if len(text) > 1:
            begin = rng.randrange(len(text))
            stops.append(text[begin : begin + rng.randint(1, 9)])
    if stops and rng.random() < 0.3:
        stops.append(stops[0] + rng.choice("qz€"))
    if stops and rng.random() < 0.3:
        stops.append(stops[-1][:1] + "日")
    stops = list(dict.fromkeys(stop for stop in stops if stop))[:4] or ["never"]
    return stops[0] if len(stops) == 1 and rng.random() < 0.5 else stops


def cut(text, stops, shown):
    """`text` up to the stop string that ends first, of those the longest; and that stop string."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if shown else end - len(stop)], stop


def spelled(api, body, ids):
    return b"".join(true_bytes(api, token, body["skip_special_tokens"]) for token in ids)


def echo_of(api, body, prompt):
    """(text of a prompt, the bytes of a character that it does not finish)"""
    if isinstance(prompt, str):
        return prompt, b""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(spelled(api, body, prompt))
    return text, decoder.getstate()[0]


def check_text(api, body, choice, before):
    """The text of a choice without stop strings is what its tokens spell, after the bytes `before`."""
    ids = choice["token_ids"]
    ends = {*(() if body["ignore_eos"] else api.engine.tokenizer.eos_token_ids), *body["stop_token_ids"]}
    if choice["finish_reason"] == "stop":
        assert ids[-1] in ends
        assert choice["stop_reason"] == (ids[-1] if ids[-1] in body["stop_token_ids"] else None)
        assert not set(ids[:-1]) & ends
        assert len(ids) > body.get("min_tokens", 0)
        ids = ids if body["include_stop_str_in_output"] else ids[:-1]
    else:
        assert (choice["finish_reason"], len(ids)) == ("length", body["max_tokens"])
        assert not set(ids) & ends
    assert choice["text"] == (before + spelled(api, body, ids)).decode("utf-8", "replace")


def check_tokens(choice, text, before):
    """Ids, log-probabilities and text of a choice agree; `text` is the part that was generated."""
    logprobs = choice["logprobs"]
    if logprobs is None:
        return
    if "content" in logprobs:
        assert len(logprobs["content"]) == len(choice["token_ids"])
        data = b"".join(bytes(entry["bytes"]) for entry in logprobs["content"])
        # Invalid bytes are shown as what they are, and as U+FFFD in the text.
        assert data.decode("utf-8", "replace") == text
        return
    assert {len(values) for values in logprobs.values()} == {len(logprobs["tokens"])}
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    first, shift = len(logprobs["tokens"]) - len(choice["token_ids"]), len(choice["text"]) - len(text)
    assert first == 0 or offsets[first - 1] <= shift
    for label, offset in zip(logprobs["tokens"][first:], offsets[first:], strict=True):
        here = text[offset - shift :]
        if not label.startswith(("bytes:", *SPECIAL)):
            assert here.startswith(label) or label.startswith(here)


async def check_request(api, path, rng, seen):
    body = random_request(rng, api, path)
    salts = iter("abc")  # prefixes are not shared, so the counts of cached tokens are equal too

    async def post(**changes):
        asked = {**body, **changes, "cache_salt": f"{body['seed']}{next(salts)}"}
        async with api.http.post(path, json=asked) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    prompts = body.get("prompt", [""])
    prompts = prompts if isinstance(prompts, list) and not isinstance(prompts[0], int) else [prompts]
    echoes = [echo_of(api, body, prompt) for prompt in prompts for _ in range(body["n"])]

    plain = json.loads(await post(echo=False))["choices"]
    assert len(plain) == len(echoes)
    for choice, (_, before) in zip(plain, echoes, strict=True):
        choice.setdefault("text", choice.get("message", {}).get("content"))
        check_text(api, body, choice, before)

    if rng.random() < 0.75:
        body["stop"] = random_stops(rng, rng.choice(plain)["text"])
    answer = json.loads(await post())
    wants_usage, every = rng.random() < 0.7, rng.random() < 0.3
    options = {"include_usage": wants_usage, "continuous_usage_stats": every}
    raw = await post(stream=True, stream_options=options)
    streamed = joined_stream(raw, is_chat=path == CHAT, wants_usage=wants_usage, every_usage=every)
    assert list(streamed.choices) == [choice["index"] for choice in answer["choices"]]
    assert list(streamed.choices) == list(range(len(plain)))
    if wants_usage:
        assert streamed.usage == answer["usage"]

    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
    for choice, base, (echo, before) in zip(answer["choices"], plain, echoes, strict=True):
        whole_text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert_same(streamed.choices[choice["index"]], choice, whole_text)
        echo = echo if body.get("echo") else ""
        assert whole_text.startswith(echo)
        text = whole_text[len(echo) :]
        by_string = isinstance(choice["stop_reason"], str)
        if not body.get("min_tokens"):
            expected, stop = cut(base["text"], stops, body["include_stop_str_in_output"])
            assert text == expected
            assert choice["stop_reason"] == (stop or base["stop_reason"])
            assert choice["finish_reason"] == ("stop" if stop else base["finish_reason"])
        check_tokens(choice, text, before)
        seen["stop string" if by_string else choice["finish_reason"]] += 1
        seen["long stop string"] += by_string and len(choice["stop_reason"]) > 4
        seen["broken"] += "\ufffd" in text
        seen["beyond ASCII"] += not text.isascii() and "\ufffd" not in text
        seen["began inside a character"] += bool(before)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
async def test_streams_equal_whole_answers(servers, kind, path):
    api, seen = servers[kind], Counter()
    numbers = iter(range(REQUESTS))

    async def client():
        for number in numbers:
            try:
                await check_request(api, path, random.Random(f"{kind} {path} {number}"), seen)
            except AssertionError as error:
                error.add_note(f"request {number}")
                raise

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(client())
    assert await is_idle(api.engine)
    for case in ("stop string", "stop", "length", "long stop string", "broken", "beyond ASCII"):
        assert seen[case] >= 8, (case, seen)
