"""How the ranks of one machine find each other, before any of them imports torch.

Guarantees
- The meeting point is a Unix socket in the abstract namespace: no port, no file, nothing left.
- The kernel says whose process is at the other end. Anybody may knock, since the namespace has no
  permissions: another user's process, or one that is no rank, is turned away, and the job goes on.
- A rank that a signal has stopped before it came is found, and ends the job: see `stopped.py`.
"""

import json
import logging
import os
import socket
import struct
import time
from typing import Final

from runtime.ranks.links import Link, RankProcess, RanksError, StepReceiver, StepSender
from runtime.ranks.stopped import LOOK_S, StoppedRanks

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.02
_GREETING_S: Final = 5.0  # it is sent right behind the connection
_MOST_GREETING: Final = 64  # bytes
_CREDENTIALS: Final = "3i"  # struct ucred: process, user, group


def await_ranks(job: str, size: int, timeout_s: float) -> tuple[list[Link], StepSender]:
    """Rank 0's links to all others, in the order of ranks.

    Raises RanksError where one does not come in time, is stopped by a signal, or comes twice.
    """
    stopped = StoppedRanks(job, range(1, size))
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
            connection = _accepted(listening, deadline, stopped)
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
    """Another rank's links to rank 0.

    Raises RanksError where that does not come in time, or is stopped by a signal.
    """
    deadline, stopped = time.monotonic() + timeout_s, StoppedRanks(job, (0,))
    connections = []
    for kind in ("control", "steps"):
        connection = _connected(job, deadline, stopped)
        connection.sendall(json.dumps([kind, rank]).encode() + b"\n")
        connections.append(connection)
    peer = RankProcess(0, _process_of(connections[0]))
    return Link(peer, connections[0]), StepReceiver(connections[1])


def _meeting_point(job: str) -> str:
    return f"\0plait-{os.getuid()}-{job}"


def _connected(job: str, deadline: float, stopped: StoppedRanks) -> socket.socket:
    while True:
        stopped.check()
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(_meeting_point(job))
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise RanksError(f"rank 0 cannot be found: {error}") from error
            time.sleep(_RETRY_S)


def _accepted(
    listening: socket.socket, deadline: float, stopped: StoppedRanks
) -> socket.socket | None:
    """The next connection; None once the time is over, however many strangers knock."""
    while (left_s := deadline - time.monotonic()) > 0:
        stopped.check()
        listening.settimeout(min(left_s, LOOK_S))
        try:
            return listening.accept()[0]
        except TimeoutError:
            continue
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
