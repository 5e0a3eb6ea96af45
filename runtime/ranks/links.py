"""How ranks talk: two sockets between rank 0 and each other rank.

One carries step descriptors, from rank 0's engine thread to the other's: whoever waits for one
sleeps in the kernel, and wakes as fast as that can. The other carries lines of JSON both ways:
facts at the start, signs of life, the reason of an end.

Guarantees
- Both are Unix sockets on one machine, and TCP between two: a closed one tells at once that its
  process is gone. Where a network is cut nothing tells it, but silence: see `watch.py`.
- Each end of a socket is written by one thread.

How they come about is `meeting.py`'s. Knows neither what is in a descriptor beyond its header nor
what facts mean.
"""

import json
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from engine.descriptor import H_VERSION, H_WORDS, HEADER_WORDS, VERSION
from engine.request import Int32Array
from runtime.ranks.peers import RankPeer

Message = dict[str, Any]

_MOST_LINE: Final = 1 << 16  # bytes
_MOST_WORDS: Final = 1 << 28  # of a descriptor: 1 GiB, more than 256 masks of any vocabulary
_BUFFER_BYTES: Final = 4 << 20  # a step of 2,048 prompt tokens is 10 KB; of 200 masks, 4 MB


class RanksError(Exception):
    """The ranks cannot serve together; its text is for an operator."""


class LinkClosed(Exception):
    """The other end is gone."""


class Link:
    """Lines of JSON to and from one peer. Owned by one thread."""

    def __init__(self, peer: RankPeer, connection: socket.socket) -> None:
        self.peer = peer
        self._socket = connection
        self._pending = b""  # of a line
        self._unread: list[Message] = []
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises LinkClosed; also where a peer has long read nothing, which beats are for."""
        line = json.dumps(message).encode() + b"\n"
        assert len(line) <= _MOST_LINE
        try:
            if self._socket.send(line) != len(line):
                raise LinkClosed("no room for a whole line")
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> list[Message]:
        """What has come, without waiting. Raises LinkClosed after the last message."""
        if self._unread:
            unread, self._unread = self._unread, []
            return unread
        try:
            part = self._socket.recv(_MOST_LINE)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not part:
            raise LinkClosed("end of file")
        *lines, self._pending = (self._pending + part).split(b"\n")
        if len(self._pending) > _MOST_LINE:
            raise LinkClosed(f"a line of more than {_MOST_LINE} bytes")
        return [json.loads(line) for line in lines]

    def wait(self, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> Message:
        """The next message. Raises LinkClosed, and RanksError after `timeout_s`.

        meanwhile  called every second; what it raises is raised
        """
        deadline = time.monotonic() + timeout_s
        while not (messages := self.receive()):
            meanwhile()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RanksError(f"{self.peer} has said nothing for {timeout_s:g} s")
            select.select([self._socket], [], [], min(left_s, 1.0))
        self._unread = messages[1:]
        return messages[0]

    def close(self) -> None:
        self._socket.close()


class StepSender:
    """Gives descriptors to all other ranks: an `engine.broadcast.StepSink`.

    Owned by rank 0's engine thread.
    """

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._sockets = tuple(connections)
        for connection in self._sockets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)

    def send(self, block: Int32Array) -> None:
        """Waits only where a rank is megabytes behind."""
        for connection in self._sockets:
            connection.sendall(block)

    def close(self) -> None:
        """Tells them that no more will come."""
        for connection in self._sockets:
            connection.close()


class StepReceiver:
    """Takes descriptors, one after the other. Owned by the engine thread of a rank above 0."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._block = np.empty(4096, np.int32)

    def receive(self, timeout_s: float) -> Int32Array | None:
        """The next block, until the next call; None where none came in `timeout_s`.

        Raises LinkClosed where no more come, and ValueError for what is no descriptor.
        """
        self._socket.settimeout(timeout_s)
        header = memoryview(self._block[:HEADER_WORDS]).cast("B")
        try:
            begun = self._socket.recv_into(header)
        except TimeoutError:
            return None
        if not begun:
            raise LinkClosed("end of file")
        self._fill(header[begun:])
        version, words = int(self._block[H_VERSION]), int(self._block[H_WORDS])
        if version != VERSION or not HEADER_WORDS <= words <= _MOST_WORDS:
            raise ValueError(f"not a step descriptor of version {VERSION}: {version}, {words}")
        if words > HEADER_WORDS:
            self._make_room(words)
            self._fill(memoryview(self._block[HEADER_WORDS:words]).cast("B"))
        return self._block[:words]

    def _make_room(self, words: int) -> None:
        if words > self._block.size:
            larger = np.empty(2 * words, np.int32)
            larger[:HEADER_WORDS] = self._block[:HEADER_WORDS]
            self._block = larger

    def _fill(self, left: memoryview) -> None:
        while left:
            try:
                received = self._socket.recv_into(left)
            except TimeoutError:
                continue  # rank 0 is at it, or gone: then the socket ends
            if not received:
                raise LinkClosed("end of file")
            left = left[received:]

    def close(self) -> None:
        self._socket.close()
