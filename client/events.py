"""Server-sent events as OpenAI-compatible servers write them: bytes to chunks, as they come.

Takes line ends of LF and of CRLF, comments, and events cut anywhere. Knows no endpoint.
"""

import json
from typing import Any, Final

DONE: Final = "[DONE]"


class StreamError(Exception):
    """The server said inside a stream that it failed, or said what is no event."""


class EventReader:
    """Reads one stream. Owned by whoever made it; not safe from other threads."""

    def __init__(self) -> None:
        self.is_done = False  # [DONE] was read
        self._line: list[bytes] = []  # the parts of a line that is not complete
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[dict[str, Any]]:
        """The chunks that `part` completes. Raises StreamError."""
        first, *lines = part.split(b"\n")
        self._line.append(first)
        chunks = []
        for following in lines:
            line = (b"".join(self._line) if len(self._line) > 1 else self._line[0]).rstrip(b"\r")
            self._line = [following]
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:  # else a comment, or a field that says nothing to us
                chunks += self._event()
        return chunks

    def _event(self) -> list[dict[str, Any]]:
        text, self._data = b"\n".join(self._data).decode(errors="replace"), []
        if text == DONE:
            self.is_done = True
            return []
        return [_chunk_of(text)]


def _chunk_of(text: str) -> dict[str, Any]:
    try:
        chunk = json.loads(text)
    except ValueError as broken:
        raise StreamError(f"an event is no JSON: {text[:200]}") from broken
    if not isinstance(chunk, dict):
        raise StreamError(f"an event is no object: {text[:200]}")
    if error := chunk.get("error"):
        raise StreamError(str(error.get("message", error) if isinstance(error, dict) else error))
    return chunk


def text_of(chunk: dict[str, Any]) -> str:
    """The text that a chunk of chat or completions brings, reasoning and tool calls included."""
    found = ""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        found += choice.get("text") or delta.get("content") or reasoning_of(delta)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            found += (function.get("name") or "") + (function.get("arguments") or "")
    return found


def reasoning_of(delta: dict[str, Any]) -> str:
    """What a delta brings of reasoning, by either of the names that servers give it."""
    return delta.get("reasoning_content") or delta.get("reasoning") or ""
