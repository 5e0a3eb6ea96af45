"""One server-sent event stream: framing, and comments that keep a silent one alive."""

import asyncio
from types import TracebackType

from starlette.types import Send

# No `connection` header: HTTP/2 forbids it. The last one keeps nginx from buffering.
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"
DONE = "data: [DONE]\n\n"


class EventStream:
    """The body of one streaming response. Owned by its HTTP loop.

    Guarantees: whole events only, also where a ping comes between two writes. A client that stops
    reading is the server's to cut; the app then sees it leave.
    """

    def __init__(self, send: Send, ping_interval_s: float) -> None:
        self._send = send
        self._ping_interval_s = ping_interval_s
        self._writes = 0  # begun
        self._writing = False  # a write waits for the client to read

    async def __aenter__(self) -> "EventStream":
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._pinging = asyncio.create_task(self._ping())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pinging.cancel()

    async def write(self, events: str, *, more: bool = True) -> None:
        """Sends complete events; with `more` False the response ends."""
        self._writes += 1
        self._writing = True
        message = {"type": "http.response.body", "body": events.encode(), "more_body": more}
        await self._send(message)
        self._writing = False

    async def _ping(self) -> None:
        """Sends a comment after each interval in which nothing else was sent."""
        while True:
            writes = self._writes
            await asyncio.sleep(self._ping_interval_s)
            if self._writes == writes and not self._writing:
                await self._send({"type": "http.response.body", "body": PING, "more_body": True})
