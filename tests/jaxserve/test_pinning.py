"""Pinned prefixes: found by all requests, never evicted, right under new weights; files; what is refused."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.processors import TemplateProcessing

from jaxserve import LLM, SamplingParams
from jaxserve.engine_args import EngineArgs
from jaxserve.errors import ConfigError
from jaxserve.limits import SchedulerConfig
from jaxserve.pinning import PinnedPrefix, check_prefixes, read_prefixes
from jaxserve.request import Request
from jaxserve.scheduler import Scheduler
from jaxserve.tokenizer import Tokenizer
from tests.jaxserve.tiny import TINY, TINY_ARGS, random_arrays, tiny_llm

LIMITS = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=40, page_size=4, num_pages=21
)
PREFIX = list(range(100, 118))  # 18 tokens: four whole pages
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


# In the scheduler.


def step(scheduler: Scheduler) -> None:
    output = scheduler.schedule()
    scheduler.check_integrity()
    scheduler.update(output, {part.request.request_id: 7 for part in output.scheduled if part.samples})
    scheduler.check_integrity()


def run(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished:
        step(scheduler)


def make_request(name: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), arrival_time=0.0, **fields)


def pinned_scheduler(*prefixes: list[int], **changes: Any) -> Scheduler:
    scheduler = Scheduler(dataclasses.replace(LIMITS, **changes))
    scheduler.pin_prefixes(prefixes)
    run(scheduler)
    return scheduler


@pytest.mark.parametrize("page_size", [1, 3, 4, 18])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 17, 32])
def test_whole_pages_are_held_and_every_request_finds_them(page_size, max_num_batched_tokens):
    scheduler = pinned_scheduler(
        PREFIX, page_size=page_size, num_pages=100, max_num_batched_tokens=max_num_batched_tokens
    )
    pages = 18 // page_size
    assert scheduler.num_pinned == scheduler.allocator.num_used == pages
    assert (scheduler.prefix_queries, scheduler.prefix_hits, scheduler.pinned_hits) == (0, 0, 0)
    for name in "abc":
        request = make_request(name, [*PREFIX, ord(name), 6])
        run(scheduler, request)
        assert request.num_cached_tokens == pages * page_size
    assert scheduler.pinned_hits == 3 * pages * page_size
    assert scheduler.num_pinned == scheduler.allocator.num_used == pages


def test_hits_in_other_pages_are_not_counted_as_pinned():
    scheduler = pinned_scheduler(PREFIX)
    prompt = [*PREFIX[:16], *range(8)]
    run(scheduler, make_request("a", prompt))
    run(scheduler, make_request("b", [*prompt, 9]))
    assert (scheduler.prefix_hits, scheduler.pinned_hits) == (16 + 24, 32)


def test_a_salted_request_does_not_find_them():
    scheduler = pinned_scheduler(PREFIX)
    request = make_request("a", [*PREFIX, 5], cache_salt="mine")
    run(scheduler, request)
    assert (request.num_cached_tokens, scheduler.pinned_hits) == (0, 0)


def test_nothing_evicts_them():
    """16 pages are left: other prompts go through them for ever, four at a time, and preempt each other."""
    scheduler = pinned_scheduler(PREFIX)
    draw = random.Random(0)
    for round in range(50):
        prompts = [[draw.randrange(50) for _ in range(30)] for _ in range(4)]
        run(scheduler, *(make_request(f"{round}-{i}", prompt, 10) for i, prompt in enumerate(prompts)))
    assert scheduler.num_preemptions > 50
    request = make_request("a", [*PREFIX, 5])
    run(scheduler, request)
    assert request.num_cached_tokens == 16


def test_a_request_of_the_whole_context_still_runs():
    scheduler = pinned_scheduler(PREFIX, num_pages=15)  # four pinned, ten for a context of 40
    check_prefixes([PinnedPrefix("a", PREFIX)], scheduler.config)
    request = make_request("a", [1] * 39, 1)
    run(scheduler, request)
    assert request.finish_reason == "length"
    assert len(request.output_token_ids) == 1


def test_prefixes_that_begin_alike_share_pages():
    scheduler = pinned_scheduler(PREFIX, [*PREFIX[:8], *range(8)], PREFIX)
    assert scheduler.num_pinned == 4 + 2
    scheduler.reset_prefix_cache()
    assert scheduler.num_pinned == 0
    run(scheduler)
    assert scheduler.num_pinned == 4 + 2


def test_a_request_that_has_computed_the_same_tokens_leaves_one_copy():
    scheduler = Scheduler(LIMITS)
    run(scheduler, make_request("a", [*PREFIX, 5]))
    scheduler.pin_prefixes([PREFIX])
    run(scheduler)
    assert scheduler.num_pinned == scheduler.allocator.num_used == 4


def test_two_computing_the_same_at_once_leave_one_copy():
    scheduler = Scheduler(LIMITS)
    scheduler.add_request(make_request("a", [*PREFIX, 5]))
    step(scheduler)
    scheduler.reset_prefix_cache()
    scheduler.pin_prefixes([PREFIX])
    run(scheduler, make_request("b", [*PREFIX, 5]))
    assert scheduler.num_pinned == scheduler.allocator.num_used == 4


@pytest.mark.parametrize("steps", range(8))
def test_a_reset_at_any_moment_computes_them_anew(steps):
    """Also while they are being computed, and while a request uses them."""
    scheduler = Scheduler(dataclasses.replace(LIMITS, max_num_batched_tokens=6))
    scheduler.pin_prefixes([PREFIX])
    scheduler.add_request(user := make_request("a", [*PREFIX, 5]))
    under_way = []
    for _ in range(steps):  # a step ahead of what is known
        under_way.append(scheduler.schedule())
        if len(under_way) > 1:
            output = under_way.pop(0)
            scheduler.update(output, {p.request.request_id: 7 for p in output.scheduled if p.samples})
        scheduler.check_integrity()
    scheduler.reset_prefix_cache()
    scheduler.check_integrity()
    assert scheduler.num_pinned == 0
    for output in under_way:
        scheduler.update(output, {p.request.request_id: 7 for p in output.scheduled if p.samples})
    run(scheduler)
    assert user.finish_reason == "length"
    assert scheduler.num_pinned == scheduler.allocator.num_used == 4
    request = make_request("b", [*PREFIX, 5])
    run(scheduler, request)
    assert request.num_cached_tokens == 16


def test_what_users_read_counts_no_pin():
    scheduler = pinned_scheduler(PREFIX)
    assert scheduler.tallies.prompt_tokens == 0
    assert scheduler.tallies.first_token.cumulative()[-1] == 0


# From files.

WORDS = ["<unk>", "<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "0", "x"]
WORDS += [f"w{i}" for i in range(100)]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A system message goes into the first user message, and alone it is refused, as some models have it.
FOLDED = (
    "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('no user message') }}{% endif %}"
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set text = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}<|{{ m['role'] }}|> "
    "{% if loop.first %}{{ text }} {% endif %}{{ m['content'] }} <|end|> {% endfor %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """Words and control tokens, and a BOS that the tokenizer adds."""
    hf = HfTokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    hf.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in WORDS[1:6]])
    hf.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(
        SimpleNamespace(
            tokenizer=hf,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=None,
            unk_token_id=0,
            eos_token_ids=(),
            chat_template=template,
            special_tokens_map={"bos_token": "<s>"},
        )
    )


def words(count: int, first: int = 0) -> str:
    return " ".join(f"w{first + i}" for i in range(count))


def write(directory: Path, content: Any, name: str = "system.json") -> str:
    path = directory / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return str(path)


def test_a_text_file_is_encoded_as_a_prompt_is(tmp_path):
    tokenizer, path = make_tokenizer(), write(tmp_path, words(20) + "\n", "system.txt")
    assert read_prefixes([path], tokenizer) == [PinnedPrefix(path, tokenizer.encode(words(20)))]
    assert read_prefixes([path], tokenizer)[0].token_ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("template", [TEMPLATE, FOLDED])
@pytest.mark.parametrize("num_examples", [0, 1])
def test_messages_give_what_all_conversations_share_that_begin_with_them(tmp_path, template, num_examples):
    tokenizer = make_tokenizer(template)
    messages = [{"role": "system", "content": words(10)}]
    for role in ("user", "assistant") * num_examples:
        messages.append({"role": role, "content": words(3, 20)})
    (prefix,) = read_prefixes([write(tmp_path, messages)], tokenizer)
    conversations = [
        tokenizer.apply_chat_template([*messages, {"role": "user", "content": content}])
        for content in ("w30 w31", "w40", "0", "x")
    ]
    length = len(prefix.token_ids)
    assert length > 10
    assert all(ids[:length] == prefix.token_ids for ids in conversations)
    assert len({ids[length] for ids in conversations[:2]}) == 2, "more is shared"


def test_messages_may_end_with_the_users(tmp_path):
    messages = [{"role": "user", "content": words(10)}]
    tokenizer = make_tokenizer()
    (prefix,) = read_prefixes([write(tmp_path, messages)], tokenizer)
    # As far as the opening of the answer: what follows is the model's.
    assert prefix.token_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("[{", "is not JSON"),
        ("{}", "must be a list of messages"),
        ([], "must be a list of messages"),
        (["hello"], "must be a list of messages"),
        ([{"content": "w1"}], "role"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, content, message):
    path = str(tmp_path / "system.json") if content is None else write(tmp_path, content)
    with pytest.raises(ConfigError, match=f"pin_prefix: {path}: .*{message}"):
        read_prefixes([path], make_tokenizer())


def test_bytes_that_are_no_text_and_a_model_without_template_or_tokenizer_are_refused(tmp_path):
    path = tmp_path / "system.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_prefixes([str(path)], make_tokenizer())
    messages = write(tmp_path, [{"role": "system", "content": "w1"}])
    with pytest.raises(ConfigError, match="chat template"):
        read_prefixes([messages], make_tokenizer(template=None))
    with pytest.raises(ConfigError, match="pin_prefix: this model has no tokenizer"):
        read_prefixes([str(path)], None)


@pytest.mark.parametrize(
    ("num_tokens", "changes", "message"),
    [
        (3, {}, "a: has 3 tokens, and only whole pages of 4 are kept"),
        (0, {}, "a: has 0 tokens"),
        (40, {}, "a: 40 tokens leave no room in the context of 40"),
        (16, {"enable_prefix_caching": False}, "which is turned off"),
        (32, {"enable_chunked_prefill": False}, "a: 32 tokens do not fit in a step of 32"),
        (16, {"num_pages": 14}, "4 pinned pages leave 9 of the pool's 13, .* takes 10"),
    ],
)
def test_what_cannot_be_kept_is_refused(num_tokens, changes, message):
    limits = dataclasses.replace(LIMITS, **changes)
    with pytest.raises(ConfigError, match=f"pin_prefix: .*{message}"):
        check_prefixes([PinnedPrefix("a", list(range(num_tokens)))], limits)
    check_prefixes([], limits)


def test_shared_pages_take_room_once():
    limits = dataclasses.replace(LIMITS, num_pages=1 + 10 + 4 + 1)
    check_prefixes([PinnedPrefix("a", PREFIX), PinnedPrefix("b", [*PREFIX[:12], 1, 2, 3, 4])], limits)
    with pytest.raises(ConfigError, match="6 pinned pages"):
        check_prefixes([PinnedPrefix("a", PREFIX), PinnedPrefix("b", [*PREFIX[:8], *range(8)])], limits)


@pytest.mark.parametrize("value", ["file.txt", None, [1], 5])
def test_the_argument_is_a_list_of_files(value):
    with pytest.raises(ConfigError, match="pin_prefix must be a list of files"):
        EngineArgs(pin_prefix=value)


# In the engine.


def pinned_llm(paths: list[str], **engine_args: Any) -> LLM:
    args = {**TINY_ARGS, "pin_prefix": paths, **engine_args}
    return LLM(random_arrays(), config=TINY, tokenizer=make_tokenizer(), **args)


def test_the_engine_starts_with_them_and_says_so(tmp_path):
    path = write(tmp_path, words(60), "system.txt")  # 61 tokens with the BOS: seven pages of eight
    said: list[str] = []
    with pinned_llm([path], report=said.append) as llm, tiny_llm() as plain:
        assert f"pinned prefixes, in whole pages of 8: {path} 56 of 61 tokens" in said
        stats = llm.stats()
        assert (stats.pages_pinned, stats.pinned_tokens, stats.pages_used) == (7, 56, 0)
        assert stats.pages_free == stats.pages_total - 7
        assert (stats.generation_tokens, stats.pinned_hits) == (0, 0)
        output = llm.generate(words(60) + " w70 w71", GREEDY)[0]
        assert output.num_cached_tokens == 56
        assert llm.stats().pinned_hits == 56
        ids = {"prompt_token_ids": output.prompt_token_ids}
        assert output.outputs[0].token_ids == plain.generate(ids, GREEDY)[0].outputs[0].token_ids
        llm.check_integrity()


def test_new_weights_get_new_pages(tmp_path):
    path = write(tmp_path, words(60), "system.txt")
    with pinned_llm([path]) as llm, LLM(random_arrays(seed=1), config=TINY, **TINY_ARGS) as other:
        llm.generate(words(61), GREEDY)
        llm.update_weights(random_arrays(seed=1))
        prompt = words(62)
        first = llm.generate(prompt, GREEDY)[0]  # may come before the pages are there again
        second = llm.generate(prompt, GREEDY)[0]
        expected = other.generate({"prompt_token_ids": first.prompt_token_ids}, GREEDY)[0]
        assert first.outputs[0].token_ids == second.outputs[0].token_ids == expected.outputs[0].token_ids
        stats = llm.stats()
        assert (stats.pages_pinned, stats.pages_used) == (7, 0)
        llm.check_integrity()


def test_the_pool_grows_beside_the_requests_or_the_context_shrinks(tmp_path):
    path = write(tmp_path, words(60), "system.txt")
    with pinned_llm([path], max_num_seqs=1, num_pages=1000, max_model_len=64) as llm:
        assert llm.stats().pages_total == 8 + 7  # one context, and the prefix
    with pinned_llm([path], max_model_len=None, num_pages=31) as llm:
        assert llm._engine.config.max_model_len == (30 - 7) * 8
    with pytest.raises(ConfigError, match="pin_prefix: 7 pinned pages leave 23"):
        pinned_llm([path], max_model_len=240, num_pages=31)
