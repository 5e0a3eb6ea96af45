"""How ranks find rank 0, and are let in.

Guarantees
- On one machine the meeting point is a Unix socket in the abstract namespace: no port, no file,
  nothing left. The kernel says whose process is at the other end.
- For ranks of other machines rank 0 listens on one address besides, until all are in; where, and
  the secret that both sides prove, is in its invitation.
- Anybody may knock. Who is no rank is turned away, whatever is said or not said, keeps nobody
  waiting, and the job goes on.
- A rank that a signal has stopped before it came is found, and ends the job: see `stopped.py`.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Final

from runtime.ranks.invitation import SECRET_BYTES, Invitation, Invitations
from runtime.ranks.links import Link, RanksError, StepReceiver, StepSender
from runtime.ranks.network import RANK_HOST, host_of_rank_0
from runtime.ranks.peers import DistantRank, RankProcess
from runtime.ranks.proof import (
    CHALLENGE_BYTES,
    KINDS,
    NO_SECRET,
    PROOF_BYTES,
    NoProof,
    check_answer,
    hello,
)
from runtime.ranks.rank import Rank
from runtime.ranks.reception import Door, Reception, process_of, send_at_once
from runtime.ranks.stopped import LOOK_S, StoppedRanks

_RETRY_S: Final = 0.1
_BACKLOG: Final = 128  # room for strangers besides ranks: who finds none comes again seconds later
_CONNECT_S: Final = 5.0  # where a network swallows what is sent


def await_ranks(place: Rank, timeout_s: float) -> tuple[list[Link], StepSender]:
    """Rank 0's links to all others, in the order of ranks.

    Raises RanksError where one does not come in time, is stopped by a signal, or comes twice.
    """
    deadline, others = time.monotonic() + timeout_s, range(1, place.size)
    stopped = StoppedRanks(place, others)
    links: dict[int, Link] = {}
    steps: dict[int, socket.socket] = {}
    with _doors(place) as doors, closing(Reception(place.size, doors)) as reception:
        while len(links) < len(others) or len(steps) < len(others):
            stopped.check()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                missing = ", ".join(map(str, sorted(set(others) - (set(links) & set(steps)))))
                where = "".join(f" to {door.name}" for door in doors if door.name)
                raise RanksError(f"rank {missing} did not come{where} within {timeout_s:g} s")
            for kind, peer, connection in reception.turn(min(left_s, LOOK_S)):
                if peer.rank in (links if kind == "control" else steps):
                    raise RanksError(f"{peer} is there twice")
                if kind == "control":
                    links[peer.rank] = Link(peer, connection)
                else:
                    steps[peer.rank] = connection
    return [links[rank] for rank in others], StepSender([steps[rank] for rank in others])


def meet_rank_0(place: Rank, timeout_s: float) -> tuple[Link, StepReceiver]:
    """Another rank's links to rank 0.

    Raises RanksError where that does not come in time, or is stopped by a signal.
    """
    deadline = time.monotonic() + timeout_s
    find = _near_rank_0(place) if place.is_near else _distant_rank_0(place)
    meanwhile = StoppedRanks(place, (0,)).check
    control, steps = (_met(find, kind, place.rank, deadline, meanwhile) for kind in KINDS)
    try:
        peer = RankProcess(0, process_of(control)) if place.is_near else DistantRank(0, control)
    except OSError as error:
        raise RanksError(f"rank 0 ended when it had just been met: {error}") from error
    return Link(peer, control), StepReceiver(steps)


# Rank 0's side


@contextmanager
def _doors(place: Rank) -> Iterator[list[Door]]:
    """Those that are open until all ranks are in. Raises RanksError."""
    with socket.socket(socket.AF_UNIX) as near:
        try:
            near.bind(_meeting_point(place))
        except OSError as error:
            raise RanksError(f"another job of this machine has the name {place.job!r}") from error
        near.listen(2 * place.size)
        doors = [Door(near, NO_SECRET)]
        if place.store is None:
            yield doors
            return
        host, secret = host_of_rank_0(place), secrets.token_bytes(SECRET_BYTES)
        invitations = Invitations(place)
        with listen_on(host) as distant:
            port = distant.getsockname()[1]
            invitations.invite(Invitation(host, port, secret))
            yield [*doors, Door(distant, secret, f"{host}:{port}")]
        invitations.withdraw()


def listen_on(host: str) -> socket.socket:
    """A socket on any free port. Raises RanksError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise RanksError(
            f"rank 0 cannot listen on {host} ({error}); {RANK_HOST} names another address"
        ) from error


# The others' side

Find = Callable[[], tuple[socket.socket, bytes]]  # a connection, and the secret to prove there


def _near_rank_0(place: Rank) -> Find:
    def find() -> tuple[socket.socket, bytes]:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(_meeting_point(place))
            process_of(connection)
        except BaseException:
            connection.close()
            raise
        return connection, NO_SECRET

    return find


def _distant_rank_0(place: Rank) -> Find:
    invitations = Invitations(place)

    def find() -> tuple[socket.socket, bytes]:
        invitation = invitations.try_read()
        if invitation is None:
            raise OSError("it has not said where it is")
        address = (invitation.host, invitation.port)
        try:
            connection = socket.create_connection(address, _CONNECT_S)
        except OSError as error:
            where = f"{invitation.host}:{invitation.port}"
            raise OSError(
                f"{where}: {error}; {RANK_HOST} on its machine names another address"
            ) from error
        send_at_once(connection)
        return connection, invitation.secret

    return find


def _met(
    find: Find, kind: str, rank: int, deadline: float, meanwhile: Callable[[], None]
) -> socket.socket:
    """One of the two links, on which both sides have proved who they are."""
    while True:
        meanwhile()
        try:
            connection, secret = find()
            try:
                _introduce(connection, secret, kind, rank, deadline, meanwhile)
                return connection
            except BaseException:
                connection.close()
                raise
        except (OSError, NoProof) as error:  # rank 0 may not be there yet, or be a former one
            if time.monotonic() > deadline:
                raise RanksError(f"rank 0 cannot be found: {error}") from error
            time.sleep(_RETRY_S)


def _introduce(
    connection: socket.socket, secret: bytes, kind: str, rank: int, deadline: float,
    meanwhile: Callable[[], None],
) -> None:  # fmt: skip
    """Raises OSError and NoProof."""
    challenged = _read(connection, CHALLENGE_BYTES, deadline, meanwhile)
    said = hello(secret, challenged, kind, rank)
    connection.sendall(said)
    check_answer(secret, challenged, said, _read(connection, PROOF_BYTES, deadline, meanwhile))
    connection.settimeout(None)


def _read(
    connection: socket.socket, size: int, deadline: float, meanwhile: Callable[[], None]
) -> bytes:
    """So many bytes. Raises OSError where they do not come."""
    read = b""
    while len(read) < size:
        meanwhile()
        left_s = deadline - time.monotonic()
        connection.settimeout(max(0.01, min(left_s, LOOK_S)))
        try:
            part = connection.recv(size - len(read))
        except TimeoutError:
            if left_s <= 0:
                raise
            continue
        if not part:
            raise OSError("it has turned this rank away")
        read += part
    return read


def _meeting_point(place: Rank) -> str:
    return f"\0plait-{os.getuid()}-{place.job}"
