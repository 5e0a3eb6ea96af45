"""What the endpoints' answers have in common: identity, usage, ends, and the Protocol of a choice.

A choice writes the JSON of one element of `choices`. The constant part of a stream's chunks is
serialised once per response; a chunk of plain text then costs one JSON string.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

from engine.request import Delta, Finish
from httpd.errors import internal_error
from httpd.service import Generation, ModelCard, Rejected
from httpd.text import json_text

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

    def fields(self, kind: str) -> dict[str, Any]:
        """The keys of the response's object before its choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }

    def head(self, kind: str) -> str:
        """The start of the response's JSON object, up to its choices."""
        return json_text(self.fields(kind))[:-1]


@dataclass(frozen=True, slots=True)
class End:
    """How a generation ended."""

    reason: str  # finish_reason on the wire
    stop_match: str | int | None = None

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


class Choice(Protocol):
    """One choice of an answer while it grows. Owned by the HTTP loop.

    Either `opening` and `chunks` are used, for a stream, or `take` and `whole`.
    """

    is_over: bool  # its end was taken; what the generation still brings is not wanted

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


class Usage:
    """Tokens of one response so far. Owned by the HTTP loop."""

    def __init__(self, generations: Sequence[Generation], per_prompt: int) -> None:
        """per_prompt  generations of each prompt, which is computed once for all of them"""
        self._prompt_tokens = sum(each.prompt_tokens for each in generations[::per_prompt])
        self._per_prompt = per_prompt
        self._last: list[Delta | None] = [None] * len(generations)

    def take(self, index: int, delta: Delta) -> None:
        """The delta's counts, which are those of generation `index` so far."""
        self._last[index] = delta

    def object(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        told = [delta for delta in self._last if delta is not None]
        cached = sum(delta.cached_tokens for delta in self._last[:: self._per_prompt] if delta)
        completion = sum(delta.completion_tokens for delta in told)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": sum(delta.reasoning_tokens for delta in told),
                "audio_tokens": 0,
            },
        }
