"""HTTP/1.1 for httpx with hundreds of connections at a time, each request at the same cost.

httpcore's pool (1.0) goes over all of its connections whenever a request begins or ends, and for
each idle one over all of them again. With 128 users who are answered together that is seconds in
which nobody's answer is read. So here every connection is a transport of its own, whose pool holds
nothing else; what httpcore does for one connection stays its work: a server that closed it while
it was idle is met by a new one.

Knows no proxies.
"""

import ssl
from collections.abc import AsyncIterator, Callable
from typing import Final

import httpx

_ALONE: Final = httpx.Limits(max_connections=1)

NewConnection = Callable[[], httpx.AsyncBaseTransport]


class _Stream(httpx.AsyncByteStream):
    """One answer's body, which gives its connection back when it is closed. Owned by the loop."""

    def __init__(
        self, transport: "Http1Transport", connection: httpx.AsyncBaseTransport,
        body: httpx.AsyncByteStream,
    ) -> None:  # fmt: skip
        self._transport, self._connection, self._body = transport, connection, body
        self._is_read = False  # to its end

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part
        self._is_read = True

    async def aclose(self) -> None:
        await self._body.aclose()
        if self._is_read:
            self._transport.give_back(self._connection)
        else:
            await self._transport.drop(self._connection)


class Http1Transport(httpx.AsyncBaseTransport):
    """Connections that wait for their next request, the last used first. Owned by the loop."""

    def __init__(self, tls: ssl.SSLContext, new: NewConnection | None = None) -> None:
        """tls  for all connections;  new  makes one, of what is to carry one request at a time"""
        self._new = new or (lambda: httpx.AsyncHTTPTransport(verify=tls, limits=_ALONE))
        self._all: set[httpx.AsyncBaseTransport] = set()
        self._idle: list[httpx.AsyncBaseTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        connection = self._take()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:  # a cancellation among them: what it left half done is unknown
            await self.drop(connection)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(self, connection, response.stream)
        return response

    def _take(self) -> httpx.AsyncBaseTransport:
        if self._idle:
            return self._idle.pop()
        connection = self._new()
        self._all.add(connection)
        return connection

    def give_back(self, connection: httpx.AsyncBaseTransport) -> None:
        """An answer was read to its end."""
        if connection in self._all:  # else all were closed meanwhile
            self._idle.append(connection)

    async def drop(self, connection: httpx.AsyncBaseTransport) -> None:
        await connection.aclose()
        self._all.discard(connection)

    async def aclose(self) -> None:
        open_ones, self._all, self._idle = self._all, set(), []
        for connection in open_ones:
            await connection.aclose()
