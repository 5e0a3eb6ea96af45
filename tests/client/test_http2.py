"""One connection for all requests, which a server may end at any time."""

import asyncio

import h2.config
import h2.connection
import h2.events
import httpx
import pytest

from client.http2 import Http2Transport

SOON_S = 20.0


class Server(asyncio.Protocol):
    """One connection, which may end in the middle of its first answer. Owned by the loop."""

    def __init__(self, goes_away: bool) -> None:
        self._goes_away = goes_away

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self._h2.initiate_connection()

    def data_received(self, data: bytes) -> None:
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                assert event.stream_id is not None
                self._h2.send_headers(event.stream_id, [(":status", "200")])
                self._h2.send_data(event.stream_id, b"part", end_stream=not self._goes_away)
                if self._goes_away:
                    self._h2.close_connection()
        self._transport.write(self._h2.data_to_send())


def test_a_server_that_goes_away_fails_what_it_has_not_answered_and_nothing_after_it() -> None:
    async def main() -> None:
        going = iter((True, False))
        listening = await asyncio.get_running_loop().create_server(
            lambda: Server(next(going)), "127.0.0.1", 0
        )
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with listening, httpx.AsyncClient(transport=Http2Transport()) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(url)
            assert (await client.get(url)).text == "part"
        assert not list(going), "two connections, and no more"

    asyncio.run(asyncio.wait_for(main(), SOON_S))
