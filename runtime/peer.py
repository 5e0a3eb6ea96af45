"""What a server can see of a client without reading: whether it still sends, and still listens."""

import asyncio
import enum
import socket
from typing import Final

_TCP_CLOSE_WAIT: Final = 8  # linux/tcp_states.h: the client sends no more, and has reset nothing


class Peer(enum.Enum):
    """The other end of a connection."""

    SENDS = enum.auto()
    LISTENS = enum.auto()  # it has closed its sending half; or both, which looks the same until
    # something is sent to it, that it answers with a reset
    GONE = enum.auto()


def look_at(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Peer:
    """What the client of this connection does."""
    if writer.is_closing():
        return Peer.GONE
    if not reader.at_eof():
        return Peer.SENDS
    connection: socket.socket = writer.get_extra_info("socket")
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return Peer.LISTENS if state == _TCP_CLOSE_WAIT else Peer.GONE
