"""One call as a JSON object, while it streams: `{"name": …, "arguments": {…}}`.

Arguments stream just as the model wrote them, as soon as it is sure that this is a call: its name
is one of the request's tools and its arguments are an object. Until then everything is held, and
becomes content where it turns out to be no call (another name, no name, not JSON).
"""

import enum
import json

from engine.until_marker import WHITESPACE
from httpd.parsing.calls import Calls
from httpd.parsing.json_value import JsonValue, is_json_object
from httpd.parsing.output import CallArguments, CallEnded, Content, OutputEvent

NO_ARGUMENTS = "{}"


class _Expect(enum.Enum):
    """What comes next in the object."""

    BRACE = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()  # its first character
    REST = enum.auto()  # of a key or value
    NEXT = enum.auto()  # a comma or the end


class _Role(enum.Enum):
    """What a string or value inside the object is."""

    KEY = enum.auto()
    NAME = enum.auto()
    ARGUMENTS = enum.auto()  # an object
    ODD_ARGUMENTS = enum.auto()  # anything else
    OTHER = enum.auto()


_ARGUMENTS_KEYS = ("arguments", "parameters")  # the second is Llama's
_KNOWN_KEYS = ("name", *_ARGUMENTS_KEYS, "id", "type")


class CallObject:
    """An object that may be a call, its `{` first. Owned by its HTTP loop."""

    def __init__(self, calls: Calls, markup: str, *, any_keys: bool) -> None:
        """
        markup    what stood before the object: content too, where this is no call
        any_keys  whether a key that calls do not have may come before what makes it a call. False
                  where no marker said that a call comes: then most objects are plain answers
        """
        self._calls = calls
        self._any_keys = any_keys
        self._held = [markup]  # the text so far, while undecided
        self._expect = _Expect.BRACE
        self._role = _Role.OTHER
        self._value = JsonValue()
        self._parts: list[str] = []  # of the key or value being read, where it is needed whole
        self._name: str | None = None
        self._arguments: list[str] | None = None  # so far, and not sent
        self._index = -1  # of the call, once it began
        self._refused = False  # this is no call
        self.done = False

    @property
    def is_call(self) -> bool:
        return self._index >= 0

    def feed(self, text: str, start: int, out: list[OutputEvent]) -> int:
        position = start
        while position < len(text) and not self.done:
            if self._expect is _Expect.REST:
                position = self._read_rest(text, position, out)
            else:
                position = self._read_char(text[position], position, out)
        if not self.is_call:
            self._held.append(text[start:position])
            if self._refused:
                self._release(out)
        return position

    def finish(self, out: list[OutputEvent]) -> None:
        if self.is_call:
            out.append(CallEnded(self._index))
        else:
            self._release(out)
        self.done = True

    def _release(self, out: list[OutputEvent]) -> None:
        text = "".join(self._held)
        self._held.clear()
        if text:
            out.append(Content(text))

    def _read_char(self, char: str, position: int, out: list[OutputEvent]) -> int:
        """Takes a character between strings and values; what is wrong there ends the object."""
        expect = self._expect
        if char in WHITESPACE:
            return position + 1
        if expect is _Expect.VALUE:
            self._begin_value(char)
            return position
        if expect is _Expect.KEY and char == '"':
            self._begin(_Role.KEY)
            return position
        if expect is _Expect.BRACE and char == "{":
            self._expect = _Expect.KEY
        elif expect is _Expect.COLON and char == ":":
            self._expect = _Expect.VALUE
        elif expect is _Expect.NEXT and char == ",":
            self._expect = _Expect.KEY
        elif expect in (_Expect.NEXT, _Expect.KEY) and char == "}":
            self._end(out)
            return position + 1
        else:
            self._break(out)
            return position
        return position + 1

    def _begin_value(self, char: str) -> None:
        key = self._text()
        if key == "name" and self._name is None:
            self._begin(_Role.NAME)
        elif key in _ARGUMENTS_KEYS and self._arguments is None:
            self._arguments = []
            self._begin(_Role.ARGUMENTS if char == "{" else _Role.ODD_ARGUMENTS)
        else:
            self._refused |= not (self.is_call or self._any_keys or key in _KNOWN_KEYS)
            self._begin(_Role.OTHER)

    def _begin(self, role: _Role) -> None:
        self._role = role
        self._expect = _Expect.REST
        self._value = JsonValue()
        self._parts.clear()

    def _read_rest(self, text: str, position: int, out: list[OutputEvent]) -> int:
        end = self._value.feed(text, position)
        if self._role is _Role.ARGUMENTS and end > position:
            self._add_arguments(text[position:end], out)
        elif self._role is not _Role.OTHER:
            self._parts.append(text[position:end])
        if self._value.broken:
            self._break(out)
        elif self._value.done:
            self._end_value(out)
        return end

    def _add_arguments(self, text: str, out: list[OutputEvent]) -> None:
        if self.is_call:
            out.append(CallArguments(self._index, text))
        else:
            assert self._arguments is not None
            self._arguments.append(text)
            self._try_begin(out)

    def _end_value(self, out: list[OutputEvent]) -> None:
        self._expect = _Expect.COLON if self._role is _Role.KEY else _Expect.NEXT
        if self._role is _Role.NAME:
            self._name = self._text()
            self._refused |= self._name not in self._calls.names
        elif self._role is _Role.ODD_ARGUMENTS:
            arguments = _odd_arguments("".join(self._parts))
            self._refused |= arguments is None
            self._arguments = [arguments or ""]
        self._try_begin(out)

    def _try_begin(self, out: list[OutputEvent]) -> None:
        """Tells of the call and of its arguments so far, if both are known to be right."""
        if self.is_call or self._refused or self._name is None or not self._arguments:
            return
        self._index = self._calls.begin(self._name, out)
        self._held.clear()
        out.append(CallArguments(self._index, "".join(self._arguments)))
        self._arguments.clear()

    def _end(self, out: list[OutputEvent]) -> None:
        """The object is complete."""
        if self._arguments is None:
            self._arguments = [NO_ARGUMENTS]
            self._try_begin(out)
        self._break(out)

    def _break(self, out: list[OutputEvent]) -> None:
        """The object is over, whatever it is by now."""
        self.done = True
        if self.is_call:
            out.append(CallEnded(self._index))
        else:
            self._refused = True

    def _text(self) -> str | None:
        """The string that was read last; None where it is none."""
        return _string("".join(self._parts))


def _string(literal: str) -> str | None:
    if not literal.startswith('"'):
        return None
    try:
        text = json.loads(literal, strict=False)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _odd_arguments(literal: str) -> str | None:
    """The object that arguments other than an object mean: some models write it as a string."""
    if literal == "null":
        return NO_ARGUMENTS
    text = _string(literal)
    if text is None:
        return None
    text = text.strip(WHITESPACE) or NO_ARGUMENTS
    return text if is_json_object(text) else None
