"""An HTTP/2 connection for httpx that tells the server when a stream is left.

httpx's own (httpcore 1.0) drops a response that is not read to its end without a word: no
RST_STREAM, so that the server works on, for nobody. Load that leaves must be seen to leave.
"""

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final, cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import httpx

from client.certificates import tls_for
from client.wire import Answer, Head, connect

WINDOW_BYTES: Final = 1 << 24  # never a reason to wait: what comes is read at once

_CLOSED: Final = "the connection is closed"


class _Stream(Answer):
    """One request's answer, and the room for its body. Owned by the loop."""

    def __init__(self, leave: Callable[[], None]) -> None:
        super().__init__(leave)
        self.room = asyncio.Event()  # set whenever more of the request may be sent

    def end(self) -> None:
        super().end()
        self.room.set()  # nobody waits for more of it


class _Connection(asyncio.Protocol):
    """Owned by the loop."""

    def __init__(self) -> None:
        config = h2.config.H2Configuration(header_encoding=None, validate_inbound_headers=False)
        self._h2 = h2.connection.H2Connection(config)
        self._streams: dict[int, _Stream] = {}
        self._transport: asyncio.Transport | None = None

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW_BYTES)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        for stream in self._streams.values():
            stream.fail(_lost(f"{_CLOSED}: {exc}"))
        self._streams.clear()
        self._transport = None

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._h2.receive_data(data):
                self._take(event)
        except h2.exceptions.ProtocolError as error:
            self.close(f"the server broke the protocol: {error}")
            return
        self._flush()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):  # h2 takes and sends no more then
            self.close("the server ends the connection")
            return
        if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        if isinstance(event, (h2.events.WindowUpdated, h2.events.RemoteSettingsChanged)):
            for waiting in self._streams.values():
                waiting.room.set()
        stream_id = getattr(event, "stream_id", None)
        stream = self._streams.get(stream_id) if stream_id else None
        if stream is None:
            return
        if isinstance(event, h2.events.ResponseReceived):
            stream.begin(_head_of(event.headers))
        elif isinstance(event, h2.events.DataReceived) and event.data:
            stream.put(event.data)
        elif isinstance(event, h2.events.StreamEnded):
            stream.end()
        elif isinstance(event, h2.events.StreamReset):
            stream.fail(_lost(f"the server reset the stream: {event.error_code}"))

    # What the transport calls

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: httpx.Request, body: bytes) -> httpx.Response:
        stream_id = self._h2.get_next_available_stream_id()
        stream = self._streams[stream_id] = _Stream(partial(self.leave, stream_id))
        try:
            self._h2.send_headers(stream_id, _headers(request), end_stream=not body)
            self._flush()
            if body:
                await self._send_body(stream, stream_id, body)
            return await stream.response("HTTP/2")
        except BaseException:  # a cancellation, for the most part
            self.leave(stream_id)
            raise

    async def _send_body(self, stream: _Stream, stream_id: int, body: bytes) -> None:
        sent = 0
        while sent < len(body) and not stream.ended:
            room = self._h2.local_flow_control_window(stream_id)
            size = min(room, self._h2.max_outbound_frame_size, len(body) - sent)
            if size == 0:
                stream.room.clear()
                await stream.room.wait()
                continue
            is_last = sent + size == len(body)
            self._h2.send_data(stream_id, body[sent : sent + size], end_stream=is_last)
            self._flush()
            sent += size

    def leave(self, stream_id: int) -> None:
        """Resets the stream where it has not ended."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None and not stream.ended and self.is_open:
            self._h2.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)
            self._flush()

    def close(self, reason: str = _CLOSED) -> None:
        for stream in self._streams.values():
            stream.fail(_lost(reason))
        self._streams.clear()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.write(self._h2.data_to_send())


class Http2Transport(httpx.AsyncBaseTransport):
    """One connection for all requests to one server, opened at the first. Owned by the loop."""

    def __init__(self) -> None:
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        async with self._opening:
            if self._connection is None or not self._connection.is_open:
                self._connection = await _open(request.url)
        return await self._connection.send(request, body)

    async def aclose(self) -> None:
        if self._connection is not None:
            self._connection.close()


async def _open(url: httpx.URL) -> _Connection:
    tls: ssl.SSLContext | None = None
    if url.scheme == "https":
        tls = tls_for(url)
        tls.set_alpn_protocols(["h2"])
    return await connect(_Connection, url, tls)


def _lost(why: str) -> httpx.HTTPError:
    return httpx.RemoteProtocolError(why)


def _head_of(headers: list[tuple[bytes, bytes]]) -> Head:
    status = next(int(value) for name, value in headers if name == b":status")
    return Head(status, [(name, value) for name, value in headers if not name.startswith(b":")])


def _headers(request: httpx.Request) -> list[tuple[bytes, bytes]]:
    url = request.url
    dropped = (b"host", b"connection", b"transfer-encoding")
    return [
        (b":method", request.method.encode()),
        (b":scheme", url.scheme.encode()),
        (b":authority", url.netloc),
        (b":path", url.raw_path),
        *((name.lower(), value) for name, value in request.headers.raw
          if name.lower() not in dropped),
    ]  # fmt: skip
