"""Stop strings against a search by brute force."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.stop_strings import StopChecker

text_of_few_letters = st.text("ab.", max_size=6)
stops_of_few_letters = st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=4)


def first_stop(pieces: list[str], stops: list[str], min_pieces: int) -> tuple[int, str] | None:
    """End and stop string of the first match, looking at every end in turn."""
    text = ""
    for number, piece in enumerate(pieces, 1):
        for char in piece:
            text += char
            found = [stop for stop in stops if text.endswith(stop)]
            if found and number > min_pieces:
                return len(text), max(found, key=len)
    return None


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(text_of_few_letters, max_size=12),
    stops=stops_of_few_letters,
    min_pieces=st.integers(0, 4),
    include=st.booleans(),
)
def test_shown_text_is_never_taken_back_and_ends_at_the_first_stop(pieces, stops, min_pieces, include):
    checker = StopChecker(tuple(stops), include)
    shown, seen = "", ""
    for number, piece in enumerate(pieces, 1):
        shown += checker.feed(piece, may_stop=number > min_pieces)
        seen += piece
        if checker.stop is None and not include:
            prefixes = [s[:k] for s in stops for k in range(1, len(s)) if seen.endswith(s[:k])]
            held = max(map(len, prefixes), default=0)
            assert shown == seen[: len(seen) - held]  # no more is held back than must be
    shown += checker.flush()
    found = first_stop(pieces, stops, min_pieces)
    if found is None:
        assert (shown, checker.stop) == ("".join(pieces), None)
    else:
        end, stop = found
        assert checker.stop == stop
        assert shown == "".join(pieces)[: end if include else end - len(stop)]


def test_overlapping_candidates():
    checker = StopChecker(("aab",), False)
    assert [checker.feed(c) for c in "aaab"] == ["", "", "a", ""]
    assert checker.stop == "aab"


def test_of_stops_where_one_begins_another_the_first_to_end_wins():
    checker = StopChecker(("END", "END."), False)
    assert checker.feed("the END.") == "the "
    assert checker.stop == "END"


def test_of_stops_that_end_together_the_longest_wins():
    checker = StopChecker(("ND", "END"), False)
    assert checker.feed("the END.") == "the "
    assert checker.stop == "END"


def test_nothing_comes_after_a_stop():
    checker = StopChecker(("x",), True)
    assert checker.feed("axb") == "ax"
    assert checker.feed("c") == checker.flush() == ""
