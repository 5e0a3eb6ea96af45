"""What a model's answer comes to, whoever tells it: reasoning, content, calls, an end."""

from dataclasses import dataclass

from engine.request import Delta
from httpd.answer import End
from httpd.call import Telling
from httpd.parsing.output import CallEnded, OutputEvent, OutputParser


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


ChatEvent = Reasoning | OutputEvent


class ChatOutput:
    """One choice's deltas as events. Owned by its HTTP loop."""

    def __init__(self, telling: Telling) -> None:
        self.end: End | None = None
        self._parser: OutputParser = telling.new_parser()
        self._parallel_calls = telling.parallel_calls

    @property
    def is_over(self) -> bool:
        """Its end was taken; what the generation still brings is not wanted."""
        return self.end is not None

    @property
    def calls(self) -> int:
        """How many calls began so far."""
        return self._parser.calls

    def take(self, delta: Delta) -> list[ChatEvent]:
        """What a delta brings; sets `end` where this is it.

        Raises `Rejected` for a failed generation.
        """
        self.end = End.of(delta)
        events = self._parser.feed(delta.text)
        if self.end is not None:
            events += self._parser.finish()
        if not self._parallel_calls:
            events = self._up_to_first_call(events)
        return [Reasoning(delta.reasoning), *events] if delta.reasoning else [*events]

    def _up_to_first_call(self, events: list[OutputEvent]) -> list[OutputEvent]:
        for position, event in enumerate(events):
            if isinstance(event, CallEnded):
                self.end = self.end or End("stop")
                return events[: position + 1]
        return events
