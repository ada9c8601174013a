"""Outputs: what a choice's state says of tokens that it shares with later states."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from jaxserve.outputs import CompletionOutput

pytestmark = pytest.mark.quick


def of_growing(token_ids: list[int]) -> CompletionOutput:
    return CompletionOutput.of_growing(0, "text", token_ids, None, None, None, None)


def test_later_tokens_are_not_in_an_earlier_state() -> None:
    tokens = [5, 6]
    output = of_growing(tokens)
    tokens.append(7)
    assert output.num_tokens == 2
    assert output.token_ids == [5, 6]
    assert type(output.token_ids) is list
    assert output.num_tokens == 2


def test_changed_ids_change_neither_the_engines_nor_another_state() -> None:
    tokens = [5, 6]
    output, other = of_growing(tokens), of_growing(tokens)
    output.token_ids.append(9)
    assert output.token_ids == [5, 6, 9]
    assert output.num_tokens == 3
    assert (tokens, other.token_ids) == ([5, 6], [5, 6])
    output.token_ids = [1]
    assert (output.token_ids, output.num_tokens) == ([1], 1)


def test_given_ids_hide_those_of_the_engine() -> None:
    output = of_growing([5, 6])
    output.token_ids = [1]
    assert (output.token_ids, output.num_tokens) == ([1], 1)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_keep_what_the_state_was(way) -> None:
    tokens = [5, 6]
    output = of_growing(tokens)
    copied = way(output)
    tokens.append(7)
    assert copied == output == CompletionOutput(0, "text", [5, 6])
    assert repr(copied) == repr(CompletionOutput(0, "text", [5, 6]))


def test_its_fields_are_those_of_any_other() -> None:
    output = of_growing([5, 6])
    assert dataclasses.asdict(output) == dataclasses.asdict(CompletionOutput(0, "text", [5, 6]))
    assert dataclasses.replace(output, text="more") == CompletionOutput(0, "more", [5, 6])


def test_an_unknown_attribute_is_an_error() -> None:
    output = of_growing([5])
    with pytest.raises(AttributeError, match="tokens_ids"):
        output.tokens_ids  # noqa: B018
