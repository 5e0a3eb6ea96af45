"""What the endpoints' answers have in common: their Protocol, identity, usage, ends.

Knows no endpoint's words beyond OpenAI's `usage` and finish reasons.
"""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

from engine.request import Delta, Finish
from httpd.call import Telling
from httpd.errors import internal_error
from httpd.merged import merged
from httpd.service import Generation, ModelCard, Rejected
from httpd.text import json_text

Deltas = AsyncIterator[tuple[int, Delta]]  # each with its generation's index

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
        if delta.finish is Finish.TIMEOUT:
            message = delta.error or "The request took too long."
            raise Rejected(503, message, type="server_error", code="timeout")
        if delta.finish is Finish.UNSATISFIABLE:
            raise Rejected(400, delta.error or "Nothing fits.", code="unsatisfiable")
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


@dataclass(frozen=True, slots=True)
class Begun:
    """A response whose generations were accepted: all that its answer is made from."""

    identity: Identity
    generations: Sequence[Generation]
    per_prompt: int  # generations of each prompt, which is computed once for all of them
    telling: Telling


class Answer(Protocol):
    """One response while it grows. Owned by its HTTP loop.

    Either `whole` is used, or for a stream `events` to its end, then `ending`, or `failed` where
    one of them raised.
    """

    async def whole(self) -> dict[str, Any]:
        """The one object of an answer that is not streamed. Raises `Rejected`."""
        ...

    def events(self) -> AsyncIterator[str]:
        """The events of a stream but for the last; what comes at a time is one string.

        Raises `Rejected` for a failed generation.
        """
        ...

    def ending(self) -> str:
        """The last events: they go in one write."""
        ...

    def failed(self, failure: Rejected) -> str:
        """The last events of a stream that fails."""
        ...


class Usage:
    """Tokens of one response so far. Owned by its HTTP loop."""

    def __init__(self, begun: Begun) -> None:
        self._per_prompt = begun.per_prompt
        self._prompt_tokens = sum(
            each.prompt_tokens for each in begun.generations[:: begun.per_prompt]
        )
        self._last: list[Delta | None] = [None] * len(begun.generations)

    def take(self, index: int, delta: Delta) -> None:
        """The delta's counts, which are those of generation `index` so far."""
        self._last[index] = delta

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Of the prompts: those whose KV was there already."""
        return sum(delta.cached_tokens for delta in self._last[:: self._per_prompt] if delta)

    @property
    def host_tokens(self) -> int:
        """Of the cached ones: those whose KV came from host memory."""
        return sum(delta.host_tokens for delta in self._last[:: self._per_prompt] if delta)

    @property
    def completion_tokens(self) -> int:
        return sum(delta.completion_tokens for delta in self._last if delta)

    @property
    def reasoning_tokens(self) -> int:
        return sum(delta.reasoning_tokens for delta in self._last if delta)

    def object(self) -> dict[str, Any]:
        """OpenAI's `usage` of completions.

        Beyond it, where there are any: `host_cached_tokens`, of the cached ones.
        """
        from_host = {"host_cached_tokens": self.host_tokens} if self.host_tokens else {}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "audio_tokens": 0,
                **from_host,
            },
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "audio_tokens": 0,
            },
        }


class Output(Protocol):
    """Whatever takes one generation's deltas. Owned by its HTTP loop."""

    @property
    def is_over(self) -> bool:
        """Its end was taken; what the generation still brings is not wanted."""
        ...


async def deltas_of(begun: Begun, outputs: Sequence[Output], usage: Usage) -> Deltas:
    """What the generations bring, until each has ended or its output is over; `usage` counts it."""
    async for index, delta in merged(begun.generations):
        if outputs[index].is_over:
            continue  # what came before the abort was heard of
        usage.take(index, delta)
        yield index, delta
        if outputs[index].is_over:
            begun.generations[index].abort()  # of a call too many; else it has ended
    if not all(output.is_over for output in outputs):
        raise RuntimeError("a generation stopped without a finish")
