"""One server-sent event stream: framing, keep-alive comments, and clients that stop reading."""

import asyncio
import logging
from types import TracebackType

from starlette.types import Send

log = logging.getLogger(__name__)

# No `connection` header: HTTP/2 forbids it. The last one keeps nginx from buffering.
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"
DONE = "data: [DONE]\n\n"


class EventStream:
    """The body of one streaming response. Owned by the HTTP loop.

    Guarantees: whole events only, also where a ping comes between two writes; the task that entered
    it is cancelled when the client stops reading.
    """

    def __init__(self, send: Send, ping_interval_s: float, stall_timeout_s: float) -> None:
        self._send = send
        self._ping_interval_s = ping_interval_s
        self._stall_timeout_s = stall_timeout_s
        self._writes = 0  # begun
        self._writing = False  # a write waits for the client to read

    async def __aenter__(self) -> "EventStream":
        writer = asyncio.current_task()
        assert writer is not None
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._watch = asyncio.create_task(self._watch_client(writer))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watch.cancel()

    async def write(self, events: str, *, more: bool = True) -> None:
        """Sends complete events; with `more` False the response ends."""
        self._writes += 1
        self._writing = True
        message = {"type": "http.response.body", "body": events.encode(), "more_body": more}
        await self._send(message)
        self._writing = False

    async def _watch_client(self, writer: "asyncio.Task[None]") -> None:
        """Pings in silence; cancels `writer` when nothing was read for the stall timeout."""
        stalled_s = 0.0
        while stalled_s < self._stall_timeout_s:
            writes = self._writes
            await asyncio.sleep(self._ping_interval_s)
            if self._writes != writes:
                stalled_s = 0.0
            elif self._writing:
                stalled_s += self._ping_interval_s
            elif not await self._try_ping():
                break
        log.warning("a client read nothing for %g s: its request is aborted", self._stall_timeout_s)
        writer.cancel()

    async def _try_ping(self) -> bool:
        """False where the client does not read even that."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._send({"type": "http.response.body", "body": PING, "more_body": True})
        except TimeoutError:
            return False
        return True
