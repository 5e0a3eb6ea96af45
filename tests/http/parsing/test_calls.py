"""Tool calls as models of each family write them, and as they write them wrongly."""

import pytest

from httpd.parsing.output import CallArguments, CallBegan, CallEnded, Content
from tests.http.parsing.outputs import Part, cut, new_parser, parts, run

ADD: Part = ("call", "add", '{"a": 1}')
WEATHER: Part = ("call", "get_weather", '{"city": "Paris", "days": [1, {"x": "}"}]}')
ADD_JSON = '{"name": "add", "arguments": {"a": 1}}'
WEATHER_JSON = (
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, {"x": "}"}]}}'
)  # fmt: skip
ADD_LLAMA = ADD_JSON.replace("arguments", "parameters")
WEATHER_LLAMA = WEATHER_JSON.replace("arguments", "parameters")


def content(text: str) -> Part:
    return ("content", text)


def hermes(*objects: str) -> str:
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


HERMES = [
    ("", []),
    (" \n ", [content(" \n ")]),
    ("Just text.", [content("Just text.")]),
    (hermes(ADD_JSON), [ADD]),
    (hermes(ADD_JSON) + "\n", [ADD]),
    (hermes(ADD_JSON, WEATHER_JSON), [ADD, WEATHER]),
    ("I'll look.\n" + hermes(WEATHER_JSON), [content("I'll look."), WEATHER]),
    (f"<tool_call>{ADD_JSON}</tool_call>", [ADD]),
    # Text after a call keeps its whitespace, so that the two contents do not run together.
    ("One." + hermes(ADD_JSON) + "\n\nTwo.", [content("One."), ADD, content("\n\nTwo.")]),
    # Arguments first; a name inside the arguments is not the call's.
    (hermes('{"arguments": {"name": "Bob"}, "name": "add"}'), [("call", "add", '{"name": "Bob"}')]),
    (hermes('{"id": "7", "name": "add", "x": [{}], "arguments": {}}'), [("call", "add", "{}")]),
    (hermes('{"note": "first", "name": "add", "arguments": {}}'), [("call", "add", "{}")]),
    # No arguments, in all ways that are met.
    (hermes('{"name": "add"}'), [("call", "add", "{}")]),
    (hermes('{"name": "add", "arguments": null}'), [("call", "add", "{}")]),
    (hermes('{"name": "add", "arguments": ""}'), [("call", "add", "{}")]),
    (hermes('{"name": "add", "arguments": {}}'), [("call", "add", "{}")]),
    # Arguments as a string with JSON in it.
    (hermes('{"name": "add", "arguments": "{\\"a\\": 1}"}'), [ADD]),
    # Markup inside strings is text.
    (
        hermes('{"name": "add", "arguments": {"t": "</tool_call><tool_call>{\\"\\\\"}}'),
        [("call", "add", '{"t": "</tool_call><tool_call>{\\"\\\\"}')],
    ),
    # The text of arguments is the model's, whatever its layout and escapes.
    (
        hermes('{"name": "add", "arguments": {\n  "t" : "\\u00e9é😀\\n",\t"n":-1.5e3}\n}'),
        [("call", "add", '{\n  "t" : "\\u00e9é😀\\n",\t"n":-1.5e3}')],
    ),
    (hermes('{"name": "g\\u0065t_weather", "arguments": {}}'), [("call", "get_weather", "{}")]),
    # Several in one pair of markers, as objects and as an array.
    (hermes(f"{ADD_JSON}\n{WEATHER_JSON}"), [ADD, WEATHER]),
    (hermes(f"[{ADD_JSON}, {WEATHER_JSON}]"), [ADD, WEATHER]),
    # The second value of a key does not count.
    (hermes('{"name": "add", "name": "x", "arguments": {}, "arguments": {"a": 2}}'),
     [("call", "add", "{}")]),
    (hermes(f'{{"name": "add", "arguments": {deep(1000)}}}'), [("call", "add", deep(1000))]),
]  # fmt: skip

# What is no call stays what the model wrote, markers included.
UNCALLED = [
    hermes('{"name": "unknown", "arguments": {"a": 1}}'),
    hermes('{"name": 5, "arguments": {}}'),
    hermes('{"arguments": {}}'),
    hermes('{"name": "add", "arguments": [1]}'),
    hermes('{"name": "add", "arguments": "not json"}'),
    hermes('{"name": "add", "arguments": 7}'),
    hermes("{'name': 'add', 'arguments': {}}"),
    hermes('{"name": add, "arguments": {}}'),
    hermes('{"name" "add"}'),
    hermes("{}"),
    hermes("[]"),
    hermes("not json"),
    hermes(""),
    hermes('{"name": "unknown", "arguments": {"t": "<tool_call>' + ADD_JSON[1:] + '"}}'),
    # Cut off before it is a call.
    "<tool_c",
    "text <",
    "<tool_call>",
    '<tool_call>\n{"name": "add"',
    '<tool_call>\n{"name": "add", "arguments"',
    '<tool_call>\n{"arguments": {"a": 1}',
    # Prose about the marker.
    "Write <tool_call> before and </tool_call> after it. ",
    "a < b <tool < c",
]

# Once it began it is a call, and ends with what came.
BROKEN = [
    ('<tool_call>{"name": "add", "arguments": {', [("call", "add", "{")]),
    ('<tool_call>{"name": "add", "arguments": {"a": "x\\', [("call", "add", '{"a": "x\\')]),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}', [ADD]),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}}', [ADD]),
    (f"<tool_call>{ADD_JSON}</tool", [ADD, content("</tool")]),
    # A missing brace, in the object and in the arguments: the marker ends the call.
    ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', [ADD]),
    ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', [("call", "add", '{"a": 1')]),
    # One too many is content.
    (f"<tool_call>{ADD_JSON}}}</tool_call>", [ADD, content("}</tool_call>")]),
    # Others are not disturbed.
    (hermes("{oops}", ADD_JSON), [content("<tool_call>\n{oops}\n</tool_call>"), ADD]),
]

LLAMA = [
    (ADD_LLAMA, [ADD]),
    (f"<|python_tag|>{ADD_LLAMA}", [ADD]),
    (f"\n\n{ADD_LLAMA}\n", [ADD]),
    (f"{ADD_LLAMA}; {WEATHER_LLAMA}", [ADD, WEATHER]),
    (f"<|python_tag|>{ADD_LLAMA};{WEATHER_LLAMA};", [ADD, WEATHER]),
    (f"<|python_tag|>{ADD_LLAMA}<|python_tag|>{WEATHER_LLAMA}", [ADD, WEATHER]),
    (f"{ADD_LLAMA}\n{WEATHER_LLAMA}", [ADD, WEATHER]),
    (f"Let me see. <|python_tag|>{ADD_LLAMA}", [content("Let me see."), ADD]),
    ('{"type": "function", "name": "add", "parameters": {"a": 1}}', [ADD]),
    (ADD_JSON, [ADD]),
    (f"{ADD_LLAMA} is what I would call.", [ADD, content(" is what I would call.")]),
    # Answers that are JSON, or look a little like it.
    ('{"answer": 42, "why": {"name": "add"}}', [content('{"answer": 42, "why": {"name": "add"}}')]),
    ('{"name": "Bob", "age": 5}', [content('{"name": "Bob", "age": 5}')]),
    ("[1] says so", [content("[1] says so")]),
    ("[[1, 2], {}]", [content("[[1, 2], {}]")]),
    (f"Call {ADD_LLAMA}", [content(f"Call {ADD_LLAMA}")]),
    ('<|python_tag|>print("hi")', [content('<|python_tag|>print("hi")')]),
]

MISTRAL = [
    (f"[TOOL_CALLS][{ADD_JSON}]", [ADD]),
    (f"[TOOL_CALLS] [{ADD_JSON}, {WEATHER_JSON}]\n", [ADD, WEATHER]),
    ('Hello[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "add"}]', [content("Hello"), ADD]),
    (f"[TOOL_CALLS] [{ADD_JSON}]\nmore", [ADD, content("\nmore")]),
    (f"[TOOL_CALLS] {ADD_JSON}", [ADD]),
    ('[TOOL_CALLS]add{"a": 1}', [ADD]),
    ('[TOOL_CALLS]add[ARGS]{"a": 1}', [ADD]),
    ('[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', [ADD]),
    ('[TOOL_CALLS]get-time.v2[ARGS]{}', [("call", "get-time.v2", "{}")]),
    ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{}',
     [ADD, ("call", "get_weather", "{}")]),
    ('[TOOL_CALLS]add[ARGS]{"a": "[TOOL_CALLS]add[ARGS]{"}',
     [("call", "add", '{"a": "[TOOL_CALLS]add[ARGS]{"}')]),
    ('[TOOL_CALLS]add[ARGS]{"a', [("call", "add", '{"a')]),
    # Not calls.
    ('[TOOL_CALLS]unknown[ARGS]{"a": 1}', [content('[TOOL_CALLS]unknown[ARGS]{"a": 1}')]),
    ("[TOOL_CALLS] not json at all", [content("[TOOL_CALLS] not json at all")]),
    ("[TOOL_CALLS]add", [content("[TOOL_CALLS]add")]),
    ("[TOOL_CALLS]add[ARGS]", [content("[TOOL_CALLS]add[ARGS]")]),
    ("[TOOL_CALLS]" + "x" * 300 + "{}", [content("[TOOL_CALLS]" + "x" * 300 + "{}")]),
    ('[TOOL_CALLS]a b[TOOL_CALLS]add{"a": 1}', [content("[TOOL_CALLS]a b"), ADD]),
    ("[TOOL_C", [content("[TOOL_C")]),
    ("see [TOOL", [content("see [TOOL")]),
]  # fmt: skip

JSON = [
    (ADD_JSON, [ADD]),
    (f"[{ADD_JSON},{WEATHER_JSON}]", [ADD, WEATHER]),
    (f" [ {ADD_JSON} , {WEATHER_JSON} ] ", [ADD, WEATHER]),
    ("[]", [content("[]")]),
    (f"[{ADD_JSON}", [ADD]),
    (f"[{ADD_JSON},", [ADD]),
    (f"[{ADD_JSON}, 5]", [ADD, content(", 5]")]),
    (f"<tool_call>{ADD_JSON}", [content(f"<tool_call>{ADD_JSON}")]),
]

CASES = [
    (format, text, expected)
    for format, table in [
        ("hermes", HERMES + BROKEN),
        ("hermes", [(text, [content(text)]) for text in UNCALLED]),
        ("llama3", LLAMA),
        ("mistral", MISTRAL),
        ("json", JSON),
    ]
    for text, expected in table
]


@pytest.mark.parametrize(("format", "text", "expected"), CASES)
def test_cases(format: str, text: str, expected: list[Part]) -> None:
    sizes = (1, 2, 3, 7, len(text) or 1) if len(text) < 1000 else (1, len(text))
    for size in sizes:
        assert parts(run(new_parser(format), cut(text, size))) == expected, size
    if len(text) < 100:
        for at in range(len(text)):
            assert parts(run(new_parser(format), [text[:at], text[at:]])) == expected, at


@pytest.mark.parametrize("format", ["hermes", "llama3", "mistral", "json", "none"])
def test_without_tools_calls_are_content(format: str) -> None:
    for _, text, _ in CASES:
        joined = [content(text)] if text else []
        assert parts(run(new_parser(format, names=()), cut(text, 3))) == joined


def test_arguments_stream_as_they_come() -> None:
    parser = new_parser("hermes")
    assert parser.feed('<tool_call>{"name": "add", "arguments": ') == []
    began, first = parser.feed('{"a"')
    assert isinstance(began, CallBegan) and (began.index, began.name) == (0, "add")
    assert first == CallArguments(0, '{"a"')
    assert parser.feed(': "x') == [CallArguments(0, ': "x')]
    assert parser.feed('"}') == [CallArguments(0, '"}')]
    assert parser.feed("}") == [CallEnded(0)]
    assert parser.feed("</tool_call>") == parser.finish() == []


def test_content_is_held_only_where_a_marker_may_come() -> None:
    parser = new_parser("hermes")
    assert parser.feed("One two") == [Content("One two")]
    assert parser.feed(" <") == []
    assert parser.feed("3") == [Content(" <3")]
    assert parser.feed("\n<tool_") == []
    assert parser.feed("x") == [Content("\n<tool_x")]


def test_an_answer_in_json_is_not_held_to_its_end() -> None:
    parser = new_parser("llama3")
    assert parser.feed('{"answer":') == []
    assert parser.feed(" 4") == [Content('{"answer": 4')]
    assert parser.feed("2") == [Content("2")]


def test_ids() -> None:
    """Unique and OpenAI's form; nine letters and digits for Mistral, whose template insists."""

    def ids(format: str, text: str, **options: bool) -> list[str]:
        events = run(new_parser(format, **options), [text])
        return [event.id for event in events if isinstance(event, CallBegan)]

    first, second = ids("hermes", hermes(ADD_JSON, ADD_JSON))
    assert first != second and first.startswith("call_") and second.startswith("call_")
    for made in (
        ids("mistral", '[TOOL_CALLS]add[CALL_ID]same[ARGS]{}[TOOL_CALLS]add[CALL_ID]same[ARGS]{}')
        + ids("mistral", f"[{ADD_JSON},{ADD_JSON}]", only_calls=True)
    ):  # fmt: skip
        assert len(made) == 9 and made.isalnum() and made.isascii()
