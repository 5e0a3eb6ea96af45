"""Server-sent events: one table of bytes, each also byte by byte."""

import time

import pytest

from client.events import EventReader, StreamError, text_of
from tests.timing import check_linear

CHUNK = b'{"choices": [{"index": 0, "delta": {"content": "a"}}]}'
READ = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
TABLE = {
    "LF": (b"data: " + CHUNK + b"\n\n", [READ]),
    "CRLF": (b"data: " + CHUNK + b"\r\n\r\n", [READ]),
    "no space": (b"data:" + CHUNK + b"\n\n", [READ]),
    "a comment between": (b": ping\n\ndata: " + CHUNK + b"\n\n: ping\n\n", [READ]),
    "an event's name": (b"event: chunk\nid: 7\ndata: " + CHUNK + b"\n\n", [READ]),
    "several lines": (b'data: {"usage":\ndata: {}}\n\n', [{"usage": {}}]),
    "several events": ((b"data: " + CHUNK + b"\n\n") * 3, [READ] * 3),
    "not complete": (b"data: " + CHUNK + b"\n", []),
    "UTF-8": ('data: {"text": "é🙂"}\n\n'.encode(), [{"text": "é🙂"}]),
}


@pytest.mark.parametrize("name", TABLE)
def test_events(name: str) -> None:
    text, chunks = TABLE[name]
    assert EventReader().feed(text) == chunks
    reader = EventReader()
    assert [chunk for byte in text for chunk in reader.feed(bytes([byte]))] == chunks
    assert not reader.is_done


@pytest.mark.parametrize("unit", [b"x", b":", b"\r", b"data: ", b"\n", b"data: {}\n\n", b"\xff\\"])
def test_time_is_linear(unit: bytes) -> None:
    """Also of a line that never ends, which comes in small parts."""

    def seconds(size: int) -> float:
        text = unit * (size // len(unit))
        parts = [text[at : at + 16] for at in range(0, len(text), 16)]
        reader = EventReader()
        begun = time.thread_time()
        for part in parts:
            reader.feed(part)
        return time.thread_time() - begun

    check_linear(seconds, 400_000)


def test_the_end() -> None:
    reader = EventReader()
    assert reader.feed(b"data: " + CHUNK + b"\n\ndata: [DONE]\n\n") == [READ]
    assert reader.is_done


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"error": {"message": "it failed"}}', "it failed"),
        (b'{"error": "flat"}', "flat"),
        (b"{", "no JSON"),
        (b"[1]", "no object"),
    ],
)
def test_errors(data: bytes, said: str) -> None:
    with pytest.raises(StreamError, match=said):
        EventReader().feed(b"data: " + data + b"\n\n")


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"text": "a"}, "a"),
        ({"delta": {"content": "b"}}, "b"),
        ({"delta": {"content": None, "reasoning_content": "c"}}, "c"),
        ({"delta": {"reasoning": "d"}}, "d"),
        ({"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}, "f{}"),
        ({"delta": {"role": "assistant", "content": ""}}, ""),
        ({"delta": None}, ""),
    ],
)
def test_texts(choice: dict[str, object], text: str) -> None:
    assert text_of({"choices": [choice]}) == text
    assert text_of({"choices": []}) == text_of({}) == ""
