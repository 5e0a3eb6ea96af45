"""What both endpoints' answers have in common: identity, usage, the end, and a Protocol of shapes.

A shape writes bytes for one response. The constant part of a stream's chunks is serialised once per
response; a chunk then costs one JSON string.
"""

import secrets
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

from engine.request import Delta, Finish
from httpd.errors import internal_error
from httpd.service import ModelCard, Rejected
from httpd.text import json_string

_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Identity:
    """What every chunk of one response repeats."""

    id: str
    created: int  # unix seconds
    model: str
    system_fingerprint: str

    @classmethod
    def fresh(cls, prefix: str, card: ModelCard, version: str) -> "Identity":
        """A new response's identity; the fingerprint is that of server version and model."""
        fingerprint = sha256(f"{version} {card.id}".encode()).hexdigest()[:12]
        return cls(prefix + secrets.token_hex(16), int(time.time()), card.id, f"fp_{fingerprint}")

    def head(self, kind: str) -> str:
        """The start of the response's JSON object, up to its choices."""
        return (
            f'{{"id":"{self.id}","object":"{kind}","created":{self.created},'
            f'"model":{json_string(self.model)},'
            f'"system_fingerprint":{json_string(self.system_fingerprint)}'
        )


@dataclass(frozen=True, slots=True)
class End:
    """How a generation ended."""

    reason: str  # finish_reason on the wire
    stop_match: str | int | None

    @classmethod
    def of(cls, delta: Delta) -> "End | None":
        """The end that a delta tells of, None while there is more.

        Raises `Rejected` for a failed generation.
        """
        if delta.finish is Finish.NONE:
            return None
        if delta.finish is Finish.ABORT:
            message = "The server ended this request before it was complete."
            raise Rejected(503, message, type="server_error", code="aborted")
        if delta.finish is Finish.ERROR:
            if delta.error is None:
                raise internal_error()
            raise Rejected(500, delta.error, type="server_error", code="generation_failed")
        return cls(_REASONS[delta.finish], delta.stop_match)

    def fields(self) -> dict[str, Any]:
        """The choice's keys: the reason, and what was matched where something was."""
        if self.stop_match is None:
            return {"finish_reason": self.reason}
        return {"finish_reason": self.reason, "stop_reason": self.stop_match}


class Shape(Protocol):
    """The JSON of one endpoint's answer. `usage` is a JSON fragment such as `,"usage":null`."""

    def opening(self, usage: str) -> str:
        """The events before any text; "" for none."""
        ...

    def text(self, text: str, usage: str) -> str:
        """The event for some text."""
        ...

    def closing(self, end: End, usage: str) -> str:
        """The event that ends the choice."""
        ...

    def last_usage(self, usage: str) -> str:
        """The event without choices that ends a stream with include_usage."""
        ...

    def whole(self, text: str, end: End, usage: dict[str, Any]) -> dict[str, Any]:
        """The one object of an answer that is not streamed."""
        ...


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
