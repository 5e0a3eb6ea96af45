"""HTTP/1.1 for httpx with hundreds of connections at a time, each request at the same cost.

httpcore's pool (1.0) goes over all of its connections whenever a request begins or ends, and for
each idle one over all of them again: with 128 users who are answered together, seconds in which
nobody's answer is read. A part of an answer costs it twice what it costs here, too. h11 knows the
protocol, asyncio the sockets; what is ours is who has which connection.

Knows no proxies and no timeouts.
"""

import asyncio
import select
import ssl
from typing import Final, cast

import h11
import httpx

from client.certificates import tls_for
from client.wire import Answer, Head, connect

_HEAD_BYTES: Final = 100 << 10  # of an answer, at most
_CLOSED: Final = "the connection is closed"

# Of a connection that may be asked again.
_AT_REST: Final = {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}
_NOTHING_MORE: Final = (b"", False)


class _Connection(asyncio.Protocol):
    """One connection, of one request at a time. Owned by the loop."""

    def __init__(self, owner: "Http1Transport") -> None:
        self._owner = owner
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self.lost: asyncio.Future[None] = asyncio.Future()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        """data  nothing: no more will come"""
        if self._answer is None:  # and nothing was asked
            self.abort()
            return
        try:
            self._h11.receive_data(data)
            self._read(self._answer)
        except h11.RemoteProtocolError as error:
            self.abort(httpx.RemoteProtocolError(str(error)))

    def _read(self, answer: Answer) -> None:
        """Hands on, as one part, what h11 makes of what has come."""
        parts, is_end = [], False
        while not isinstance(event := self._h11.next_event(), type):  # h11.NEED_DATA or PAUSED
            if isinstance(event, h11.Data):
                parts.append(event.data)
            elif isinstance(event, h11.Response):
                answer.begin(Head(event.status_code, list(event.headers)))
            elif isinstance(event, h11.EndOfMessage):
                is_end = True
            elif isinstance(event, h11.ConnectionClosed):
                break
        if parts:
            answer.put(b"".join(parts))
        if is_end:
            answer.end()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.ended:
            if exc is None:
                self.data_received(b"")  # the end of an answer without a length, or of one too soon
            else:
                self.abort(httpx.ReadError(f"the connection is lost: {exc}"))
        self._transport = None
        self._owner.lost(self)
        self.lost.set_result(None)

    # What the owner calls

    @property
    def is_usable(self) -> bool:
        """Whether it may be asked: neither side has closed it, nor said what nobody asked for."""
        if self._transport is None or self._transport.is_closing():
            return False
        poll = select.poll()  # the loop may not have seen yet what the server sent: its end
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return not poll.poll(0)

    async def send(self, request: httpx.Request, body: bytes) -> httpx.Response:
        """Raises httpx.HTTPError; the connection is closed then."""
        assert self._transport is not None and self._answer is None, "it was usable"
        answer = self._answer = Answer(self._leave)
        try:
            self._transport.write(self._written(request, body))
            return await answer.response("HTTP/1.1")
        except BaseException:  # a cancellation, for the most part
            self.abort()
            raise

    def _written(self, request: httpx.Request, body: bytes) -> bytes:
        try:
            head = h11.Request(
                method=request.method, target=request.url.raw_path, headers=request.headers.raw
            )
            events = [head, h11.Data(data=body), h11.EndOfMessage()]
            return b"".join(self._h11.send(event) or b"" for event in events)
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from error

    def _leave(self) -> None:
        """Nobody reads on: to be used again only where nothing is left to read."""
        self._answer = None
        if self._h11.states == _AT_REST and self._h11.trailing_data == _NOTHING_MORE:
            self._h11.start_next_cycle()
            self._owner.give_back(self)
        else:
            self.abort()

    def abort(self, error: httpx.HTTPError | None = None) -> None:
        """Closes at once; whoever still reads is told why."""
        answer, self._answer = self._answer, None
        if answer is not None and not answer.ended:
            answer.fail(error or httpx.ReadError(_CLOSED))
        if self._transport is not None:
            self._transport.abort()


class Http1Transport(httpx.AsyncBaseTransport):
    """Connections to one server; of the idle, the last used goes first. Owned by the loop."""

    def __init__(self) -> None:
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._tls: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        connection = self._taken() or await self._new(request.url)
        return await connection.send(request, body)

    def _taken(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.abort()
        return None

    async def _new(self, url: httpx.URL) -> _Connection:
        if url.scheme == "https" and self._tls is None:
            self._tls = tls_for(url)
            self._tls.set_alpn_protocols(["http/1.1"])
        return await connect(lambda: _Connection(self), url, self._tls)

    async def aclose(self) -> None:
        closing = tuple(self._open)
        for connection in closing:
            connection.abort()
        await asyncio.gather(*(connection.lost for connection in closing))

    # What connections call

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)

    def give_back(self, connection: _Connection) -> None:
        self._idle.append(connection)
