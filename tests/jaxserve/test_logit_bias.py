"""The bias row of a request: what it forbids and favours, and when it changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.logit_bias import bias_row, needs_bias
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams

VOCAB = 12


def request(
    output: list[int], *, in_flight: int = 0, bad_words: tuple[tuple[int, ...], ...] = (), **params: object
) -> Request:
    """A request whose next step samples: the scheduler has counted that token as in flight."""
    made = Request(
        "r",
        [1, 2],
        SamplingParams(max_tokens=9, **params),
        eos_token_ids=frozenset({3}),
        bad_words_token_ids=bad_words,
    )  # type: ignore[arg-type]
    made.output_token_ids = output
    made.num_in_flight = in_flight + 1
    return made


def forbidden(made: Request) -> set[int]:
    key = needs_bias(made)
    return set() if key is None else set(np.flatnonzero(np.isneginf(bias_row(made, key, VOCAB))).tolist())


def test_a_plain_request_needs_no_row() -> None:
    assert needs_bias(request([4])) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"min_tokens": 2},
        {"logit_bias": {4: 1.0}},
        {"allowed_token_ids": [4]},
        {"bad_words": ((4, 5),)},
        {"bad_words": ((5,),)},
    ],
)
def test_who_ever_needs_a_row_is_known_from_the_start(asked: dict[str, Any]) -> None:
    made = request([4], **asked)
    assert needs_bias(made) is not None
    assert made.may_need_bias
    assert not request([4], stop_token_ids=[5]).may_need_bias


def test_min_tokens_forbids_end_and_stop_ids_for_exactly_that_many_tokens() -> None:
    stops = {"min_tokens": 2, "stop_token_ids": [5, 7]}
    assert forbidden(request([], **stops)) == {3, 5, 7}
    assert forbidden(request([4], **stops)) == {3, 5, 7}
    assert forbidden(request([4, 4], **stops)) == set()


def test_min_tokens_counts_a_token_that_is_still_on_the_device() -> None:
    assert forbidden(request([], in_flight=1, min_tokens=2)) == {3}
    assert forbidden(request([4], in_flight=1, min_tokens=2)) == set()


def test_allowed_tokens_forbid_all_others_and_logit_bias_adds() -> None:
    made = request([4], allowed_token_ids=[2, 6], logit_bias={6: 5.0})
    key = needs_bias(made)
    assert key is not None
    row = bias_row(made, key, VOCAB)
    assert set(np.flatnonzero(np.isfinite(row)).tolist()) == {2, 6}
    assert (row[2], row[6]) == (0.0, 5.0)


def test_what_is_allowed_goes_before_what_is_forbidden() -> None:
    """Where nothing is left, a sampler would take any token: one that the request has not allowed."""

    def left(made: Request) -> set[int]:
        return set(range(VOCAB)) - forbidden(made)

    assert left(request([], min_tokens=2, allowed_token_ids=[3])) == {3}
    assert left(request([], min_tokens=2, allowed_token_ids=[3, 4])) == {4}
    assert left(request([], bad_words=((6,),), allowed_token_ids=[6])) == {6}
    assert left(request([], min_tokens=2, stop_token_ids=list(range(VOCAB)))) == set(range(VOCAB))


def test_a_bad_word_is_forbidden_where_its_beginning_has_been_written() -> None:
    words = ((8,), (4, 9), (4, 5, 10))
    assert forbidden(request([], bad_words=words)) == {8}
    assert forbidden(request([4], bad_words=words)) == {8, 9}
    assert forbidden(request([4, 5], bad_words=words)) == {8, 10}
    assert forbidden(request([4, 6], bad_words=words)) == {8}
