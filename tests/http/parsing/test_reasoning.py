"""Reasoning as Qwen3 and DeepSeek-R1 write it."""

import pytest

from tests.http.parsing.outputs import Part, cut, new_parser, parts, run

THOUGHT: Part = ("reasoning", "Hm.\n\nSo: 4.")
ANSWER: Part = ("content", "It is 4.")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

# Where the prompt does not end inside reasoning.
CLOSED: list[tuple[str, list[Part]]] = [
    ("", []),
    (" \n", [("content", " \n")]),
    ("It is 4.", [ANSWER]),
    (" It is 4.", [("content", " It is 4.")]),
    ("<think>\nHm.\n\nSo: 4.\n</think>\n\nIt is 4.", [THOUGHT, ANSWER]),
    ("<think>Hm.\n\nSo: 4.</think>It is 4.", [THOUGHT, ANSWER]),
    ("\n<think>\nHm.\n\nSo: 4.\n</think>\n\nIt is 4.", [THOUGHT, ANSWER]),
    ("<think>\n\n</think>\n\nIt is 4.", [ANSWER]),
    ("<think></think>It is 4.", [ANSWER]),
    ("<think>\nHm.\n</think>\n\n  indented", [("reasoning", "Hm."), ("content", "  indented")]),
    ("<think>\nHm.\n</think>\n\n", [("reasoning", "Hm.")]),
    # Cut off.
    ("<thi", [("content", "<thi")]),
    ("<think>", []),
    ("<think>\nHm.\n", [("reasoning", "Hm.")]),
    ("<think>\nHm.\n</thi", [("reasoning", "Hm.\n</thi")]),
    # Only the first reasoning counts, and only where it is first.
    ("Write <think>…</think>.", [("content", "Write <think>…</think>.")]),
    ("<think>a<think>b</think>c</think>d<think>",
     [("reasoning", "a<think>b"), ("content", "c</think>d<think>")]),
    ("<tank>", [("content", "<tank>")]),
]  # fmt: skip

# Where it does.
OPENED: list[tuple[str, list[Part]]] = [
    ("", []),
    ("Hm.\n\nSo: 4.\n</think>\n\nIt is 4.", [THOUGHT, ANSWER]),
    ("<think>\nHm.\n\nSo: 4.\n</think>\n\nIt is 4.", [THOUGHT, ANSWER]),
    ("\n\nHm.\n\nSo: 4.</think>It is 4.", [THOUGHT, ANSWER]),
    ("</think>It is 4.", [ANSWER]),
    ("\n</think>\r\nIt is 4.", [ANSWER]),
    ("Hm.\n\nSo: 4.", [THOUGHT]),
    ("<thi", [("reasoning", "<thi")]),
    ("\n<", [("reasoning", "<")]),
    ("\n", []),
    ("a < b </ c </think", [("reasoning", "a < b </ c </think")]),
]

CASES = (
    [("qwen3", False, *case) for case in CLOSED]
    + [("qwen3", True, *case) for case in OPENED]
    + [("deepseek-r1", False, *case) for case in OPENED]
)


@pytest.mark.parametrize(("format", "opened", "text", "expected"), CASES)
def test_cases(format: str, opened: bool, text: str, expected: list[Part]) -> None:
    for tools in ("none", "hermes"):
        for at in range(len(text) + 1):
            parser = new_parser(tools, format, opened=opened)
            assert parts(run(parser, [text[:at], text[at:]])) == expected, at
        assert parts(run(new_parser(tools, format, opened=opened), cut(text, 1))) == expected


def test_calls_come_after_reasoning() -> None:
    text = f"<think>\nI could write {CALL}.\n</think>\n\n{CALL}"
    expected = [("reasoning", f"I could write {CALL}."), ("call", "add", '{"a": 1}')]
    for size in (1, 5, len(text)):
        assert parts(run(new_parser("hermes", "qwen3"), cut(text, size))) == expected


def test_a_grammar_for_calls_leaves_reasoning_alone() -> None:
    text = 'Hm.\n</think>\n\n[{"name": "add", "arguments": {"a": 1}}]'
    parser = new_parser("hermes", "deepseek-r1", only_calls=True)
    assert parts(run(parser, [text])) == [("reasoning", "Hm."), ("call", "add", '{"a": 1}')]


def test_tells_whether_it_is_inside() -> None:
    parser = new_parser("none", "qwen3")
    seen = [(parser.feed(piece), parser.in_reasoning)[1] for piece in ("<th", "ink>", "a</think>")]
    assert seen == [False, True, False]
    assert new_parser("none", "qwen3", opened=True).in_reasoning
    assert new_parser("none", "deepseek-r1").in_reasoning
    assert not new_parser("hermes", "none").in_reasoning
