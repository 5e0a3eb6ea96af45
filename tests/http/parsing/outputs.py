"""Runs a parser over a text cut in any way, and what every result must satisfy."""

from collections.abc import Iterable, Sequence

from httpd.parsing.formats import Formats, ReasoningFormat, ToolsFormat, parser_for
from httpd.parsing.output import (
    CallArguments,
    CallBegan,
    CallEnded,
    Content,
    OutputEvent,
    OutputParser,
    Reasoning,
)

TOOLS = ("add", "get_weather", "get-time.v2")

# ("reasoning", text), ("content", text) or ("call", name, arguments), in order.
Part = tuple[str, ...]


def new_parser(
    tools: str = "none",
    reasoning: str = "none",
    *,
    names: Sequence[str] = TOOLS,
    opened: bool = False,
    only_calls: bool = False,
) -> OutputParser:
    formats = Formats(ToolsFormat(tools), ReasoningFormat(reasoning))
    return parser_for(formats, tool_names=names, reasoning_opened=opened, only_calls=only_calls)


def run(parser: OutputParser, pieces: Iterable[str]) -> list[OutputEvent]:
    """All events, checked against what holds for any text."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    check(events)
    assert parser.calls == sum(isinstance(event, CallBegan) for event in events)
    return events


def check(events: list[OutputEvent]) -> None:
    """Calls are numbered without gaps, one open at a time, ids differ, no event is empty."""
    ids, open_call, answered = set[str](), None, False
    for event in events:
        match event:
            case Reasoning(text):
                assert text and not answered
            case Content(text):
                assert text and open_call is None
            case CallBegan(index, id, name):
                assert open_call is None and index == len(ids) and id not in ids and name
                ids.add(id)
                open_call, told = index, False
            case CallArguments(index, text):
                assert text and index == open_call
                told = True
            case CallEnded(index):
                assert index == open_call and told
                open_call = None
        answered |= not isinstance(event, Reasoning)
    assert open_call is None


def parts(events: list[OutputEvent]) -> list[Part]:
    """What the events say, without how it was cut and without ids."""
    merged: list[Part] = []
    for event in events:
        match event:
            case Reasoning(text):
                _add(merged, "reasoning", text)
            case Content(text):
                _add(merged, "content", text)
            case CallBegan(_, _, name):
                merged.append(("call", name, ""))
            case CallArguments(_, text):
                _, name, arguments = merged[-1]
                merged[-1] = ("call", name, arguments + text)
    return merged


def _add(merged: list[Part], kind: str, text: str) -> None:
    if merged and merged[-1][0] == kind:
        text = merged.pop()[1] + text
    merged.append((kind, text))


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]
