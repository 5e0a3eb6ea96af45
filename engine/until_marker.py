"""Text up to a marker, in pieces of any size.

Knows no marker itself: reasoning ends with one, and tool calls begin with one.
"""

from typing import Final

# What JSON calls whitespace. Nothing else is ever dropped.
WHITESPACE: Final = " \t\r\n"


class UntilMarker:
    """Releases text until a marker comes. Owned by the thread that reads the text.

    Holds back what may turn out to be the marker's: the beginning of one, and whitespace before it.
    """

    __slots__ = ("_begun", "_marker", "_space", "found")

    def __init__(self, marker: str) -> None:
        """marker  what ends the text; "" for text that only `flush` ends"""
        self._marker = marker
        self._space: list[str] = []  # whitespace that the text so far ends with, and then
        self._begun = ""  # the beginning of a marker
        self.found = False

    def take(self, text: str, start: int) -> tuple[str, int]:
        """What `text` from `start` on releases, and the index where the marker or the text ends.

        Whitespace before a marker that was `found` is still held: `flush` gives it.
        """
        if self._begun:  # only where `text` is new: so a long text with many markers is cut once
            text = self._begun + text[start:]
            start, shift = 0, start - len(self._begun)
        else:
            shift = 0
        at = text.find(self._marker, start) if self._marker else -1
        self.found = at >= 0
        if self.found:
            released, end = self._release(text[start:at]), at + len(self._marker)
            self._begun = ""
        else:
            end, at = len(text), _begun_at(text, start, self._marker)
            released, self._begun = self._release(text[start:at]), text[at:]
        return released, end + shift

    def hold(self, space: str) -> None:
        """Puts whitespace before what comes next."""
        self._space.append(space)

    def flush(self) -> str:
        """What is held."""
        held = "".join(self._space) + self._begun
        self._space.clear()
        self._begun = ""
        return held

    def _release(self, text: str) -> str:
        """`text` and the whitespace before it, without the whitespace at its end."""
        bare = text.rstrip(WHITESPACE)
        if bare and self._space:
            released = "".join(self._space) + bare
            self._space.clear()
        else:
            released = bare
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])
        return released


def _begun_at(text: str, start: int, marker: str) -> int:
    """Index from `start` on where an end of `text` begins that begins `marker`, else its length."""
    if not marker:
        return len(text)
    at = text.find(marker[0], max(start, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return at if at >= 0 else len(text)
