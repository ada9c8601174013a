"""Every rule of SamplingParams: what is taken, what is refused, and under which name."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams

NUMBERS = {  # field -> (low, high, low is allowed)
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, math.inf, False),
}
INTEGERS = {  # field -> (low, high)
    "n": (1, 16),
    "top_k": (-1, None),
    "seed": (-(2**63), 2**63 - 1),
    "min_tokens": (0, None),
    "max_tokens": (0, None),
    "logprobs": (0, None),
    "prompt_logprobs": (0, None),
}
BOOLEANS = [
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
]


def refused(**fields) -> str:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**fields)
    assert error.value.param is not None
    assert error.value.param in str(error.value) or error.value.param == "stop"
    return error.value.param


def test_defaults():
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "allowed_token_ids": None,
        "bad_words": (),
        "logit_bias": {},
        "ignore_eos": False,
        "min_tokens": 0,
        "max_tokens": 16,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
    }


@pytest.mark.parametrize("name", NUMBERS)
@given(value=st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 5))
def test_a_number_is_taken_exactly_when_it_is_in_range(name, value):
    low, high, closed = NUMBERS[name]
    inside = math.isfinite(value) and (low <= value if closed else low < value) and value <= high
    if inside:
        taken = getattr(SamplingParams(**{name: value}), name)
        assert taken == value
        assert type(taken) is float
    else:
        assert refused(**{name: value}) == name


@pytest.mark.parametrize("name", INTEGERS)
@given(value=st.integers(-3, 40) | st.integers())
def test_an_integer_is_taken_exactly_when_it_is_in_range(name, value):
    low, high = INTEGERS[name]
    fields = {name: value}
    if name == "min_tokens":
        fields["max_tokens"] = None
    if low <= value and (high is None or value <= high):
        taken = getattr(SamplingParams(**fields), name)
        if name == "top_k":
            assert taken == max(0, min(value, 2**31 - 1))
        elif high is None:
            assert taken == min(value, 2**31 - 1)
        else:
            assert taken == value
    else:
        assert refused(**fields) == name


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
@pytest.mark.parametrize(
    "value", [True, False, "1", math.nan, math.inf, -math.inf, 1j, [1], 10**400], ids=repr
)
def test_what_is_not_a_number_is_refused(name, value):
    if value == 10**400 and name in INTEGERS and name not in ("n", "seed"):
        value = 0.5
    assert refused(**{name: value}) == name


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [0.5, 1.0, 0.01, np.float32(2)], ids=repr)
def test_a_float_is_no_integer(name, value):
    assert refused(**{name: value}) == name


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_may_not_be_null(name):
    assert refused(**{name: None}) == name


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("value", [0, 1, "true", None], ids=repr)
def test_a_switch_is_true_or_false(name, value):
    assert refused(**{name: value}) == name


def test_numpy_numbers_are_taken():
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3), seed=np.int32(1))
    assert (params.temperature, params.max_tokens, params.seed) == (0.5, 3, 1)
    assert type(params.max_tokens) is int


def test_a_tiny_temperature_is_kept():
    assert SamplingParams(temperature=1e-30).temperature == 1e-30


@pytest.mark.parametrize("value", [0, -1])
def test_top_k_zero_and_minus_one_are_off(value):
    assert SamplingParams(top_k=value).top_k == 0


def test_greedy_with_several_choices_is_taken():
    assert SamplingParams(n=3, temperature=0).n == 3


@pytest.mark.parametrize(
    ("given_stop", "stop"),
    [(None, ()), ("END", ("END",)), (["a", "b"], ("a", "b")), (["a", "a"], ("a",)), ([], ())],
)
def test_stop_becomes_a_tuple(given_stop, stop):
    assert SamplingParams(stop=given_stop).stop == stop


@pytest.mark.parametrize(
    "stop",
    ["", ["a", ""], [1], 5, [str(i) for i in range(65)], "x" * 1025, {"a": 1}, [None], [["a"]], [{}]],
)
def test_a_wrong_stop_is_refused(stop):
    assert refused(stop=stop) == "stop"


def test_stop_strings_need_text():
    assert refused(stop="x", detokenize=False) == "stop"
    assert SamplingParams(detokenize=False).stop == ()


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_become_a_tuple_without_repeats(name):
    assert getattr(SamplingParams(**{name: [3, 1, 3]}), name) == (3, 1)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("value", [[-1], [True], [1.0], ["1"], 5, "12", {1: 2}, [None]], ids=repr)
def test_wrong_token_ids_are_refused(name, value):
    assert refused(**{name: value}) == name


def test_to_allow_no_token_is_refused():
    assert refused(allowed_token_ids=[]) == "allowed_token_ids"


@pytest.mark.parametrize("value", ["word", [""], [1], 3, [["word"]]], ids=repr)
def test_wrong_bad_words_are_refused(value):
    assert refused(bad_words=value) == "bad_words"


def test_lists_that_cost_the_engine_work_are_bounded():
    assert refused(bad_words=[str(i) for i in range(257)]) == "bad_words"
    assert refused(bad_words=["x" * 1025]) == "bad_words"
    assert refused(stop_token_ids=range(1025)) == "stop_token_ids"
    assert SamplingParams(allowed_token_ids=range(300_000)).allowed_token_ids[-1] == 299_999


def test_logit_bias_is_clamped_and_takes_the_keys_of_json():
    params = SamplingParams(logit_bias={"5": 200, 6: -1e9, 7: 0.5})
    assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 0.5}
    assert SamplingParams(logit_bias=dict.fromkeys(range(300), 1)).logit_bias[299] == 1.0


@pytest.mark.parametrize(
    "value",
    [
        {"x": 1},
        {"1.5": 1},
        {1.0: 1},
        {-1: 1},
        {"-1": 1},
        {"²": 1},
        {True: 1},
        {1: math.nan},
        {1: math.inf},
        {1: "1"},
        {1: None},
        [1],
        "1",
        dict.fromkeys(range(301), 1),
        {"9" * 5000: 1},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_wrong_logit_bias_is_refused(value):
    assert refused(logit_bias=value) == "logit_bias"


def test_min_tokens_beyond_max_tokens_is_refused():
    assert refused(min_tokens=5, max_tokens=4) == "min_tokens"
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=50, max_tokens=None).min_tokens == 50


@pytest.mark.parametrize(
    "fields",
    [{"stop_token_ids": [100]}, {"allowed_token_ids": [0, 100]}, {"logit_bias": {100: 1.0}}],
    ids=lambda fields: next(iter(fields)),
)
def test_ids_out_of_the_vocabulary_are_refused(fields):
    params = SamplingParams(**fields)
    params.validate_for(vocab_size=101, max_logprobs=0)
    with pytest.raises(InvalidRequestError, match="out of the vocabulary") as error:
        params.validate_for(vocab_size=100, max_logprobs=20)
    assert error.value.param == next(iter(fields))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_beyond_the_engines_limit_are_refused(name):
    params = SamplingParams(**{name: 20})
    params.validate_for(vocab_size=10, max_logprobs=20)
    with pytest.raises(InvalidRequestError, match="at most 19") as error:
        params.validate_for(vocab_size=10, max_logprobs=19)
    assert error.value.param == name


def test_a_copy_is_checked_and_the_first_unchanged():
    params = SamplingParams(stop="x", seed=1)
    assert params.replace(seed=2) == SamplingParams(stop="x", seed=2)
    assert params.seed == 1
    with pytest.raises(InvalidRequestError):
        params.replace(top_p=0)


def test_an_error_shows_a_long_value_shortened():
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(temperature="x" * 10_000)
    assert len(str(error.value)) < 200


def test_parameters_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs"])
def test_what_is_beyond_any_context_is_a_number_that_everything_can_count(name):
    others = {"max_tokens": None} if name == "min_tokens" else {}
    assert getattr(SamplingParams(**others, **{name: 10**400}), name) == 2**31 - 1
