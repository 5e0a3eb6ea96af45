"""Stop strings, found while text arrives in pieces of any size.

Guarantees
- Nothing of a stop string's text is released, unless it is to be included; all that cannot belong
  to one is released at once: what is held is the longest end of the text that begins a stop string.
- The result does not depend on how the text is cut into pieces. The stop string that is complete
  first wins; of several that are complete at the same character, the longest.
- Time is linear in the text for each stop string, whatever both consist of (Knuth, Morris and
  Pratt).

Knows nothing of tokens: stop ids are the scheduler's.
"""

from collections.abc import Iterable


class StopStrings:
    """One request's stop strings and held-back text. Owned by the detokenizer thread."""

    __slots__ = ("_first_chars", "_held", "_include", "_patterns", "match")

    def __init__(self, stop: Iterable[str], *, include: bool = False) -> None:
        """stop     each at least one character
        include  the stop string that is found is part of the text
        """
        self._include = include
        # Longest first: so the first to be complete at a character is the longest.
        self._patterns = [_Pattern(text) for text in sorted(stop, key=len, reverse=True)]
        self._first_chars = frozenset(pattern.text[0] for pattern in self._patterns)
        self._held = ""
        self.match: str | None = None  # the stop string that was found

    def feed(self, text: str) -> str:
        """What may be sent after `text` has come; sets `match` where a stop string is complete.

        After a match everything from the stop string on is dropped; do not feed any more.
        """
        if not self._held and self._first_chars.isdisjoint(text):
            return text  # nearly always
        ends = [(end, pattern) for pattern in self._patterns if (end := pattern.find_end(text))]
        all_text = self._held + text
        if ends:
            end, pattern = min(ends, key=lambda found: found[0])  # on a tie the first, the longest
            self.match = pattern.text
            self._held = ""
            after = len(all_text) - len(text) + end
            return all_text[: after if self._include else after - len(pattern.text)]
        begun = max(pattern.matched for pattern in self._patterns)
        released = len(all_text) - begun
        self._held = all_text[released:]
        return all_text[:released]

    def flush(self) -> str:
        """What is still held, which ends in no stop string: the text is over."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One stop string, and how much of it the text so far ends with."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # the text so far ends with text[:matched]
        # _borders[i]: length of the longest proper prefix of text[: i + 1] that also ends it.
        self._borders = [0]
        for char in text[1:]:
            self._borders.append(self._next(self._borders[-1], char))

    def find_end(self, piece: str) -> int:
        """Index in `piece` just after the first occurrence that is complete in it, or 0."""
        matched, length = self.matched, len(self.text)
        for index, char in enumerate(piece):
            matched = self._next(matched, char)
            if matched == length:
                return index + 1
        self.matched = matched
        return 0

    def _next(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._borders[matched - 1]
        return matched + 1 if self.text[matched] == char else 0
