"""The answer of /v1/messages: one message, or the events of its growth.

message_start, ping
for each block: content_block_start, content_block_delta …, content_block_stop
message_delta with the end and the usage, message_stop
"""

from collections.abc import AsyncIterator
from typing import Any, Final

from pydantic_core import from_json

from httpd.answer import Begun, Usage, deltas_of
from httpd.chat_output import ChatEvent, ChatOutput, Reasoning
from httpd.errors import MESSAGES_PATH, error_event
from httpd.parsing.output import CallArguments, CallBegan, CallEnded, Content
from httpd.service import Rejected
from httpd.text import json_string, json_text, well_formed

# Of each block's type: its delta's type, and the key of the text in both.
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageAnswer:
    """One message while it grows. Owned by its HTTP loop."""

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
        self._output = ChatOutput(begun.telling)
        self._usage = Usage(begun)
        self._blocks: list[_Block] = []

    # httpd.answer.Answer

    async def whole(self) -> dict[str, Any]:
        async for _, delta in deltas_of(self._begun, [self._output], self._usage):
            for event in self._output.take(delta):
                self._take(event)
        return self._message([block.whole() for block in self._blocks]) | self._end()

    async def events(self) -> AsyncIterator[str]:
        start = {"type": "message_start", "message": self._message([])}
        yield _event(start) + _event({"type": "ping"})
        async for _, delta in deltas_of(self._begun, [self._output], self._usage):
            told = "".join(self._take(event) for event in self._output.take(delta))
            if told:
                yield told

    def ending(self) -> str:
        delta = {"type": "message_delta", "delta": self._end(), "usage": self._usage_object()}
        return self._close() + _event(delta) + _event({"type": "message_stop"})

    def failed(self, failure: Rejected) -> str:
        return error_event(failure, MESSAGES_PATH)

    # The blocks

    def _take(self, event: ChatEvent) -> str:
        """What one event makes of the blocks, as a stream tells it."""
        match event:
            case Reasoning(text):
                return self._grow("thinking", text)
            case Content(text):
                return self._grow("text", text)
            case CallBegan(_, call_id, name):
                return self._begin("tool_use", {"id": call_id, "name": name})
            case CallArguments(_, text):
                return self._blocks[-1].add(text)
            case CallEnded():
                return self._close()

    def _grow(self, kind: str, text: str) -> str:
        is_more = self._blocks and self._blocks[-1].is_open and self._blocks[-1].kind == kind
        return ("" if is_more else self._begin(kind, {})) + self._blocks[-1].add(text)

    def _begin(self, kind: str, fields: dict[str, Any]) -> str:
        told = self._close()
        self._blocks.append(_Block(len(self._blocks), kind, fields))
        return told + self._blocks[-1].opening()

    def _close(self) -> str:
        return self._blocks[-1].close() if self._blocks and self._blocks[-1].is_open else ""

    # The message

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        identity = self._begun.identity
        return {
            "id": identity.id,
            "type": "message",
            "role": "assistant",
            "model": identity.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage_object(),
        }

    def _end(self) -> dict[str, Any]:
        """Why it ended."""
        end = self._output.end
        assert end is not None
        if end.reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._output.calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(end.stop_match, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_match}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage_object(self) -> dict[str, Any]:
        """The counts so far; all of the prompt is in `input_tokens` until the first token came."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


class _Block:
    """One block of the content. Owned by its HTTP loop."""

    def __init__(self, index: int, kind: str, fields: dict[str, Any]) -> None:
        self.kind = kind
        self.is_open = True
        self._index = index
        self._fields = fields
        self._texts: list[str] = []
        delta, key = _DELTAS[kind]
        self._head = (
            'event: content_block_delta\ndata: {"type":"content_block_delta",'
            f'"index":{index},"delta":{{"type":"{delta}","{key}":'
        )

    def opening(self) -> str:
        start = {"type": "content_block_start", "index": self._index, "content_block": self.whole()}
        return _event(start)

    def add(self, text: str) -> str:
        """Takes more text, and tells it."""
        self._texts.append(text)
        return f"{self._head}{json_string(text)}}}}}\n\n"

    def close(self) -> str:
        self.is_open = False
        return _event({"type": "content_block_stop", "index": self._index})

    def whole(self) -> dict[str, Any]:
        """The block so far."""
        text = well_formed("".join(self._texts))
        if self.kind == "tool_use":
            return {"type": self.kind, **self._fields, "input": _object(text)}
        if self.kind == "thinking":
            return {"type": self.kind, "thinking": text, "signature": ""}
        return {"type": self.kind, "text": text}


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; none where what the model wrote is no object, or broke off."""
    try:
        value = from_json(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(fields: dict[str, Any]) -> str:
    return f"event: {fields['type']}\ndata: {json_text(fields)}\n\n"
