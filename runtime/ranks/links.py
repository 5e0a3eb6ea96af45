"""How ranks of one machine talk: two sockets between rank 0 and each other rank.

One carries step descriptors, from rank 0's engine thread to the other's: whoever waits for one
sleeps in the kernel, and wakes as fast as that can. The other carries lines of JSON both ways:
facts at the start, signs of life, the reason of an end.

Guarantees
- Both are Unix sockets in the abstract namespace: no port, no file, nothing left behind.
- The kernel says whose process is at the other end. Anybody may knock, since the namespace has no
  permissions: another user's process, or one that is no rank, is turned away, and the job goes on.
- Each end of a socket is written by one thread.

Knows neither what is in a descriptor beyond its header nor what facts mean.
"""

import json
import logging
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from engine.descriptor import H_VERSION, H_WORDS, HEADER_WORDS, VERSION
from engine.request import Int32Array

log = logging.getLogger(__name__)

Message = dict[str, Any]

_MOST_LINE: Final = 1 << 16  # bytes
_MOST_WORDS: Final = 1 << 28  # of a descriptor: 1 GiB, more than 256 masks of any vocabulary
_BUFFER_BYTES: Final = 4 << 20  # a step of 2,048 prompt tokens is 10 KB; of 200 masks, 4 MB
_RETRY_S: Final = 0.02
_GREETING_S: Final = 5.0  # it is sent right behind the connection
_MOST_GREETING: Final = 64  # bytes
_CREDENTIALS: Final = "3i"  # struct ucred: process, user, group


class RanksError(Exception):
    """The ranks cannot serve together; its text is for an operator."""


class LinkClosed(Exception):
    """The other end is gone."""


class RankProcess:
    """The process at the other end of a link. Safe from any thread: nothing changes."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank, self.pid = rank, pid
        self._fd = os.pidfd_open(pid)  # of this process even when its number is given anew

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, so that it does nothing until another one comes."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def kill(self) -> None:
        """Ends it, if it still runs."""
        try:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended already

    def wait_end(self, timeout_s: float) -> bool:
        """True once the process has ended."""
        return bool(select.select([self._fd], [], [], max(0.0, timeout_s))[0])


class Link:
    """Lines of JSON to and from one peer. Owned by one thread."""

    def __init__(self, peer: RankProcess, connection: socket.socket) -> None:
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

    def wait(self, timeout_s: float) -> Message:
        """The next message. Raises LinkClosed, and RanksError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not (messages := self.receive()):
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left_s)[0]:
                raise RanksError(f"{self.peer} has said nothing for {timeout_s:g} s")
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


def await_ranks(job: str, size: int, timeout_s: float) -> tuple[list[Link], StepSender]:
    """Rank 0's links to all others, in the order of ranks.

    Raises RanksError where one does not come in time, or comes twice.
    """
    links: dict[int, Link] = {}
    steps: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind(_meeting_point(job))
        except OSError as error:
            raise RanksError(f"another job of this machine has the name {job!r}") from error
        listening.listen(2 * size)
        while len(links) < size - 1 or len(steps) < size - 1:
            connection = _accepted(listening, deadline)
            if connection is None:
                missing = sorted(set(range(1, size)) - (set(links) & set(steps)))
                raise RanksError(
                    f"rank {', '.join(map(str, missing))} did not come within {timeout_s:g} s"
                )
            greeted = _try_greet(connection, size)
            if greeted is None:
                continue
            kind, peer = greeted
            if peer.rank in (links if kind == "control" else steps):
                raise RanksError(f"{peer} is there twice")
            if kind == "control":
                links[peer.rank] = Link(peer, connection)
            else:
                steps[peer.rank] = connection
    ranks = range(1, size)
    return [links[rank] for rank in ranks], StepSender([steps[rank] for rank in ranks])


def meet_rank_0(job: str, rank: int, timeout_s: float) -> tuple[Link, StepReceiver]:
    """Another rank's links to rank 0. Raises RanksError where that does not come in time."""
    deadline = time.monotonic() + timeout_s
    connections = []
    for kind in ("control", "steps"):
        connection = _connected(job, deadline)
        connection.sendall(json.dumps([kind, rank]).encode() + b"\n")
        connections.append(connection)
    peer = RankProcess(0, _process_of(connections[0]))
    return Link(peer, connections[0]), StepReceiver(connections[1])


def _meeting_point(job: str) -> str:
    return f"\0plait-{os.getuid()}-{job}"


def _connected(job: str, deadline: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(_meeting_point(job))
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise RanksError(f"rank 0 cannot be found: {error}") from error
            time.sleep(_RETRY_S)


def _accepted(listening: socket.socket, deadline: float) -> socket.socket | None:
    """The next connection; None once the time is over, however many strangers knock."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return None
    listening.settimeout(left_s)
    try:
        return listening.accept()[0]
    except TimeoutError:
        return None


def _try_greet(connection: socket.socket, size: int) -> tuple[str, RankProcess] | None:
    """Which link of which rank this is; None for a stranger, who is turned away."""
    try:
        process = _process_of(connection)
        kind, rank = _greeting(connection, size, process)
        return kind, RankProcess(rank, process)
    except (RanksError, OSError) as error:  # OSError: it says nothing, or has gone
        log.warning("a connection to the ranks' meeting point is turned away: %s", error)
        connection.close()
        return None


def _greeting(connection: socket.socket, size: int, process: int) -> tuple[str, int]:
    """What the other end says it is. Raises RanksError for what is no rank's word, and OSError."""
    deadline = time.monotonic() + _GREETING_S
    said = b""
    while not said.endswith(b"\n") and len(said) < _MOST_GREETING:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        said += connection.recv(1) or b"\n"
    connection.settimeout(None)
    known = {
        json.dumps([kind, rank]).encode() + b"\n": (kind, rank)
        for kind in ("control", "steps")
        for rank in range(1, size)
    }
    if said not in known:
        raise RanksError(f"process {process} is no rank of this job: {said!r}")
    return known[said]


def _process_of(connection: socket.socket) -> int:
    """The process at the other end. Raises RanksError where it is another user's."""
    size = struct.calcsize(_CREDENTIALS)
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    process, user, _ = struct.unpack(_CREDENTIALS, raw)
    if user != os.getuid():
        raise RanksError(f"process {process} of user {user} is at the ranks' meeting point")
    return int(process)
