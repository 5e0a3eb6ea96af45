"""The answer of /v1/responses: one object, or the events of its growth in their order.

    created, in_progress
    for each item: output_item.added, [content_part.added,] deltas, done, [content_part.done,]
    output_item.done
    completed, incomplete or failed, each with the whole response

Every event has a sequence number, from 0, without a gap.
"""

import time
from collections.abc import AsyncIterator
from typing import Any

from engine.request import Delta, TokenScore
from httpd.answer import Begun, Usage, deltas_of
from httpd.chat_output import ChatEvent, ChatOutput, Reasoning
from httpd.parsing.output import CallArguments, CallBegan, CallEnded, Content
from httpd.responses_items import (
    COMPLETED,
    INCOMPLETE,
    CallItem,
    Item,
    MessageItem,
    ReasoningItem,
    Told,
)
from httpd.service import Rejected
from httpd.text import json_text, well_formed


class ResponseAnswer:
    """One response while it grows. Owned by its HTTP loop."""

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
        self._output = ChatOutput(begun.telling)
        self._usage = Usage(begun)
        self._items: list[Item] = []
        self._open: Item | None = None  # the last one, while it grows
        self._scores: list[TokenScore] = []  # not yet any item's
        self._sequence_number = 0

    # httpd.answer.Answer

    async def whole(self) -> dict[str, Any]:
        async for _, delta in deltas_of(self._begun, [self._output], self._usage):
            self._advance(delta)
        self._end()
        return self._response(self._status())

    async def events(self) -> AsyncIterator[str]:
        begun = f'"response":{json_text(self._response("in_progress"))}'
        yield self._told([("response.created", begun), ("response.in_progress", begun)])
        async for _, delta in deltas_of(self._begun, [self._output], self._usage):
            told = self._advance(delta)
            if told:
                yield self._told(told)

    def ending(self) -> str:
        told, status = self._end(), self._status()
        response = f'"response":{json_text(self._response(status))}'
        return self._told([*told, (f"response.{status}", response)])

    def failed(self, failure: Rejected) -> str:
        error = {"code": "server_error", "message": well_formed(failure.message)}
        response = self._response("failed") | {"error": error}
        return self._told([("response.failed", f'"response":{json_text(response)}')])

    # The items

    def _advance(self, delta: Delta) -> list[Told]:
        """What a delta makes of the items, as a stream tells it.

        Scores go to the message whose text comes with them or next; those of a call to nobody.
        """
        self._scores += delta.scores
        return [each for event in self._output.take(delta) for each in self._take(event)]

    def _take(self, event: ChatEvent) -> list[Told]:
        """What one event makes of the items, as a stream tells it."""
        match event:
            case Reasoning(text):
                return self._grow(ReasoningItem, text)
            case Content(text):
                return self._grow(MessageItem, text)
            case CallBegan(_, call_id, name):
                self._scores.clear()
                return self._begin(CallItem(len(self._items), call_id, name))
            case CallArguments(_, text):
                assert self._open is not None
                return [self._open.add(text)]
            case CallEnded():
                return self._close(INCOMPLETE if self._is_cut() else COMPLETED)

    def _grow(self, kind: type[ReasoningItem] | type[MessageItem], text: str) -> list[Told]:
        told = []
        if not isinstance(self._open, kind):
            told = self._begin(kind(len(self._items)))
        assert self._open is not None
        self._give_scores()
        return [*told, self._open.add(text)]

    def _give_scores(self) -> None:
        if isinstance(self._open, MessageItem):
            self._open.score(self._scores)
            self._scores.clear()

    def _begin(self, item: Item) -> list[Told]:
        told = self._close(COMPLETED)
        self._open = item
        self._items.append(item)
        return [*told, *item.opening()]

    def _is_cut(self) -> bool:
        """Whether the answer broke off within the call that is open."""
        assert isinstance(self._open, CallItem)
        end = self._output.end
        return end is not None and end.reason == "length" and not self._open.is_json

    def _close(self, status: str) -> list[Told]:
        self._give_scores()
        told = [] if self._open is None else self._open.close(status)
        self._open = None
        return told

    def _end(self) -> list[Told]:
        """The last events of the items; an answer that ends by itself has a message or a call."""
        if self._status() == INCOMPLETE:
            return self._close(INCOMPLETE)
        told = []
        if all(isinstance(item, ReasoningItem) for item in self._items):
            told = self._begin(MessageItem(len(self._items)))
        return [*told, *self._close(COMPLETED)]

    # The response

    def _status(self) -> str:
        assert self._output.end is not None
        return INCOMPLETE if self._output.end.reason == "length" else COMPLETED

    def _response(self, status: str) -> dict[str, Any]:
        """The response's object as it is now."""
        identity = self._begun.identity
        is_over = status in (COMPLETED, INCOMPLETE)
        return {
            "id": identity.id,
            "object": "response",
            "created_at": identity.created,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "status": status,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == INCOMPLETE else None
            ),
            "model": identity.model,
            "output": [item.whole() for item in self._items],
            **self._begun.telling.echoed,
            "usage": self._usage_object() if is_over else None,
        }

    def _usage_object(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    # The stream

    def _told(self, events: list[Told]) -> str:
        return "".join(self._event(kind, fields) for kind, fields in events)

    def _event(self, kind: str, fields: str) -> str:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        data = f'{{"type":"{kind}","sequence_number":{number},{fields}}}'
        return f"event: {kind}\ndata: {data}\n\n"
