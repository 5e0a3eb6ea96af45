"""The answer of chat and text completions: an object, or chunks, with `choices`.

A choice writes the JSON of one element of `choices`. The constant part of a stream's chunks is
serialised once per response; a chunk of plain text then costs one JSON string.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine.request import Delta
from httpd.answer import Begun, Output, Usage, deltas_of
from httpd.call import Telling
from httpd.errors import error_event
from httpd.events import DONE
from httpd.service import Rejected
from httpd.text import json_text


class Choice(Output, Protocol):
    """One choice of an answer while it grows. Owned by its HTTP loop.

    Either `opening` and `chunks` are used, for a stream, or `take` and `whole`.
    """

    def opening(self) -> list[str]:
        """Elements of `choices` before anything is generated."""
        ...

    def chunks(self, delta: Delta) -> list[str]:
        """Elements of `choices` for what a delta brings, its end included.

        Raises `Rejected` for a failed generation.
        """
        ...

    def take(self, delta: Delta) -> None:
        """Adds what a delta brings. Raises `Rejected` for a failed generation."""
        ...

    def whole(self) -> dict[str, Any]:
        """The element of `choices`, once the generation has ended."""
        ...

    def beside(self) -> dict[str, Any]:
        """Keys of the answer's object, beside `choices`, that the first choice knows."""
        ...


@dataclass(frozen=True, slots=True)
class ChoiceKind:
    """What tells a chat's choices from a completion's."""

    object: str
    chunk_object: str
    choice: Callable[[int, Telling], Choice]

    def answer(self, begun: Begun) -> "ChoicesAnswer":
        """A new answer of this kind."""
        return ChoicesAnswer(self, begun)


class ChoicesAnswer:
    """The choices of one response while they grow. Owned by its HTTP loop."""

    def __init__(self, kind: ChoiceKind, begun: Begun) -> None:
        self._kind, self._begun, self._telling = kind, begun, begun.telling
        self._choices = [
            kind.choice(index, begun.telling) for index in range(len(begun.generations))
        ]
        self._usage = Usage(begun)
        self._head = f'data: {begun.identity.head(kind.chunk_object)},"choices":['
        self._last = ""  # of a stream: the events of the last delta

    async def whole(self) -> dict[str, Any]:
        async for index, delta in deltas_of(self._begun, self._choices, self._usage):
            self._choices[index].take(delta)
        return {
            **self._begun.identity.fields(self._kind.object),
            "choices": [choice.whole() for choice in self._choices],
            **self._choices[0].beside(),
            "usage": self._usage.object(),
        }

    async def events(self) -> AsyncIterator[str]:
        opening = [each for choice in self._choices for each in choice.opening()]
        if opening:
            yield self._chunks(opening)
        async for index, delta in deltas_of(self._begun, self._choices, self._usage):
            self._last = self._chunks(self._choices[index].chunks(delta))
            if self._last and any(not choice.is_over for choice in self._choices):
                some, self._last = self._last, ""
                yield some

    def ending(self) -> str:
        usage = ""
        if self._telling.include_usage:
            usage = f'{self._head}],"usage":{json_text(self._usage.object())}}}\n\n'
        return self._last + usage + DONE

    def failed(self, failure: Rejected) -> str:
        return error_event(failure)

    def _chunks(self, choices: list[str]) -> str:
        usage = self._chunk_usage()
        return "".join(f"{self._head}{choice}]{usage}}}\n\n" for choice in choices)

    def _chunk_usage(self) -> str:
        """The usage key of a chunk that has choices."""
        if self._telling.continuous_usage:
            return f',"usage":{json_text(self._usage.object())}'
        return ',"usage":null' if self._telling.include_usage else ""
