"""The time that one request may take, from its headers to the last byte of its answer.

Rules
- Whoever made the answer is cancelled, and so gives back what it holds; then the client is told, in
  the form of its answer: an error body, or the last events of a stream, in its API's own words.
- A client that does not take what is sent is cut elsewhere, by the server below.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from httpd.errors import error_event, error_response
from httpd.service import Rejected

_STREAM: Final = "plait.stream"  # where a scope has the response's `LateStream`


class LateStream:
    """How a response's stream ends that takes too long. Owned by its HTTP loop."""

    def __init__(self, path: str) -> None:
        self.ending: Callable[[Rejected], str] = lambda late: error_event(late, path)


def on_late_stream(scope: Scope, ending: Callable[[Rejected], str]) -> None:
    """Says how the stream that now begins ends, should it take too long.

    ending  its last events, for the reason why it ends
    """
    late = scope.get(_STREAM)
    if isinstance(late, LateStream):
        late.ending = ending


class RequestTimeout:
    """ASGI middleware that ends requests that take too long. Owned by its HTTP loop."""

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self.app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        sent = _Sent(send)
        scope[_STREAM] = late = LateStream(scope["path"])
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                await self.app(scope, receive, sent.send)
        except TimeoutError:
            if not timeout.expired():
                raise
            await self._tell(sent, late, scope, receive, send)

    async def _tell(
        self, sent: "_Sent", stream: LateStream, scope: Scope, receive: Receive, send: Send
    ) -> None:
        message = (
            f"The request took longer than {self._timeout_s:g} s, which is the server's limit."
        )
        late = Rejected(504, message, code="request_timeout")
        if not sent.begun:
            await error_response(late, scope["path"])(scope, receive, send)
        elif sent.is_stream and not sent.ended:
            await send({"type": "http.response.body", "body": stream.ending(late).encode()})


class _Sent:
    """What one response has come to. Owned by its HTTP loop."""

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
