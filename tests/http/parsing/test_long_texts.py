"""Time is linear in the text, and memory in what must be held: CVE-2025-48887."""

import time
from collections.abc import Callable

import pytest

from httpd.parsing.json_value import JsonValue
from tests.http.parsing.outputs import cut, new_parser, parts, run
from tests.timing import check_linear

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
BEGUN = '{"name": "add", "parameters": {"a": "'
OTHER = '<tool_call>{"name": "no such tool", "arguments": {"a": "'

# name: (format, text of about n characters): each the worst for some part.
TEXTS: dict[str, tuple[str, Callable[[int], str]]] = {
    "prose": ("hermes", lambda n: "word and " * (n // 9)),
    "whitespace": ("hermes", lambda n: " \n" * (n // 2)),
    "beginnings of markers": ("hermes", lambda n: "<tool_call" * (n // 10)),
    "markers": ("hermes", lambda n: "<tool_call>" * (n // 11)),
    "calls": ("hermes", lambda n: ADD * (n // len(ADD))),
    "arguments": ("llama3", lambda n: BEGUN + '\\"' * (n // 2)),
    "held arguments": ("json", lambda n: '{"arguments":{"a":[' + '"x",' * (n // 4)),
    "string arguments": ("json", lambda n: '{"name":"add","arguments":"' + "x" * n),
    "nesting": ("json", lambda n: '{"name":"add","arguments":{"a":' + "[" * n),
    "list of nothing": ("json", lambda n: "[" * n),
    "unknown tool": ("hermes", lambda n: OTHER + "<tool_call>" * (n // 11)),
    "long name": ("mistral", lambda n: "[TOOL_CALLS]" + "x" * n),
    "names": ("mistral", lambda n: ("[TOOL_CALLS]" + "x" * 200) * (n // 212)),
    "separators": ("json", lambda n: '[{"name":"add"}' + ',{"name":"add"}' * (n // 15)),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("whole", [False, True], ids=["pieces", "whole"])
def test_time_is_linear(name: str, whole: bool) -> None:
    tools, make = TEXTS[name]

    def seconds(chars: int) -> float:
        text = make(chars)
        pieces = [text] if whole else cut(text, 4)
        begun = time.thread_time()
        parser = new_parser(tools)
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        return time.thread_time() - begun

    check_linear(seconds, 8_000)


def test_nesting_has_no_limit() -> None:
    for levels in (1_000, 100_000):
        value = '{"a":' * levels + "1" + "}" * levels
        text = f'{{"name": "add", "arguments": {value}}}'
        assert parts(run(new_parser("json"), cut(text, 1000))) == [("call", "add", value)]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("1,", 1), ("-1.5e+3}", 7), ("true]", 4), ("null ", 4), ('"a"x', 3), ('"\\""x', 4),
        ('"\\\\"x', 4), ("{}x", 2), ("[]x", 2), ('{"a": [1, "}"]}}', 15), ('"]', None),
        ("[1", None), ("12", None), ('"\\"', None), ('"\\', None),
    ],
)  # fmt: skip
def test_where_a_value_ends(text: str, end: int | None) -> None:
    for size in (1, 2, 3, len(text)):
        value, taken = JsonValue(), 0
        for piece in cut(text, size):
            if not value.done:
                taken += value.feed(piece, 0)
        assert (taken if value.done else None) == end and not value.broken


@pytest.mark.parametrize(("text", "end"), [("{'a': 1}", 1), ("[1 <", 3), ("<", 0)])
def test_stops_where_no_json_goes_on(text: str, end: int) -> None:
    value = JsonValue()
    assert (value.feed(text, 0), value.done, value.broken) == (end, True, True)
