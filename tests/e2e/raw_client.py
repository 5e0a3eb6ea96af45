"""Requests that are sent and then left, on a socket that the test itself closes.

HTTP libraries hide how a client goes: by closing its connection, or, on HTTP/2, by resetting one
stream of a connection that goes on.
"""

import json
import socket
import struct
from typing import Any

import h2.connection
import h2.errors
import h2.events

from tests.server_process import SOON_S, ServerProcess

WAYS = ("HTTP/1.1 closed", "HTTP/1.1 reset", "HTTP/2 closed", "HTTP/2 stream reset")


class RawRequest:
    """One POST on a connection of its own. Owned by the test's thread."""

    def __init__(self, server: ServerProcess, path: str, body: dict[str, Any], way: str) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._way = way
        self._socket = socket.create_connection((host, int(port)), timeout=SOON_S)
        self._http2 = h2.connection.H2Connection() if way.startswith("HTTP/2") else None
        content = json.dumps(body).encode()
        if self._http2 is None:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
            self._socket.sendall(head.encode() + content)
            return
        self._http2.initiate_connection()
        self._http2.send_headers(1, [
            (":method", "POST"), (":path", path), (":scheme", "http"), (":authority", host),
        ])  # fmt: skip
        assert len(content) < self._http2.max_outbound_frame_size
        self._http2.send_data(1, content, end_stream=True)
        self._socket.sendall(self._http2.data_to_send())

    def wait_text(self, part: bytes) -> None:
        """Returns once `part` has come; it must not be cut by a frame's end."""
        come = b""
        while part not in come:
            received = self._socket.recv(1 << 16)
            assert received, come
            if self._http2 is None:
                come += received
                continue
            for event in self._http2.receive_data(received):
                if isinstance(event, h2.events.DataReceived):
                    come += event.data

    def leave(self) -> None:
        """Goes in its way; the connection stays open where only the stream is reset."""
        if self._way == "HTTP/2 stream reset":
            assert self._http2 is not None
            self._http2.reset_stream(1, h2.errors.ErrorCodes.CANCEL)
            self._socket.sendall(self._http2.data_to_send())
            return
        if self._way == "HTTP/1.1 reset":  # no linger: a RST packet instead of a FIN
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        self._socket.close()
