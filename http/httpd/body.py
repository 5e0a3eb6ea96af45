"""Request bodies: limited in size and time, and read to the end even where nobody wants them.

Rules
- A response does not end before its request. The server would close the connection or, on HTTP/2,
  reset the stream, and most clients that are still writing then see that instead of their answer.
- So the answer goes out at once, but its end waits while the rest of the request is read and
  dropped: up to a size and a time, beyond which losing the answer is the client's own affair.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from httpd.service import ModelCard, Rejected

DRAIN_BYTES = 64 << 20
DRAIN_TIMEOUT_S = 5.0

# Larger bodies are parsed on a thread of their own: a megabyte of token ids takes 20 ms, in which
# the loop could have sent hundreds of events.
INLINE_PARSE_BYTES = 64 << 10

Parsed = TypeVar("Parsed")


class BodyLimit:
    """ASGI middleware that bounds each request body. Owned by its HTTP loop."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = _Incoming(scope, receive, self.max_bytes)

        async def send_end_last(message: Message) -> None:
            ends = message["type"] == "http.response.body" and not message.get("more_body", False)
            if ends and body.pending:
                await send({**message, "more_body": True})
                await body.drain()
                message = {"type": "http.response.body"}
            await send(message)

        await self.app(scope, body.receive, send_end_last)


class _Incoming:
    """One request's body as it comes in. Owned by its HTTP loop."""

    def __init__(self, scope: Scope, receive: Receive, max_bytes: int) -> None:
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"")
        self.declared_bytes = int(declared) if declared.isdigit() and len(declared) < 20 else 0
        self.pending = (  # more may come; HTTP/2 need not declare it
            not scope["http_version"].startswith("1")
            or self.declared_bytes > 0
            or b"transfer-encoding" in headers
        )
        self._receive = receive
        self.max_bytes = max_bytes
        self.received_bytes = 0

    async def receive(self) -> Message:
        """The next message. Raises `Rejected` (413) as soon as the body is known to be too long."""
        self._check(self.declared_bytes)
        message = await self._next()
        self._check(self.received_bytes)
        return message

    async def drain(self) -> None:
        """Reads and drops what is left, within a size and a time."""
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while self.pending and self.received_bytes < DRAIN_BYTES:
                    await self._next()
        except TimeoutError:
            pass

    async def _next(self) -> Message:
        message = await self._receive()
        self.received_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            self.pending = False  # the end, or a disconnect
        return message

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self.max_bytes:
            raise Rejected(
                413,
                f"The request body has at least {size_bytes} bytes; the limit is {self.max_bytes}.",
                code="request_too_large",
            )


async def read_body(receive: Receive, timeout_s: float) -> bytes | None:
    """The whole request body, or None where the client went before its end.

    Raises `Rejected`: 413 from `BodyLimit`, 408 where it takes longer than `timeout_s`.
    """
    body = bytearray()  # a list of parts would take 20 times the memory of two-byte chunks
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Rejected(
            408, f"The request body did not arrive within {timeout_s:g} s.", code="body_timeout"
        ) from None


async def parsed(
    parse: Callable[[bytes, ModelCard], Parsed], body: bytes, card: ModelCard
) -> Parsed:
    """What `parse` makes of a body; a large one on another thread. Raises what `parse` raises."""
    if len(body) <= INLINE_PARSE_BYTES:
        return parse(body, card)
    return await asyncio.to_thread(parse, body, card)
