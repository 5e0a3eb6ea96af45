"""Reasoning, and the answer behind it.

    text    = [ "<think>" ] reasoning "</think>" answer     where the prompt ends inside reasoning
            | [ "<think>" reasoning "</think>" ] answer     where it does not

Only the first reasoning counts: markers in the answer are the answer's. Reasoning is told without
the whitespace at its two ends, the answer without the line breaks before it. An answer that never
comes (cut off while the model thinks) leaves no content.
"""

import enum

from httpd.parsing.output import WHITESPACE, OutputEvent, OutputParser, Reasoning
from httpd.parsing.until_marker import UntilMarker

OPENING = "<think>"
CLOSING = "</think>"
_LINE_BREAKS = "\r\n"


class _State(enum.Enum):
    START = enum.auto()  # an opening may come
    LEAD = enum.auto()  # whitespace before reasoning
    INSIDE = enum.auto()
    BREAKS = enum.auto()  # line breaks before the answer
    ANSWER = enum.auto()


class ReasoningText:
    """Splits off reasoning and leaves the answer to another parser. Owned by the HTTP loop."""

    def __init__(self, answer: OutputParser, *, opened: bool) -> None:
        """opened  the prompt ends inside reasoning"""
        self._answer = answer
        self._opened = opened
        self._state = _State.START
        self._space: list[str] = []  # before an opening that may come
        self._begun = ""  # of an opening
        self._reasoning = UntilMarker(CLOSING)

    @property
    def in_reasoning(self) -> bool:
        if self._state is _State.START:
            return self._opened
        return self._state in (_State.LEAD, _State.INSIDE)

    @property
    def calls(self) -> int:
        return self._answer.calls

    def feed(self, text: str) -> list[OutputEvent]:
        if self._state is _State.ANSWER:
            return self._answer.feed(text)
        out: list[OutputEvent] = []
        position = 0
        if self._state is _State.START:
            text = self._start(text)
        if self._state is _State.LEAD:
            position = _skip(text, position, WHITESPACE)
            if position < len(text):
                self._state = _State.INSIDE
        if self._state is _State.INSIDE:
            reasoning, position = self._reasoning.take(text, position)
            if reasoning:
                out.append(Reasoning(reasoning))
            if self._reasoning.found:
                self._reasoning.flush()
                self._state = _State.BREAKS
        if self._state is _State.BREAKS:
            position = _skip(text, position, _LINE_BREAKS)
            if position < len(text):
                self._state = _State.ANSWER
        if self._state is _State.ANSWER:
            out += self._answer.feed(text[position:])
        return out

    def finish(self) -> list[OutputEvent]:
        held = self._reasoning.flush().rstrip(WHITESPACE)
        if self._state is _State.START:
            if not self._opened:
                held = "".join(self._space) + self._begun
                return self._answer.feed(held) + self._answer.finish()
            held = self._begun
        out: list[OutputEvent] = [Reasoning(held)] if held else []
        return out + self._answer.finish()

    def _start(self, text: str) -> str:
        """Looks for an opening; returns what of the text so far is not decided here."""
        text = self._begun + text
        bare = text.lstrip(WHITESPACE) if not self._begun else text
        if len(bare) < len(text):
            self._space.append(text[: len(text) - len(bare)])
        if bare != OPENING and OPENING.startswith(bare):
            self._begun = bare
            return ""
        if bare.startswith(OPENING):
            self._state = _State.LEAD
            return bare[len(OPENING) :]
        if self._opened:
            self._state = _State.LEAD
            return bare
        self._state = _State.ANSWER
        return "".join(self._space) + bare


def _skip(text: str, position: int, chars: str) -> int:
    """Index of the first character from `position` on that is none of `chars`."""
    while position < len(text) and text[position] in chars:
        position += 1
    return position
