"""Pieces of memory that are copied together. Knows neither devices nor what the pieces hold."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowsCopy:
    """`rows` pieces of `width` bytes, on either side `pitch` bytes apart, from an address on."""

    to: int
    to_pitch: int
    source: int
    source_pitch: int
    width: int
    rows: int

    def addresses(self) -> Iterator[tuple[int, int]]:
        """Where each piece goes, and where it is."""
        for row in range(self.rows):
            yield self.to + row * self.to_pitch, self.source + row * self.source_pitch
