"""Reasoning split from content: the text alone, whatever tokens it came in."""

import time
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.reasoning import ReasoningSplitter
from engine.request import ReasoningMarkers
from tests.timing import check_linear

THINK = ReasoningMarkers("<think>", "</think>")

# (text, reasoning, content), where the text does not begin inside reasoning.
CLOSED = [
    ("", "", ""),
    (" \n", "", " \n"),
    ("It is 4.", "", "It is 4."),
    (" It is 4.", "", " It is 4."),
    ("<think>\nHm.\n\nSo: 4.\n</think>\n\nIt is 4.", "Hm.\n\nSo: 4.", "It is 4."),
    ("<think>Hm.\n\nSo: 4.</think>It is 4.", "Hm.\n\nSo: 4.", "It is 4."),
    ("\n<think>\nHm.\n\nSo: 4.\n</think>\n\nIt is 4.", "Hm.\n\nSo: 4.", "It is 4."),
    ("<think>\n\n</think>\n\nIt is 4.", "", "It is 4."),
    ("<think></think>It is 4.", "", "It is 4."),
    ("<think>\nHm.\n</think>\n\n  indented", "Hm.", "  indented"),
    ("<think>\nHm.\n</think>\n\n", "Hm.", ""),
    # Cut off.
    ("<thi", "", "<thi"),
    (" <thi", "", " <thi"),
    ("<think>", "", ""),
    ("<think>\nHm.\n", "Hm.", ""),
    ("<think>\nHm.\n</thi", "Hm.\n</thi", ""),
    # Only the first reasoning counts, and only where it is first.
    ("Write <think>…</think>.", "", "Write <think>…</think>."),
    ("<think>a<think>b</think>c</think>d<think>", "a<think>b", "c</think>d<think>"),
    ("<tank>", "", "<tank>"),
]

# Where it does.
OPENED = [
    ("", "", ""),
    ("Hm.\n\nSo: 4.\n</think>\n\nIt is 4.", "Hm.\n\nSo: 4.", "It is 4."),
    ("<think>\nHm.\n\nSo: 4.\n</think>\n\nIt is 4.", "Hm.\n\nSo: 4.", "It is 4."),
    ("\n\nHm.\n\nSo: 4.</think>It is 4.", "Hm.\n\nSo: 4.", "It is 4."),
    ("</think>It is 4.", "", "It is 4."),
    ("\n</think>\r\nIt is 4.", "", "It is 4."),
    ("Hm.\n\nSo: 4.", "Hm.\n\nSo: 4.", ""),
    ("<thi", "<thi", ""),
    ("\n<", "<", ""),
    ("\n", "", ""),
    ("a < b </ c </think", "a < b </ c </think", ""),
]

CASES = [(False, *case) for case in CLOSED] + [(True, *case) for case in OPENED]

# Everything that moves the splitter from one state to another, and things like it.
PIECES = [
    "<think>",
    "</think>",
    "<",
    "</",
    "think",
    ">",
    "<th",
    "ink>",
    " ",
    "\n",
    "\r\n",
    "\t",
    "é",
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=20).map("".join)


def split(pieces: Iterable[str], *, opened: bool) -> tuple[str, str]:
    """(reasoning, content), none of whose reasoning came after content."""
    splitter = ReasoningSplitter(THINK, opened=opened)
    found = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    told = [kind for pair in found for kind, text in enumerate(pair) if text]
    assert told == sorted(told)
    return "".join(pair[0] for pair in found), "".join(pair[1] for pair in found)


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize(("opened", "text", "reasoning", "content"), CASES)
def test_cases(opened: bool, text: str, reasoning: str, content: str) -> None:
    for at in range(len(text) + 1):
        assert split([text[:at], text[at:]], opened=opened) == (reasoning, content), at
    assert split(cut(text, 1), opened=opened) == (reasoning, content)


@settings(deadline=None)
@given(data=st.data(), text=texts, opened=st.booleans())
def test_the_cut_does_not_matter(data: st.DataObject, text: str, opened: bool) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    whole = split([text], opened=opened)
    assert split(pieces, opened=opened) == split(cut(text, 1), opened=opened) == whole


@settings(deadline=None)
@given(text=texts)
def test_nothing_is_lost_but_markers_and_whitespace_beside_them(text: str) -> None:
    thought, _, answer = text.partition("</think>")
    thought = thought.lstrip(" \t\r\n").removeprefix("<think>")
    expected = thought.strip(" \t\r\n"), answer.lstrip("\r\n")
    assert split(cut(text, 4), opened=True) == expected
    if text.lstrip(" \t\r\n").startswith("<think>"):
        assert split(cut(text, 4), opened=False) == expected
    else:
        assert split(cut(text, 4), opened=False) == ("", text)


def test_text_is_released_as_soon_as_it_is_decided() -> None:
    splitter = ReasoningSplitter(THINK, opened=False)
    released = [
        splitter.feed(each) for each in ("<th", "ink>\n", "So \n", "4.</", "b></think>\n", "\nIt")
    ]
    assert released == [("", ""), ("", ""), ("So", ""), (" \n4.", ""), ("</b>", ""), ("", "It")]


def test_tells_whether_it_is_inside() -> None:
    splitter = ReasoningSplitter(THINK, opened=False)
    seen = []
    for piece in ("", "<th", "ink>", "a", "</think>", "b"):
        splitter.feed(piece)
        seen.append(splitter.is_inside)
    assert seen == [False, False, True, True, False, False]
    assert ReasoningSplitter(THINK, opened=True).is_inside


@pytest.mark.parametrize(
    ("opened", "pieces", "tokens"),
    [
        (False, ["It", " is"], 0),
        (False, ["<think>", "Hm", "</think>", "4"], 3),
        (False, ["\n", "<", "think", ">", "Hm", "</", "think", ">", "\n\n", "4"], 7),
        (False, ["<", "think", "!"], 0),  # the opening never came
        (False, ["", "<th", "", "ink>a</think>b"], 3),  # without text: where it stands
        (False, ["<think></think>4"], 1),
        (False, ["<thi", "nk></think>4", "", "2"], 2),
        (False, ["<think>", "", "</think>", "", "4"], 3),
        (True, ["", "Hm", "</think>", "", "4"], 3),
        (True, ["<", "think>", "Hm"], 3),
        (True, ["\n", "Hm.</think>4", "<think>", "x"], 2),
    ],
)
def test_tokens_are_those_of_reasoning_and_its_markers(
    opened: bool, pieces: list[str], tokens: int
) -> None:
    splitter = ReasoningSplitter(THINK, opened=opened)
    for piece in pieces:
        splitter.feed(piece)
    assert splitter.tokens == tokens


@given(pieces=st.lists(st.sampled_from(["<think>", "</think>", "a", "b", "\n"]), max_size=8))
def test_tokens_do_not_depend_on_how_a_token_is_cut(pieces: list[str]) -> None:
    """The parts of one token: its text comes with the last of them."""
    whole, parts = ReasoningSplitter(THINK, opened=True), ReasoningSplitter(THINK, opened=True)
    for piece in pieces:
        whole.feed(piece)
        parts.feed(piece[:1])
        parts.feed(piece[1:], 0)
    assert whole.tokens == parts.tokens


def test_other_markers() -> None:
    splitter = ReasoningSplitter(ReasoningMarkers("[THINK]", "[/THINK]"), opened=False)
    assert splitter.feed("[THINK]a</think>[/THINK]b") == ("a</think>", "b")


LONG: dict[str, Callable[[int], str]] = {
    "content": lambda n: "word and " * (n // 9),
    "whitespace before": lambda n: " \n" * (n // 2),
    "whitespace inside": lambda n: "<think>a" + " \n" * (n // 2),
    "line breaks behind": lambda n: "<think>a</think>" + "\n" * n,
    "beginnings of the closing": lambda n: "<think>" + "hm </thin" * (n // 9),
    "openings inside": lambda n: "<think>" * (n // 7),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("whole", [False, True], ids=["pieces", "whole"])
def test_time_is_linear(name: str, whole: bool) -> None:
    def seconds(chars: int) -> float:
        text = LONG[name](chars)
        pieces = [text] if whole else cut(text, 4)
        begun = time.thread_time()
        splitter = ReasoningSplitter(THINK, opened=False)
        for piece in pieces:
            splitter.feed(piece)
        splitter.finish()
        return time.thread_time() - begun

    check_linear(seconds, 20_000)
