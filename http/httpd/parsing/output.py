"""What parsers make of a model's answer: the events, and the Protocol of the parsers.

Reasoning is split off before, by the detokenizer. Knows no format, and not how an endpoint says
these things on the wire.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A tool call: said once, before any of its arguments."""

    index: int  # 0, 1, 2 … in one response
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text just as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """Nothing more comes for this call."""

    index: int


OutputEvent = Content | CallBegan | CallArguments | CallEnded


class OutputParser(Protocol):
    """Splits one response's text. Owned by its HTTP loop.

    Guarantees
    - Joined over `feed` and `finish`, the events do not depend on how the text is cut into pieces.
    - No input raises, and time is linear in the text.
    - Text is dropped only where it is a call's markup: markers, whitespace beside them, the JSON
      around its name and arguments. All else is in an event.
    - Each call that began ends before the next begins. Arguments are never empty.
    """

    @property
    def calls(self) -> int:
        """How many calls began so far."""
        ...

    def feed(self, text: str) -> list[OutputEvent]:
        """The events that `text` decides."""
        ...

    def finish(self) -> list[OutputEvent]:
        """The rest: the text is over. A call that began ends as it is; what else was held, such as
        half a marker, is content. Called once."""
        ...


class PlainText:
    """All text is content. Immutable."""

    calls = 0

    def feed(self, text: str) -> list[OutputEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        return []
