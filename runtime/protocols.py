"""HTTP/1.1 and HTTP/2 as Hypercorn (0.18) speaks them, less its faults that a client can reach.

Rules
- What is refused below the app is told as the app tells it: with an OpenAI error body.

Knows neither sockets nor routes.
"""

import sys
from typing import Any

import h11
from hypercorn.events import Event, RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol

from httpd.errors import error_body
from httpd.service import Rejected
from httpd.text import json_bytes


class Protocols(ProtocolWrapper):
    """The protocol of one connection. Owned by the HTTP loop."""

    def __init__(self, alpn: str | None, *made_with: Any) -> None:
        """alpn       what TLS agreed on; without, it is HTTP/2 where the client's preface says so
        made_with  the arguments of Hypercorn's protocols
        """
        self._made_with = made_with
        self.protocol = H2Protocol(*made_with) if alpn == "h2" else Http1(*made_with)

    async def handle(self, event: Event) -> None:
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as preface:
            self.protocol = H2Protocol(*self._made_with)
            await self.protocol.initiate()
            await self.protocol.handle(RawData(preface.data))


class Http1(H11Protocol):
    """One connection's HTTP/1.1. Owned by the HTTP loop."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Knows HTTP/2 by its preface alone; RFC 9113 took the upgrade to it back."""
        if (event.method, event.target, event.http_version) == (b"PRI", b"*", b"2.0"):
            await super()._check_protocol(event)

    async def _send_error_response(self, status_code: int) -> None:
        """What h11 refuses. Called while its error is handled."""
        refused = self._refusal(status_code, str(sys.exception()))
        content = json_bytes(error_body(refused))
        headers = [*_json_headers(content), (b"connection", b"close")]
        headers += self.config.response_headers("h11")
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
        return Rejected(status, f"The request is not valid HTTP/1.1: {why}.", code=code)


def _json_headers(content: bytes) -> list[tuple[bytes, bytes]]:
    length = b"%d" % len(content)
    return [(b"content-type", b"application/json"), (b"content-length", length)]
