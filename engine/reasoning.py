"""Reasoning and the content behind it, while text arrives in pieces of any size.

    text    = [ opening ] reasoning closing content         where it begins inside reasoning
            | [ opening reasoning closing ] content         where it does not

Only the first reasoning counts: markers in the content are the content's. Reasoning is told without
the whitespace at its two ends, content without the line breaks before it. Content that never comes
(cut off while the model thinks) is empty.

Guarantees
- The result does not depend on how the text is cut into pieces, and time is linear in the text.
- What cannot belong to a marker or to whitespace that is dropped is released at once.
- Nothing of a marker is released, unless the text ends before the marker is complete.

Knows nothing of a model's templates, nor of tokens but how many a piece is made of.
"""

import enum
from typing import Final

from engine.request import ReasoningMarkers
from engine.until_marker import WHITESPACE, UntilMarker

_LINE_BREAKS: Final = "\r\n"


class _State(enum.Enum):
    START = enum.auto()  # an opening may come
    LEAD = enum.auto()  # whitespace before reasoning
    INSIDE = enum.auto()
    BREAKS = enum.auto()  # line breaks before content
    CONTENT = enum.auto()


class ReasoningSplitter:
    """Where one response's text stands. Owned by the detokenizer thread."""

    __slots__ = (
        *("_begun", "_begun_tokens", "_opened", "_opening", "_reasoning", "_space", "_state"),
        *("is_inside", "tokens"),
    )

    def __init__(self, markers: ReasoningMarkers, *, opened: bool) -> None:
        """opened  the text begins inside reasoning; an opening may still come"""
        self._opening = markers.opening
        self._opened = opened
        self._state = _State.START
        self._space: list[str] = []  # before an opening that may come
        self._begun = ""  # of an opening
        self._begun_tokens = 0  # those of `_begun`, which are nobody's yet
        self._reasoning = UntilMarker(markers.closing)
        self.is_inside = opened  # the text so far ends inside reasoning
        self.tokens = 0  # that have text between the two markers or in them

    def feed(self, text: str, tokens: int = 1) -> tuple[str, str]:
        """(reasoning, content) that may be sent after `text`, made of so many tokens, has come.

        Tokens without text count where they stand.
        """
        if self._state is _State.CONTENT:
            return "", text
        if self._state is _State.START:
            text = self._start(text)
        if self.is_inside:
            self.tokens += self._begun_tokens + tokens
            self._begun_tokens = 0
        elif self._begun:
            self._begun_tokens += tokens
        return self._go_on(text)

    @property
    def is_hiding(self) -> bool:
        """Whether what came last is no part of the content, and nothing before it is."""
        begun = self._state in (_State.LEAD, _State.INSIDE, _State.BREAKS)
        return begun or (self._opened and self._state is _State.START)

    def finish(self) -> tuple[str, str]:
        """(reasoning, content) that was held: the text is over. Called once."""
        if self._state is _State.START and not self._opened:
            return "", "".join(self._space) + self._begun
        return self._begun + self._reasoning.flush().rstrip(WHITESPACE), ""

    def _start(self, text: str) -> str:
        """Looks for an opening; returns what of the text so far is not decided here."""
        text, self._begun = self._begun + text, ""
        bare = text.lstrip(WHITESPACE)
        if len(bare) < len(text):
            self._space.append(text[: len(text) - len(bare)])
        if bare.startswith(self._opening):
            self._state, self.is_inside = _State.LEAD, True
            return bare[len(self._opening) :]
        if self._opening.startswith(bare):
            self._begun = bare
            return ""
        if self._opened:
            self._state = _State.LEAD
            return bare
        self._state = _State.CONTENT
        return "".join(self._space) + bare

    def _go_on(self, text: str) -> tuple[str, str]:
        """From the state that `text` begins in to the one that it ends in."""
        reasoning, position = "", 0
        if self._state is _State.LEAD:
            position = _skip(text, position, WHITESPACE)
            if position < len(text):
                self._state = _State.INSIDE
        if self._state is _State.INSIDE:
            reasoning, position = self._reasoning.take(text, position)
            if not self._reasoning.found:
                return reasoning, ""
            self._reasoning.flush()
            self._state, self.is_inside = _State.BREAKS, False
        if self._state is _State.BREAKS:
            position = _skip(text, position, _LINE_BREAKS)
            if position < len(text):
                self._state = _State.CONTENT
        return reasoning, text[position:] if self._state is _State.CONTENT else ""


def _skip(text: str, position: int, chars: str) -> int:
    """Index of the first character from `position` on that is none of `chars`."""
    while position < len(text) and text[position] in chars:
        position += 1
    return position
