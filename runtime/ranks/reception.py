"""Rank 0's doors while ranks come in: who proves to be of the job is let in, all others are not.

Guarantees
- Of somebody unknown as many bytes are read as a greeting has, in bounded time, from a bounded
  number at once; nobody waits for anybody else.
- A process of this machine must be of the same user, which the kernel tells; one of another must
  know the secret (`proof.py`).
"""

import logging
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from runtime.ranks.links import RanksError
from runtime.ranks.peers import DistantRank, RankPeer, RankProcess
from runtime.ranks.proof import HELLO_BYTES, NoProof, answer, challenge, check_hello
from runtime.ranks.rank import MOST_RANKS

log = logging.getLogger(__name__)

_GREETING_S: Final = 5.0  # it is sent right behind the connection
_MOST_CALLERS: Final = 2 * MOST_RANKS + 16  # at a time: every link of a job, and some strangers
_CREDENTIALS: Final = "3i"  # struct ucred: process, user, group

Admitted = tuple[str, RankPeer, socket.socket]  # which link, of whom


@dataclass(frozen=True, slots=True)
class Door:
    """Where ranks come in."""

    listening: socket.socket
    secret: bytes
    name: str = ""  # for an operator; none of the one for this machine


@dataclass(slots=True)
class _Caller:
    """Somebody at a door. Owned by the main thread."""

    connection: socket.socket
    name: str
    secret: bytes
    challenge: bytes
    until_s: float
    said: bytes = b""


class Reception:
    """Lets ranks in, and turns all others away. Owned by the main thread."""

    def __init__(self, size: int, doors: Sequence[Door]) -> None:
        """size  ranks of the job"""
        self._size = size
        self._secrets = {door.listening: door.secret for door in doors}
        self._callers: dict[socket.socket, _Caller] = {}

    def turn(self, timeout_s: float) -> list[Admitted]:
        """Who has proved to be a rank since; waits up to `timeout_s` for somebody to say a word."""
        readable, _, _ = select.select([*self._secrets, *self._callers], [], [], timeout_s)
        for listening in self._secrets.keys() & set(readable):
            self._welcome(listening)
        heard = [self._callers[one] for one in readable if one in self._callers]
        admitted = [known for caller in heard if (known := self._hear(caller)) is not None]
        now_s = time.monotonic()
        for caller in [one for one in self._callers.values() if one.until_s < now_s]:
            self._turn_away(caller, f"has not said who it is for {_GREETING_S:g} s")
        return admitted

    def close(self) -> None:
        """Nobody else is let in."""
        for connection in self._callers:
            connection.close()

    def _welcome(self, listening: socket.socket) -> None:
        try:
            connection = listening.accept()[0]
        except OSError:
            return  # it has gone already
        if len(self._callers) >= _MOST_CALLERS:
            self._turn_away(next(iter(self._callers.values())), "is one of too many")
        caller = _Caller(connection, "somebody", self._secrets[listening], challenge(), 0.0)
        self._callers[connection] = caller
        caller.until_s = time.monotonic() + _GREETING_S
        try:
            connection.setblocking(False)
            caller.name = _name_of(connection)
            connection.send(caller.challenge)  # a new socket has room for it
        except (RanksError, OSError) as error:
            self._turn_away(caller, str(error))

    def _hear(self, caller: _Caller) -> Admitted | None:
        """None while it has not said enough, and where it is turned away."""
        try:
            part = caller.connection.recv(HELLO_BYTES - len(caller.said))
        except BlockingIOError:
            return None
        except OSError as error:
            self._turn_away(caller, str(error))
            return None
        caller.said += part
        try:
            if not part:
                raise NoProof("has hung up")
            return self._admit(caller) if len(caller.said) == HELLO_BYTES else None
        except (NoProof, OSError) as error:
            self._turn_away(caller, str(error))
            return None

    def _admit(self, caller: _Caller) -> Admitted:
        connection = caller.connection
        kind, rank = check_hello(caller.secret, caller.challenge, caller.said, self._size)
        peer: RankPeer
        if connection.family == socket.AF_UNIX:
            peer = RankProcess(rank, process_of(connection))
        else:
            peer = DistantRank(rank, connection)
            send_at_once(connection)
        connection.send(answer(caller.secret, caller.challenge, caller.said))
        connection.setblocking(True)
        del self._callers[connection]
        return kind, peer, connection

    def _turn_away(self, caller: _Caller, why: str) -> None:
        log.warning("turned away from the ranks' meeting point: %s %s", caller.name, why)
        del self._callers[caller.connection]
        caller.connection.close()


def process_of(connection: socket.socket) -> int:
    """The process at the other end. Raises RanksError where it is another user's."""
    size = struct.calcsize(_CREDENTIALS)
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    process, user, _ = struct.unpack(_CREDENTIALS, raw)
    if user != os.getuid():
        raise RanksError(f"process {process} of user {user} is at the ranks' meeting point")
    return int(process)


def send_at_once(connection: socket.socket) -> None:
    """TCP otherwise holds back a small piece until the one before it has arrived."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _name_of(connection: socket.socket) -> str:
    """For an operator. Raises RanksError as `process_of`, and OSError where it has gone."""
    if connection.family == socket.AF_UNIX:
        return f"process {process_of(connection)}"
    host, port, *_ = connection.getpeername()
    return f"{host}:{port}"
