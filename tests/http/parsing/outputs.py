"""Runs a parser over a text cut in any way, and what every result must satisfy."""

from collections.abc import Iterable, Sequence

from httpd.parsing.formats import Formats, ToolsFormat, parser_for
from httpd.parsing.output import (
    CallArguments,
    CallBegan,
    CallEnded,
    Content,
    OutputEvent,
    OutputParser,
)

TOOLS = ("add", "get_weather", "get-time.v2")

# ("content", text) or ("call", name, arguments), in order.
Part = tuple[str, ...]


def new_parser(
    tools: str = "none", *, names: Sequence[str] = TOOLS, only_calls: bool = False
) -> OutputParser:
    formats = Formats(tools=ToolsFormat(tools))
    return parser_for(formats, tool_names=names, only_calls=only_calls)


def run(parser: OutputParser, pieces: Iterable[str]) -> list[OutputEvent]:
    """All events, checked against what holds for any text."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    check(events)
    assert parser.calls == sum(isinstance(event, CallBegan) for event in events)
    return events


def check(events: list[OutputEvent]) -> None:
    """Calls are numbered without gaps, one open at a time, ids differ, no event is empty."""
    ids, open_call = set[str](), None
    for event in events:
        match event:
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
    assert open_call is None


def parts(events: list[OutputEvent]) -> list[Part]:
    """What the events say, without how it was cut and without ids."""
    merged: list[Part] = []
    for event in events:
        match event:
            case Content(text):
                if merged and merged[-1][0] == "content":
                    text = merged.pop()[1] + text
                merged.append(("content", text))
            case CallBegan(_, _, name):
                merged.append(("call", name, ""))
            case CallArguments(_, text):
                _, name, arguments = merged[-1]
                merged[-1] = ("call", name, arguments + text)
    return merged


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]
