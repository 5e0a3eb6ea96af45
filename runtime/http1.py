"""HTTP/1.1 as Hypercorn (0.18) speaks it, less its faults that a client can reach.

Knows neither sockets nor routes.
"""

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import h11
from hypercorn.asyncio.worker_context import EventWrapper
from hypercorn.protocol.h11 import H11Protocol

from httpd.service import Rejected
from runtime.peer import Peer
from runtime.refusal import headers_and_body

_LOOK_S: Final = 0.25  # between two looks whether a client has left; within the promise of 1 s
_PROBE_EVERY_S: Final = 5.0  # between two interim responses

# RFC 9112, 3.2.2: whoever gets a target in this form takes its authority for the Host header's.
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]+)(.*)", re.IGNORECASE | re.DOTALL)


class Http1(H11Protocol):
    """One connection's HTTP/1.1. Owned by its HTTP loop."""

    connection: h11.Connection  # never Hypercorn's other, which is for web sockets

    def __init__(self, look: Callable[[], Peer], *made_with: Any) -> None:
        """look  says what the client does, as far as can be seen without reading"""
        super().__init__(*made_with)
        self.can_read = Pause(self._check_client)
        self._look = look
        self._probed_s = -_PROBE_EVERY_S

    async def finish(self) -> None:
        """Returns once a request that has come in whole is answered; see `Protocols.finish`."""
        if self.stream is not None and self.connection.their_state in (h11.DONE, h11.MUST_CLOSE):
            await self.can_read.clear()
            await self.can_read.wait()

    async def _check_client(self) -> None:
        """Raises ConnectionResetError where nobody waits for the answer.

        A client that sends no more may have closed one half of its connection or both. If both, it
        answers what it is sent with a reset: a stream's events, and before them an interim
        response, which others skip (RFC 9110, 15.2). HTTP/1.0 has none: there it has gone.
        """
        peer = self._look()
        if peer is Peer.SENDS:
            return
        if peer is Peer.GONE or self.connection.their_http_version == b"1.0":
            raise ConnectionResetError("the client left its requests")
        now_s = time.monotonic()
        is_due = now_s - self._probed_s >= _PROBE_EVERY_S
        if is_due and self.connection.our_state is h11.SEND_RESPONSE:
            self._probed_s = now_s
            await self._send_h11_event(h11.InformationalResponse(status_code=102, headers=[]))

    async def _create_stream(self, request: h11.Request) -> None:
        """Knows no upgrade: a request for web sockets is answered as the request that it is."""
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        target = request.target
        if absolute := _ABSOLUTE.fullmatch(target):
            authority, target = absolute.groups()
            headers = [(name, value) for name, value in headers if name != b"host"]
            headers.append((b"host", authority))
            target = target if target.startswith(b"/") else b"/" + target
        await super()._create_stream(
            h11.Request(
                method=request.method,
                target=target,
                headers=headers,
                http_version=request.http_version,
            )
        )

    async def _check_protocol(self, event: h11.Request) -> None:
        """Knows HTTP/2 by its preface alone; RFC 9113 took the upgrade to it back."""
        if (event.method, event.target, event.http_version) == (b"PRI", b"*", b"2.0"):
            await super()._check_protocol(event)

    async def _send_error_response(self, status_code: int) -> None:
        """What h11 refuses. Called while its error is handled."""
        refused = self._refusal(status_code, str(sys.exception()))
        headers, content = headers_and_body(refused)
        headers += [(b"connection", b"close"), *self.config.response_headers("h11")]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=content))
        await self._send_h11_event(h11.EndOfMessage())

    def _refusal(self, status: int, why: str) -> Rejected:
        if status == 431:
            come = len(self.connection.trailing_data[0])
            limit = self.config.h11_max_incomplete_size
            message = f"The request's headers have at least {come} bytes; the limit is {limit}."
            return Rejected(status, message, code="headers_too_large")
        code = "unsupported_transfer_encoding" if status == 501 else "invalid_http"
        why = why.partition(": bytearray")[0]  # what the client has sent, a key perhaps
        return Rejected(status, f"The request is not valid HTTP/1.1: {why}.", code=code)


class Pause(EventWrapper):
    """Set while requests are read: not with one that waits for the response to another.

    Owned by its HTTP loop.
    """

    def __init__(self, check_client: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._check_client = check_client

    async def wait(self) -> None:
        """Raises ConnectionResetError where the client leaves meanwhile: no read would tell."""
        while not self.is_set():
            await self._check_client()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await super().wait()
