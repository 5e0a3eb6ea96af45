"""Texts put together at random, cut at random: what comes out does not depend on the cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.http.parsing.outputs import TOOLS, Part, cut, new_parser, parts, run

FORMATS = ("hermes", "llama3", "mistral", "json", "none")

# Everything that moves a parser from one state to another, and things like it.
PIECES = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "</", "<", ">", "<|python_tag|>", "<|", "|>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL", "[", "]", "{", "}", '"', "\\", '\\"', ",", ";",
    ":", " ", "\n", '"name"', '"arguments"', '"parameters"', '"id"', '"x"',
    '"name": "add"', '"name": "nobody"', '"arguments": {', "add", "get_weather", "null", "-1.5",
    "true", "é", "😀", "'", "\ud800", '{"name": "add", "arguments": {"a": 1}}',
    '{"arguments": {"t": "}\\"{</tool_call>"}, "name": "add"}',
    '{"name": "add", "arguments": "{}"}',
]  # fmt: skip

texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join)


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    ends = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=50, deadline=None)
@given(data=st.data(), text=texts)
def test_the_cut_does_not_matter(format: str, data: st.DataObject, text: str) -> None:
    whole = parts(run(new_parser(format), [text]))
    assert parts(run(new_parser(format), cut(text, 1))) == whole
    assert parts(run(new_parser(format), data.draw(cuts(text)))) == whole


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None)
@given(text=texts)
def test_without_a_call_nothing_is_lost(format: str, text: str) -> None:
    found = parts(run(new_parser(format, names=("no such tool",)), cut(text, 4)))
    assert found == ([("content", text)] if text else [])


# Texts made to a plan: prose that holds no markup, and calls.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    | st.sampled_from(PIECES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)  # fmt: skip
objects = st.dictionaries(st.sampled_from(["name", "arguments", "x"]) | st.text(), json_values)
prose = st.text(st.sampled_from("abc .é😀\n"), min_size=1).map(str.strip).filter(bool)
space = st.text(st.sampled_from(" \n"), max_size=3)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, str]:
    """(name, its arguments' text, the object's text)."""
    name = draw(st.sampled_from(TOOLS))
    indent, escape = draw(st.sampled_from([None, 2])), draw(st.booleans())
    arguments = json.dumps(draw(objects), indent=indent, ensure_ascii=escape)
    members = [f'"name":{draw(space)}"{name}"', f'"arguments":{draw(space)}{arguments}']
    if draw(st.booleans()):
        members.append(f'"id": {json.dumps(draw(json_values))}')
    members = draw(st.permutations(members))
    return name, arguments, "{" + f"{draw(space)},{draw(space)}".join(members) + draw(space) + "}"


@st.composite
def planned(draw: st.DrawFn, format: str) -> tuple[str, list[Part]]:
    """A text of the format, and what is in it."""
    text, plan = draw(space), list[Part]()
    if format in ("hermes", "mistral") and draw(st.booleans()):
        lead = text + draw(prose)
        text, plan = lead + draw(space), [("content", lead)]
    found = draw(st.lists(calls(), min_size=1, max_size=4))
    plan += [("call", name, arguments) for name, arguments, _ in found]
    bodies = [body for _, _, body in found]
    gap = draw(space)
    if format == "hermes":
        text += gap.join(f"<tool_call>{gap}{body}{gap}</tool_call>" for body in bodies)
    elif format == "llama3":
        text += draw(st.sampled_from(["", "<|python_tag|>"])) + f"{gap};".join(bodies)
    elif format == "mistral" and draw(st.booleans()):
        text += "".join(f"[TOOL_CALLS]{name}[ARGS]{args}{gap}" for name, args, _ in found)
    elif format == "mistral":
        text += "[TOOL_CALLS]" + gap + "[" + f",{gap}".join(bodies) + "]"
    else:
        text += "[" + f"{gap},".join(bodies) + "]"
    return text + draw(space), plan


@pytest.mark.parametrize("format", ["hermes", "llama3", "mistral", "json"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_calls_are_found_as_planned(format: str, data: st.DataObject) -> None:
    text, plan = data.draw(planned(format))
    assert parts(run(new_parser(format), data.draw(cuts(text)))) == plan
    for _, _, arguments in (part for part in plan if part[0] == "call"):
        json.loads(arguments)


@pytest.mark.parametrize("format", ["hermes", "llama3", "mistral", "json"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_text_cut_off_has_the_beginning_of_its_calls(format: str, data: st.DataObject) -> None:
    text, plan = data.draw(planned(format))
    text = text[: data.draw(st.integers(0, len(text)))]
    found = [part for part in parts(run(new_parser(format), cut(text, 5))) if part[0] == "call"]
    whole = [part for part in plan if part[0] == "call"]
    for (_, name, arguments), (_, full_name, full) in zip(found, whole, strict=False):
        assert name == full_name and full.startswith(arguments)
    assert [part[2] for part in found[:-1]] == [part[2] for part in whole[: len(found)]][:-1]
