"""The protocol of one connection, HTTP/1.1 or HTTP/2: as TLS agreed on, or as the client begins.

What is refused below the app is told as the app tells it: see refusal.py. Knows neither sockets nor
routes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from hypercorn.events import Event, RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H2ProtocolAssumedError

from runtime.http1 import Http1
from runtime.http2 import Http2
from runtime.peer import Peer
from runtime.turns import Turns


class Protocols(ProtocolWrapper):
    """The protocol of one connection. Owned by its HTTP loop."""

    def __init__(
        self,
        alpn: str | None,
        stall_timeout_s: float,
        turns: Turns,
        look: Callable[[], Peer],
        *made_with: Any,
    ) -> None:
        """
        alpn             what TLS agreed on; else the client's preface may say HTTP/2
        stall_timeout_s  for the client of an HTTP/2 stream to take what is sent
        turns            to work on input in
        look             says what the client does, as far as can be seen without reading
        made_with        the arguments of Hypercorn's protocols
        """
        self._http2 = partial(Http2, stall_timeout_s, turns, *made_with)
        self.protocol = self._http2() if alpn == "h2" else Http1(look, *made_with)

    async def handle(self, event: Event) -> None:
        """Raises ConnectionResetError where the client left while its requests waited."""
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as preface:
            self.protocol = self._http2()
            await self.protocol.initiate()
            await self.protocol.handle(RawData(preface.data))

    async def finish(self) -> None:
        """The client sends no more: returns once it has the answer to what has come in whole.

        Over HTTP/2, where no client closes half a connection, that is at once. Raises
        ConnectionResetError where the client leaves meanwhile.
        """
        if isinstance(self.protocol, Http1):
            await self.protocol.finish()
