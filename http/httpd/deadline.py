"""The time that one request may take, from its headers to the last byte of its answer.

Rules
- Whoever made the answer is cancelled, and so gives back what it holds; then the client is told, in
  the form of its answer: an error body, or the last event of a stream.
- A client that does not take what is sent is cut elsewhere, by the server below.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from httpd.errors import error_event, error_response
from httpd.service import Rejected


class RequestTimeout:
    """ASGI middleware that ends requests that take too long. Owned by the HTTP loop."""

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self.app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        sent = _Sent(send)
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                await self.app(scope, receive, sent.send)
        except TimeoutError:
            if not timeout.expired():
                raise
            await self._tell(sent, scope, receive, send)

    async def _tell(self, sent: "_Sent", scope: Scope, receive: Receive, send: Send) -> None:
        message = (
            f"The request took longer than {self._timeout_s:g} s, which is the server's limit."
        )
        late = Rejected(504, message, code="request_timeout")
        if not sent.begun:
            await error_response(late, scope["path"])(scope, receive, send)
        elif sent.is_stream and not sent.ended:
            event = error_event(late, scope["path"])
            await send({"type": "http.response.body", "body": event.encode()})


class _Sent:
    """What one response has come to. Owned by the HTTP loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = self.is_stream = self.ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            self.is_stream = kind.startswith("text/event-stream")
        elif not message.get("more_body", False):
            self.ended = True
        await self._send(message)
