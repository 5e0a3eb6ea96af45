"""Where a JSON value ends, while its text arrives in pieces of any size.

Looks only at what tells the end: strings, escapes and brackets. Models write values that are not
quite JSON, and a client that streams has already seen the first half when the second is wrong: so
the text is passed on as it is, and read by whoever receives it. Stops at a character that no JSON
has outside strings. Each character is looked at once; nesting costs a number.
"""

import re

# Runs that need no decision. All are possessive: a run is never given back.
_IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_BETWEEN = re.compile(r"[ \t\r\n:,0-9A-Za-z+.\-]*+")
_SCALAR = re.compile(r"[0-9A-Za-z+.\-]*+")


class JsonValue:
    """One value: begins with its first character. Owned by its HTTP loop."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar_begun", "broken", "done")

    def __init__(self) -> None:
        self._depth = 0  # brackets open
        self._in_string = False
        self._escaped = False  # the text so far ends with a backslash that escapes what comes
        self._scalar_begun = False  # a number, true, false or null
        self.done = False
        self.broken = False  # done because of a character that cannot be here; it was not taken

    def feed(self, text: str, start: int) -> int:
        """Index in `text` after what belongs to the value; the text's end unless it is `done`."""
        position = start
        while position < len(text) and not self.done:
            if self._in_string:
                position = self._string(text, position)
            elif self._depth:
                position = self._between(text, position)
            else:
                position = self._first(text, position)
        return position

    def _first(self, text: str, position: int) -> int:
        char = text[position]
        if not self._scalar_begun and char in '"{[':
            return self._open(char, position)
        end = _SCALAR.match(text, position).end()  # type: ignore[union-attr]  # matches ""
        self._scalar_begun = self._scalar_begun or end > position
        self.done = end < len(text)
        self.broken = self.done and not self._scalar_begun
        return end

    def _between(self, text: str, position: int) -> int:
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]  # matches ""
        if position == len(text):
            return position
        char = text[position]
        if char in '"{[':
            return self._open(char, position)
        if char not in "]}":
            self.done = self.broken = True
            return position
        self._depth -= 1
        self.done = not self._depth
        return position + 1

    def _open(self, char: str, position: int) -> int:
        if char == '"':
            self._in_string = True
        else:
            self._depth += 1
        return position + 1

    def _string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            position += 1
        position = _IN_STRING.match(text, position).end()  # type: ignore[union-attr]  # matches ""
        if position == len(text):
            return position
        if text[position] == "\\":  # the last character: what it escapes is still to come
            self._escaped = True
            return position + 1
        self._in_string = False
        self.done = not self._depth
        return position + 1


def is_json_object(text: str) -> bool:
    """Whether `text` is one object from end to end, as far as brackets and strings tell."""
    value = JsonValue()
    return text[:1] == "{" and value.feed(text, 0) == len(text) and value.done and not value.broken
