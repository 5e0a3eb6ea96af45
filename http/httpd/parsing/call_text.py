"""Content and tool calls out of a model's text, in any format that writes calls as JSON.

    calls   = [ opening ] list [ closing ]
    list    = "[" object { "," object } "]"  |  object { [ "," | ";" ] object }
    object  = {"name": …, "arguments": …}, in any order, see call_object.py
            | name [ "[CALL_ID]" id ] [ "[ARGS]" ] arguments        after Mistral's opening

More calls than one follow in whatever of these ways: models mix them. What fits none of this is
content, its markers included. Whitespace before calls, between them and after the last is markup.
"""

import enum
import re
from dataclasses import dataclass

from engine.until_marker import WHITESPACE, UntilMarker
from httpd.parsing.call_object import CallObject
from httpd.parsing.calls import CallReader, Calls, NamedCall
from httpd.parsing.output import Content, OutputEvent

# The longest text between Mistral's marker and the arguments; OpenAI's longest name has 64.
MAX_HEADER_CHARS = 256
_HEADER = re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\]\w*+)?(?:\[ARGS\])?\s*+")
_HEADER_SO_FAR = re.compile(r"[^\s\[\]{}]*+(?:\[[A-Z_]*+\]?+\w*+)*+\s*+")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models marks its calls."""

    opening: str = ""  # before calls; "" for none
    closing: str = ""  # after calls; "" for none
    bare: bool = False  # text that begins with a call needs no opening
    named: bool = False  # a name may come instead of JSON


HERMES = CallFormat("<tool_call>", "</tool_call>")
LLAMA3 = CallFormat("<|python_tag|>", bare=True)
MISTRAL = CallFormat("[TOOL_CALLS]", named=True)
JSON = CallFormat(bare=True)


class _State(enum.Enum):
    TEXT = enum.auto()
    BEFORE = enum.auto()  # a call should come
    CALL = enum.auto()
    AFTER = enum.auto()  # a call has come


class CallText:
    """The parser of all such formats. Owned by its HTTP loop."""

    def __init__(self, format: CallFormat, calls: Calls) -> None:
        self._format = format
        self._calls = calls
        self._state = _State.BEFORE if format.bare else _State.TEXT
        self._text = UntilMarker(format.opening)
        self._call: CallReader | None = None
        self._markup: list[str] = []  # since the last call or content, where it is not in _text
        self._begun = ""  # a closing marker or a name that is not complete
        self._list_open = False
        self._opened = False  # _markup has the opening
        self._after_call = False  # nothing but whitespace and separators since a call

    @property
    def calls(self) -> int:
        return self._calls.count

    def feed(self, text: str) -> list[OutputEvent]:
        out: list[OutputEvent] = []
        text, self._begun = self._begun + text, ""
        position = 0
        while position < len(text):
            match self._state:
                case _State.TEXT:
                    position = self._read_text(text, position, out)
                case _State.BEFORE:
                    position = self._read_before(text, position, out)
                case _State.CALL:
                    position = self._read_call(text, position, out)
                case _State.AFTER:
                    position = self._read_after(text, position, out)
        return out

    def finish(self) -> list[OutputEvent]:
        out: list[OutputEvent] = []
        if self._call is not None:
            self._call.finish(out)
            return out
        held = "".join(self._markup) + self._text.flush() + self._begun
        if held and (self._begun or not self._after_call or held.strip(WHITESPACE + ",;")):
            out.append(Content(held))
        return out

    def _read_text(self, text: str, position: int, out: list[OutputEvent]) -> int:
        released, position = self._text.take(text, position)
        if released:
            out.append(Content(released))
            self._after_call = False
        if self._text.found:
            self._markup = [self._text.flush(), self._format.opening]
            self._opened = True
            self._list_open = self._after_call = False
            self._state = _State.BEFORE
        return position

    def _read_before(self, text: str, position: int, out: list[OutputEvent]) -> int:
        char = text[position]
        if char == "{":
            markup = "".join(self._markup)
            self._begin(
                CallObject(self._calls, markup, any_keys=self._opened or not self._format.bare)
            )
            return position
        first = not (self._list_open or self._after_call)
        if char in WHITESPACE or (char == "[" and first):
            self._list_open |= char == "["
            self._markup.append(char)
            return position + 1
        if self._opened and self._format.named and first:
            return self._read_header(text, position, out)
        self._refuse(out)
        return position

    def _read_header(self, text: str, position: int, out: list[OutputEvent]) -> int:
        """The name before arguments: all of it or none, so that what is no name is read as text."""
        brace = text.find("{", position, position + MAX_HEADER_CHARS)
        if brace < 0:
            short = len(text) - position < MAX_HEADER_CHARS
            if short and _HEADER_SO_FAR.fullmatch(text, position):
                self._begun = text[position:]
                return len(text)
        else:
            header = _HEADER.fullmatch(text, position, brace)
            if header is not None and header[1] in self._calls.names:
                self._begin(NamedCall(self._calls, header[1], out))
                return brace
        self._refuse(out)
        return position

    def _begin(self, call: CallReader) -> None:
        self._call = call
        self._markup.clear()
        self._opened = False
        self._state = _State.CALL

    def _read_call(self, text: str, position: int, out: list[OutputEvent]) -> int:
        assert self._call is not None
        position = self._call.feed(text, position, out)
        if self._call.done:
            self._after_call = self._call.is_call
            self._state = _State.AFTER if self._call.is_call else _State.TEXT
            self._call = None
        return position

    def _read_after(self, text: str, position: int, out: list[OutputEvent]) -> int:
        char, closing = text[position], self._format.closing
        if char in WHITESPACE:
            self._markup.append(char)
        elif char == "]" and self._list_open:
            self._markup.clear()
            self._list_open = False
        elif char in ",;":
            self._markup.append(char)
            self._state = _State.BEFORE
        elif char == "{":
            self._state = _State.BEFORE
            return position
        elif closing and text.startswith(closing, position):
            self._markup.clear()
            self._state = _State.TEXT
            return position + len(closing)
        elif closing and closing.startswith(text[position : position + len(closing)]):
            self._begun = text[position:]
            return len(text)
        else:
            self._refuse(out)
            return position
        return position + 1

    def _refuse(self, out: list[OutputEvent]) -> None:
        """No call comes: what was read for one is content, and so is what follows."""
        markup = "".join(self._markup)
        self._markup.clear()
        self._opened = False
        self._state = _State.TEXT
        if not markup.strip(WHITESPACE):
            self._text.hold(markup)  # an opening may follow, and takes it
        else:
            out.append(Content(markup))
            self._after_call = False
