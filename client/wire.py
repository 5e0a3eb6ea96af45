"""What our connections of HTTP/1.1 and HTTP/2 share: how they begin, and how answers come to httpx.

Knows no protocol.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

P = TypeVar("P", bound=asyncio.BaseProtocol)


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer begins with."""

    status: int
    headers: list[tuple[bytes, bytes]]


class Answer(httpx.AsyncByteStream):
    """One request's answer as it comes in. Owned by the loop."""

    def __init__(self, leave: Callable[[], None]) -> None:
        """leave  is told that nobody reads on, whether the answer has ended or not"""
        self._leave = leave
        self._head: asyncio.Future[Head] = asyncio.Future()
        self.ended = False
        self._parts: list[bytes] = []  # that have come and are not read
        self._waiting: asyncio.Future[None] | None = None  # for more of them
        self._error: httpx.HTTPError | None = None

    def begin(self, head: Head) -> None:
        if not self._head.done():  # else whoever waited was cancelled a moment ago
            self._head.set_result(head)

    def put(self, part: bytes) -> None:
        self._parts.append(part)
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def fail(self, error: httpx.HTTPError) -> None:
        self._error = error
        if not self._head.done():
            self._head.set_exception(error)
            self._head.exception()  # nobody may be waiting for it
        self.end()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._parts or not self.ended:
            if self._parts:
                parts, self._parts = self._parts, []
                yield b"".join(parts)
            else:
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting
        if self._error is not None:
            raise self._error

    async def aclose(self) -> None:
        self._leave()

    async def response(self, version: str) -> httpx.Response:
        """Waits for the head. Raises httpx.HTTPError."""
        head = await self._head
        extensions: dict[str, Any] = {"http_version": version.encode()}
        return httpx.Response(head.status, headers=head.headers, stream=self, extensions=extensions)


async def connect(new: Callable[[], P], url: httpx.URL, tls: ssl.SSLContext | None) -> P:
    """A connection to the server of `url`. Raises httpx.ConnectError."""
    port = url.port or (80 if tls is None else 443)
    loop = asyncio.get_running_loop()
    try:
        _, connection = await loop.create_connection(new, url.host, port, ssl=tls)
    except OSError as error:
        raise httpx.ConnectError(str(error)) from error
    return connection
