"""From sampled tokens to outputs: text, stops, log-probabilities, several choices."""

import copy
from functools import cache
from pathlib import Path

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.output_processor import OutputProcessor, StopHit
from jaxserve.outputs import Logprob, RequestOutput
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer
from jaxserve_checkpoints import open_checkpoint

GGUF = Path(__file__).parents[1] / "goldens" / "gguf"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(open_checkpoint(GGUF / "f16_tok_gpt2" / "model.gguf").tokenizer())


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def tokens_of(*pieces: str) -> list[int]:
    """One token for each piece; the pieces of these tests are tokens."""
    by_text = {tokenizer().token_str(i): i for i in range(tokenizer().vocab_size)}
    return [by_text[piece] for piece in pieces]


class Run:
    """A processor with one request, driven the way the engine drives it."""

    def __init__(self, prompt: list[int] | None = None, eos: frozenset[int] = frozenset(), **params) -> None:
        self.params = SamplingParams(**params)
        self.processor = OutputProcessor(tokenizer() if self.params.detokenize else None)
        self.requests = [
            Request(f"r-{i}", prompt or ids_of("Hi"), self.params, eos_token_ids=eos)
            for i in range(self.params.n)
        ]
        self.processor.add("r", "Hi", self.requests, self.params)

    def feed(self, ids: list[int], choice: int = 0) -> list[StopHit | None]:
        logprobs = [
            {i: Logprob(-float(n), 1), 0: Logprob(-9.0, 2)} if self.params.logprobs is not None else None
            for n, i in enumerate(ids, 1)
        ]
        pairs = zip(ids, logprobs, strict=True)
        return [self.processor.process(self.requests[choice], i, entry) for i, entry in pairs]

    def finish(self, reason: str, choice: int = 0) -> RequestOutput:
        self.requests[choice].finish_reason = reason
        self.processor.finish(self.requests[choice])
        return self.output()

    def output(self) -> RequestOutput:
        return self.processor.snapshot("r")


def test_text_is_cumulative():
    run = Run()
    texts = []
    for i in ids_of("Hello 🙂"):
        run.feed([i])
        texts.append(run.output().outputs[0].text)
    assert texts[-1] == "Hello 🙂"
    assert all("Hello 🙂".startswith(text) for text in texts)
    out = run.finish("length")
    assert out.finished
    assert out.outputs[0].finish_reason == "length"
    assert out.prompt == "Hi"
    assert out.prompt_token_ids == ids_of("Hi")


def test_snapshots_do_not_change_later():
    run = Run(logprobs=1)
    ids = ids_of("Hello world")
    run.feed(ids[:2])
    before = run.output()
    kept = copy.deepcopy(before)
    run.feed(ids[2:])
    run.requests[0].metrics.first_token_time = 1.0
    run.finish("length")
    assert before == kept


def test_a_stop_over_three_tokens():
    run = Run(stop="abc", logprobs=1)
    hits = run.feed(tokens_of("x", "a", "b", "c"))
    assert hits == [None, None, None, StopHit("abc")]
    out = run.finish("stop").outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("x", "stop", "abc")


def test_a_stop_that_ends_inside_a_token():
    piece = next(t for t in map(tokenizer().token_str, range(260, 400)) if len(t) >= 3 and t.isascii())
    run = Run(stop=piece[:2], max_tokens=5)
    assert run.feed(tokens_of("x", piece)) == [None, StopHit(piece[:2])]
    assert run.finish("stop").outputs[0].text == "x"
    run = Run(stop=piece[:2], include_stop_str_in_output=True)
    run.feed(tokens_of("x", piece))
    assert run.finish("stop").outputs[0].text == "x" + piece[:2]


def test_lengths_agree_after_a_stop():
    run = Run(stop="bc", logprobs=1)
    ids = tokens_of("a", "b", "c", "d")
    run.feed(ids)  # the last one was already in flight
    out = run.finish("stop").outputs[0]
    assert out.text == "a"
    assert out.token_ids == ids[:3]
    assert len(out.logprobs) == 3
    assert [entry[i].decoded_token for entry, i in zip(out.logprobs, ids, strict=False)] == ["a", "b", "c"]
    assert out.cumulative_logprob == -6.0


def test_held_back_text_is_not_shown_early_and_released_at_the_end():
    run = Run(stop="abc")
    run.feed(tokens_of("x", "a", "b"))
    assert run.output().outputs[0].text == "x"
    out = run.finish("length").outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("xab", "length", None)


def test_a_stop_in_the_last_allowed_token_is_a_stop():
    run = Run(stop="c", max_tokens=3)
    run.feed(tokens_of("a", "b", "c"))
    out = run.finish("length").outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("ab", "stop", "c")


def test_min_tokens_keeps_early_stop_strings_as_text():
    run = Run(stop="a", min_tokens=2)
    assert run.feed(tokens_of("a", "a", "b", "a")) == [None, None, None, StopHit("a")]
    assert run.finish("stop").outputs[0].text == "aab"


def test_every_end_of_sequence_id_ends_without_text():
    eos = frozenset(tokens_of("y", "z"))
    for token in eos:
        run = Run(eos=eos, skip_special_tokens=False)
        run.feed([*tokens_of("a"), token])
        out = run.finish("stop").outputs[0]
        assert (out.text, len(out.token_ids), out.stop_reason) == ("a", 2, None)


def test_a_stop_id_has_text_only_with_include_stop_str_in_output():
    ids = tokens_of("a", "z")
    for include in (False, True):
        run = Run(stop_token_ids=[ids[1]], include_stop_str_in_output=include)
        run.feed(ids)
        assert run.finish("stop").outputs[0].text == ("az" if include else "a")


def test_a_length_limit_inside_a_character():
    run = Run()
    run.feed(ids_of("a🙂")[:-1])
    assert run.output().outputs[0].text == "a"
    assert run.finish("length").outputs[0].text == "a\ufffd"


def test_a_prompt_of_ids_that_ends_inside_a_character():
    ids = ids_of("🙂!")
    run = Run(prompt=ids[:2])
    run.feed(ids[2:])
    assert run.finish("length").outputs[0].text == "🙂!"


def test_top_logprobs_of_byte_tokens_have_printable_text():
    byte = next(i for i in range(400) if tokenizer().token_bytes(i) == b"\xf0")
    run = Run(logprobs=1)
    run.feed([byte])
    assert run.output().outputs[0].logprobs[0][byte].decoded_token == "\ufffd"


def test_prompt_logprobs_are_named():
    run = Run()
    first, second = ids_of("H"), tokens_of("i")
    run.processor.set_prompt_logprobs("r", [None, {second[0]: Logprob(-1.0, 1)}])
    assert first
    assert run.output().prompt_logprobs[1][second[0]].decoded_token == "i"


def test_choices_are_grouped_and_finish_one_by_one():
    run = Run(n=3, stop="c")
    run.feed(tokens_of("a", "b"), 0)
    run.feed(tokens_of("b", "c"), 1)
    run.feed(tokens_of("d"), 2)
    assert not run.finish("stop", 1).finished
    assert not run.finish("length", 2).finished
    out = run.finish("length", 0)
    assert out.finished
    assert [o.index for o in out.outputs] == [0, 1, 2]
    assert [o.text for o in out.outputs] == ["ab", "b", "d"]
    assert [o.finish_reason for o in out.outputs] == ["length", "stop", "length"]


def test_metrics_of_choices_are_merged():
    run = Run(n=2)
    first, second = (request.metrics for request in run.requests)
    first.first_token_time, second.first_token_time = 3.0, 2.0
    first.finished_time, first.num_preemptions, second.num_preemptions = 5.0, 1, 2
    metrics = run.output().metrics
    assert (metrics.first_token_time, metrics.finished_time, metrics.num_preemptions) == (2.0, None, 3)
    second.finished_time = 4.0
    assert run.output().metrics.finished_time == 5.0


def test_abort_ends_what_still_runs_and_remove_forgets():
    run = Run(n=2, stop="bc")
    run.feed(tokens_of("a", "b"), 0)
    run.feed(tokens_of("a"), 1)
    run.finish("length", 1)
    run.processor.abort("r")
    out = run.output()
    assert [(o.text, o.finish_reason) for o in out.outputs] == [("ab", "abort"), ("a", "length")]
    run.feed(tokens_of("z"), 0)  # in flight when it was aborted
    assert run.output() == out
    run.processor.remove("r")
    run.processor.remove("r")
    assert len(run.processor) == 0
    assert run.feed(tokens_of("z"), 0) == [None]


def test_a_late_token_of_a_removed_request_does_not_reach_one_of_the_same_id():
    run = Run()
    late = run.requests[0]
    run.processor.remove("r")
    fresh = Request("r-0", ids_of("Hi"), run.params)
    run.processor.add("r", None, [fresh], run.params)
    run.processor.process(late, tokens_of("z")[0])
    assert run.output().outputs[0].token_ids == []


def test_ids_in_use_are_refused():
    run = Run()
    with pytest.raises(InvalidRequestError, match="in use"):
        run.processor.add("r", None, run.requests, run.params)


def test_without_a_tokenizer_there_are_ids_and_no_text():
    run = Run(detokenize=False, logprobs=1)
    run.feed([5, 6])
    out = run.finish("length").outputs[0]
    assert (out.text, out.token_ids) == ("", [5, 6])
    assert out.logprobs[0][5].decoded_token is None


def test_stop_strings_without_text_are_refused():
    params = SamplingParams(stop="x")
    with pytest.raises(InvalidRequestError) as caught:
        OutputProcessor(None).add("r", None, [Request("r", [1], params)], params)
    assert caught.value.param == "stop"
