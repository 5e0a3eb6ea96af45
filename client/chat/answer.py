"""One answer while it is streamed. Leaving it closes the connection, and so stops the server."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from client.certificates import tls_for
from client.events import EventReader, StreamError, reasoning_of
from client.target import Target, headers_of

_PATH = "/v1/chat/completions"
_CONNECT_S = 10.0


class NoAnswer(Exception):
    """The server refused or failed; one line says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What arrived at once."""

    reasoning: str
    content: str


class Answer:
    """One answer, as far as it has come. Owned by the thread that reads it."""

    def __init__(self, target: Target, body: dict[str, Any]) -> None:
        self._target, self._body = target, body
        self.reasoning = self.content = ""
        self.finish: str | None = None
        self.usage: dict[str, Any] = {}
        self._sent_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._sent_s

    def __iter__(self) -> Iterator[Piece]:
        """Pieces until the end. Raises NoAnswer. Whoever stops must close the iterator."""
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        try:
            with (
                httpx.Client(timeout=timeout, verify=tls_for(self._target.url)) as client,
                client.stream(
                    "POST", f"{self._target.url}{_PATH}", json=self._body,
                    headers=headers_of(self._target.key),
                ) as response,
            ):  # fmt: skip
                if response.status_code != 200:
                    response.read()
                    raise NoAnswer(_refusal(response))
                yield from self._pieces(response)
        except (httpx.HTTPError, StreamError) as error:
            raise NoAnswer(str(error) or type(error).__name__) from error

    def _pieces(self, response: httpx.Response) -> Iterator[Piece]:
        events = EventReader()
        for part in response.iter_raw():
            for chunk in events.feed(part):
                piece = self._take(chunk)
                if piece.reasoning or piece.content:
                    yield piece

    def _take(self, chunk: dict[str, Any]) -> Piece:
        self.usage = chunk.get("usage") or self.usage
        reasoning = content = ""
        for choice in chunk.get("choices") or ():
            self.finish = choice.get("finish_reason") or self.finish
            delta = choice.get("delta") or {}
            reasoning += reasoning_of(delta)
            content += delta.get("content") or ""
        if reasoning or content:
            self._last_s = time.perf_counter()
            self._first_s = self._first_s or self._last_s
        self.reasoning += reasoning
        self.content += content
        return Piece(reasoning, content)

    def summary(self) -> str:
        """What it took, in a line; a server that was stopped tells no tokens."""
        parts = []
        made = self.usage.get("completion_tokens")
        if made is not None:
            parts.append(f"{made:,} tokens")
            if made > 1 and self._first_s is not None and self._last_s > self._first_s:
                parts.append(f"{(made - 1) / (self._last_s - self._first_s):.1f} tokens/s")
        if self._first_s is not None:
            parts.append(f"first after {self._first_s - self._sent_s:.2f} s")
        if self.usage:
            details = self.usage.get("prompt_tokens_details") or {}
            parts.append(f"prompt {self.usage.get('prompt_tokens', 0):,}, "
                         f"{details.get('cached_tokens') or 0:,} cached")  # fmt: skip
        if self.finish == "length":
            parts.append("cut at its length limit")
        return " · ".join(parts)


def _refusal(response: httpx.Response) -> str:
    """What an error body says, in any of the shapes that servers use."""
    try:
        told = response.json()
        error = told.get("error", told)
        said = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        said = response.text[:300]
    return f"{response.status_code}: {said}"
