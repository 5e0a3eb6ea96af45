"""HTTP/1.1 and HTTP/2 as Hypercorn (0.18) speaks them, less its faults that a client can reach.

Rules
- What is refused below the app is told as the app tells it: with an OpenAI error body.
- An HTTP/2 stream that is wrong fails alone. Frames that h2 itself cannot read, pseudo headers that
  are missing or doubled and lengths that are wrong among them, end the connection: h2 has lost the
  place where the next frame's headers would be decoded, or says that it has.

Knows neither sockets nor routes.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import h2.events
import h11
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol
from priority import PriorityTree

from httpd.errors import error_body
from httpd.service import Rejected
from httpd.text import json_bytes, shown

# Streams that have something to send, or had just now. Those alive are limited by h2; these also
# count streams that were opened and reset since the sending task ran: about 2,500 a read.
_MAX_SENDING: Final = 1 << 20


class Protocols(ProtocolWrapper):
    """The protocol of one connection. Owned by the HTTP loop."""

    def __init__(self, alpn: str | None, *made_with: Any) -> None:
        """alpn       what TLS agreed on; without, it is HTTP/2 where the client's preface says so
        made_with  the arguments of Hypercorn's protocols
        """
        self._made_with = made_with
        self.protocol = Http2(*made_with) if alpn == "h2" else Http1(*made_with)

    async def handle(self, event: Event) -> None:
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as preface:
            self.protocol = Http2(*self._made_with)
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


class Http2(H2Protocol):
    """One connection's HTTP/2. Owned by the HTTP loop."""

    def __init__(self, *made_with: Any) -> None:
        super().__init__(*made_with)
        self.priority = PriorityTree(_MAX_SENDING)

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        if any(isinstance(event, h2.events.ConnectionTerminated) for event in events):
            await self.send(Closed())  # h2 sends nothing any more, an answer to these least of all
            return
        for event in events:
            if isinstance(event, h2.events.PriorityUpdated):
                continue  # RFC 9113 took priorities back
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                size = event.flow_controlled_length  # its response is complete
                self.connection.acknowledge_received_data(size, event.stream_id)
                continue
            if isinstance(event, h2.events.RequestReceived):
                wrong = _wrong_pseudo_header(dict(event.headers))
                if wrong is not None:
                    self._refuse(event.stream_id, wrong)
                    continue
            await super()._handle_events([event])
        await self._flush()

    def _refuse(self, stream_id: int, wrong: Rejected) -> None:
        """Answers a request that the app cannot be shown."""
        content = json_bytes(error_body(wrong))
        headers = [(b":status", b"%d" % wrong.status), *_json_headers(content)]
        headers += self.config.response_headers("h2")
        self.connection.send_headers(stream_id, headers)
        if self.connection.local_flow_control_window(stream_id) >= len(content):
            self.connection.send_data(stream_id, content, end_stream=True)
            self._reset(stream_id, ErrorCodes.NO_ERROR)
        else:
            self._reset(stream_id, ErrorCodes.PROTOCOL_ERROR)

    async def _send_data(self, stream_id: int) -> None:
        await super()._send_data(stream_id)
        if stream_id not in self.stream_buffers:  # its response is complete
            self._reset(stream_id, ErrorCodes.NO_ERROR)
            await self._flush()

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        """Ends what is open of a stream; after a complete response, asks for no more request."""
        stream = self.connection.streams.get(stream_id)
        if stream is not None and stream.open:
            with suppress(ProtocolError):  # the connection has ended meanwhile
                self.connection.reset_stream(stream_id, code)


def _wrong_pseudo_header(headers: Mapping[bytes, bytes]) -> Rejected | None:
    """What h2 lets pass and Hypercorn stumbles over, with every other stream of the connection."""
    method, path = headers[b":method"], headers.get(b":path", b"")
    if not method.isascii():
        return _invalid("method", method)
    if not path.isascii():
        return _invalid("path", path)
    if method.upper() == b"CONNECT":  # tunnels and web sockets
        message = "This server does not take the method CONNECT."
        return Rejected(405, message, code="method_not_allowed")
    return None


def _invalid(name: str, value: bytes) -> Rejected:
    message = f"Invalid ':{name}': {shown(value.decode('latin-1'))} is not ASCII."
    return Rejected(400, message, code=f"invalid_{name}")


def _json_headers(content: bytes) -> list[tuple[bytes, bytes]]:
    length = b"%d" % len(content)
    return [(b"content-type", b"application/json"), (b"content-length", length)]
