"""The output items of one response while they grow: reasoning, a message, a call.

Each says what a stream tells of it, as pairs of an event's type and its JSON without the braces,
and what it is as a whole. Knows neither the response around it nor sequence numbers.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Final, Protocol

from pydantic_core import from_json

from engine.request import TokenScore
from httpd.logprobs import token_logprobs
from httpd.text import json_string, json_text, well_formed

Told = tuple[str, str]  # an event's type, and its fields as JSON without the braces

IN_PROGRESS: Final = "in_progress"
COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"  # the answer broke off within this item


class Item(Protocol):
    """One item of `output`. Owned by its HTTP loop."""

    def opening(self) -> list[Told]:
        """The events before its first text."""
        ...

    def add(self, text: str) -> Told:
        """Takes more text, and tells it."""
        ...

    def close(self, status: str) -> list[Told]:
        """Ends it, with its last events."""
        ...

    def whole(self) -> dict[str, Any]:
        """The item so far."""
        ...


class _Item:
    """What the items share. Owned by its HTTP loop."""

    def __init__(self, prefix: str, index: int) -> None:
        self.id = prefix + secrets.token_hex(16)
        self.status = IN_PROGRESS
        self._texts: list[str] = []
        self._at = f'"item_id":"{self.id}","output_index":{index}'
        self._index = index

    @property
    def _text(self) -> str:
        return well_formed("".join(self._texts))

    def _told_whole(self, what: str, item: dict[str, Any]) -> Told:
        told = f'"output_index":{self._index},"item":{json_text(item)}'
        return f"response.output_item.{what}", told


class _TextItem(_Item, ABC):
    """An item with one part of text. Owned by its HTTP loop."""

    def __init__(self, prefix: str, index: int, part_type: str) -> None:
        super().__init__(prefix, index)
        self._event = f"response.{part_type}"
        self._part_at = f'{self._at},"content_index":0'

    def opening(self) -> list[Told]:
        return [
            self._told_whole("added", self.whole()),
            ("response.content_part.added", f'{self._part_at},"part":{json_text(self._part())}'),
        ]

    def add(self, text: str) -> Told:
        self._texts.append(text)
        told = f'{self._part_at},"delta":{json_string(text)}{self._delta_fields()}'
        return f"{self._event}.delta", told

    def close(self, status: str) -> list[Told]:
        self.status = status
        told = f'{self._part_at},"text":{json_string(self._text)}{self._done_fields()}'
        return [
            (f"{self._event}.done", told),
            ("response.content_part.done", f'{self._part_at},"part":{json_text(self._part())}'),
            self._told_whole("done", self.whole()),
        ]

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The item so far."""

    @abstractmethod
    def _part(self) -> dict[str, Any]:
        """Its part so far."""

    def _delta_fields(self) -> str:
        """What a delta has besides, as JSON."""
        return ""

    def _done_fields(self) -> str:
        """What the end of the text has besides, as JSON."""
        return ""

    def _parts(self) -> list[dict[str, Any]]:
        """None before the first text: an item is told of before its part is."""
        return [self._part()] if self._texts or self.status != IN_PROGRESS else []


class MessageItem(_TextItem):
    """The answer's text, with its tokens' log-probabilities. Owned by its HTTP loop."""

    def __init__(self, index: int) -> None:
        super().__init__("msg_", index, "output_text")
        self._logprobs: list[dict[str, Any]] = []
        self._untold = 0  # from here on they go with the next delta

    def score(self, scores: Iterable[TokenScore]) -> None:
        """Takes scores of its next tokens."""
        self._logprobs += token_logprobs(scores)

    def _delta_fields(self) -> str:
        untold, self._untold = self._logprobs[self._untold :], len(self._logprobs)
        return f',"logprobs":{json_text(untold)}'

    def _done_fields(self) -> str:
        return f',"logprobs":{json_text(self._logprobs)}'

    def whole(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": self._parts(),
        }

    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": self._logprobs,
        }


class ReasoningItem(_TextItem):
    """What the model thought before it answered. Owned by its HTTP loop."""

    def __init__(self, index: int) -> None:
        super().__init__("rs_", index, "reasoning_text")

    def whole(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": self._parts(),
        }

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._text}


class CallItem(_Item):
    """A function call. Owned by its HTTP loop."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__("fc_", index)
        self._call_id = call_id
        self._name = name

    @property
    def is_json(self) -> bool:
        """Whether the arguments so far are whole."""
        try:
            from_json(self._text)
        except ValueError:
            return False
        return True

    def opening(self) -> list[Told]:
        return [self._told_whole("added", self.whole())]

    def add(self, text: str) -> Told:
        self._texts.append(text)
        told = f'{self._at},"delta":{json_string(text)}'
        return "response.function_call_arguments.delta", told

    def close(self, status: str) -> list[Told]:
        self.status = status
        name, arguments = json_string(self._name), json_string(self._text)
        told = f'{self._at},"name":{name},"arguments":{arguments}'
        return [
            ("response.function_call_arguments.done", told),
            self._told_whole("done", self.whole()),
        ]

    def whole(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._text,
        }
