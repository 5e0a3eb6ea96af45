"""HTTP/1.1 as Hypercorn (0.18) speaks it, less its faults that a client can reach.

Knows neither sockets nor routes.
"""

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import h11
from hypercorn.asyncio.worker_context import EventWrapper
from hypercorn.protocol.h11 import H11Protocol

from httpd.service import Rejected
from runtime.refusal import headers_and_body

_LOOK_S: Final = 0.25  # between two looks whether a client has left; within the promise of 1 s


class Http1(H11Protocol):
    """One connection's HTTP/1.1. Owned by the HTTP loop."""

    def __init__(self, has_client_left: Callable[[], bool], *made_with: Any) -> None:
        super().__init__(*made_with)
        self.can_read = Pause(has_client_left)

    async def _create_stream(self, request: h11.Request) -> None:
        """Knows no upgrade: a request for web sockets is answered as the request that it is."""
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        await super()._create_stream(
            h11.Request(
                method=request.method,
                target=request.target,
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

    Owned by the HTTP loop.
    """

    def __init__(self, has_client_left: Callable[[], bool]) -> None:
        super().__init__()
        self._has_client_left = has_client_left

    async def wait(self) -> None:
        """Raises ConnectionResetError where the client leaves meanwhile: no read would tell."""
        while not self.is_set():
            if self._has_client_left():
                raise ConnectionResetError("the client left its requests")
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await super().wait()
