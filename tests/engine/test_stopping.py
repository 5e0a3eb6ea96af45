"""Stop strings against their definition, with the text cut in every way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stopping import StopStrings

few_letters = st.text("ab", min_size=1, max_size=5)


def run(stop: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """(what each piece released, with the flush at the end, and the match)."""
    stops, released = StopStrings(stop), []
    for piece in pieces:
        released.append(stops.feed(piece))
        if stops.match is not None:
            return released, stops.match
    return [*released, stops.flush()], None


def expected(stop: list[str], text: str) -> tuple[str, str | None]:
    """The stop string that is complete first, the longest of those, cuts the text."""
    for end in range(1, len(text) + 1):
        complete = [each for each in stop if text[:end].endswith(each)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stop=st.lists(few_letters, min_size=1, max_size=4, unique=True),
    pieces=st.lists(st.text("abc", max_size=6), max_size=12),
)
def test_as_defined_however_the_text_is_cut(stop: list[str], pieces: list[str]) -> None:
    released, match = run(stop, pieces)
    assert ("".join(released), match) == expected(stop, "".join(pieces))


@given(
    stop=st.lists(few_letters, min_size=1, max_size=4, unique=True),
    pieces=st.lists(st.text("abc", max_size=6), max_size=12),
)
def test_holds_no_more_than_may_begin_a_stop_string(stop: list[str], pieces: list[str]) -> None:
    stops, text, sent = StopStrings(stop), "", ""
    for piece in pieces:
        sent += stops.feed(piece)
        text += piece
        if stops.match is not None:
            return
        begins = [n for s in stop for n in range(len(s)) if text.endswith(s[:n])]
        assert sent == text[: len(text) - max(begins)]


@pytest.mark.parametrize(
    ("stop", "pieces", "released", "match"),
    [
        (["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "JKL"], ["ABC", "", "", "", ""], "DEFGHIJ"),
        (["lo wo"], ["hel", "lo", " world"], ["he", "l", ""], "lo wo"),
        (["zzz"], ["a", "b"], ["a", "b", ""], None),
        (["XYZ"], ["some", "X", "Y"], ["some", "", "", "XY"], None),
        (["STOP", "XSTOP"], ["aXSTOP!"], ["a"], "XSTOP"),  # complete at once: the longest
        (["abcd", "bc"], ["a", "b", "c", "d"], ["", "", "a"], "bc"),  # complete first
        (["abcd", "bc"], ["abcd"], ["a"], "bc"),
        (["\n\n"], ["one\n", "two\n", "\n"], ["one", "\ntwo", ""], "\n\n"),
        (["aab"], ["aaaa", "ab"], ["aa", "a"], "aab"),
        (["。"], ["今天。", "明天"], ["今天"], "。"),
    ],
)
def test_cases(stop: list[str], pieces: list[str], released: list[str], match: str | None) -> None:
    assert run(stop, pieces) == (released, match)
