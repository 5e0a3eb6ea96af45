"""Request bodies: limited in size and time, and read to the end even where nobody wants them.

Assumes the server closes an HTTP/1.1 connection when a response ends before its request did. A
client still writing then sees a reset instead of the answer, so the rest is read and dropped first.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from httpd.service import Rejected

DRAIN_TIMEOUT_S = 5.0


class BodyLimit:
    """ASGI middleware that bounds each request body. Owned by the HTTP loop."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = _Incoming(scope, receive, self.max_bytes)

        async def send_after_body(message: Message) -> None:
            if message["type"] == "http.response.start" and body.pending:
                await body.drain()
            await send(message)

        await self.app(scope, body.receive, send_after_body)


class _Incoming:
    """One request's body as it comes in. Owned by the HTTP loop."""

    def __init__(self, scope: Scope, receive: Receive, max_bytes: int) -> None:
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"")
        self.declared_bytes = int(declared) if declared.isdigit() and len(declared) < 20 else 0
        # HTTP/2 resets one stream, not the connection, and needs no draining.
        self.pending = scope.get("http_version", "1.1").startswith("1") and (
            self.declared_bytes > 0 or b"transfer-encoding" in headers
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
        """Reads and drops what is left, within a time and a size; then the client can listen."""
        stop_bytes = self.received_bytes + self.max_bytes
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while self.pending and self.received_bytes < stop_bytes:
                    await self._next()
        except TimeoutError:
            pass  # the answer matters more than the rest of the question

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
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise Rejected(
            408, f"The request body did not arrive within {timeout_s:g} s.", code="body_timeout"
        ) from None
