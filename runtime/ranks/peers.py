"""Whoever is at the other end of a link: a process of this machine, or one of another.

The kernel tells all about a process of this machine, and ends it. Of one on another there is only
its link: silence is its end, and it ends itself where it finds that its link has (`lease.py`).
"""

import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Final, Protocol

from runtime.ranks.lease import Lease

_STOPPED_S: Final = 3.0
_SILENT_S: Final = 30.0
# All must be over within 10 s; some are spent on telling clients, and on threads that hang.
_DISTANT_SILENT_S: Final = 5.0
_LEASE_S: Final = 6  # whoever is ended by it is given up already


class RankPeer(Protocol):
    """The rank at the other end of a link. Owned by the link's thread."""

    @property
    def rank(self) -> int: ...

    @property
    def fate(self) -> str:
        """What `kill` has done to it, for a message."""
        ...

    def meaning(self, silent_s: float) -> str | None:
        """What a silence of so long says of it; None while it says nothing yet."""
        ...

    def renew(self, seconds: int = _LEASE_S) -> None:
        """Tells the kernel that this process is well, where the peer could not end it."""
        ...

    def kill(self) -> None:
        """Ends it, if it still runs."""
        ...

    def wait_end(self, timeout_s: float) -> bool:
        """True once it has ended."""
        ...


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process; False where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


class RankProcess:
    """A rank of this machine: a `RankPeer`. Safe from any thread: nothing changes."""

    fate = "it was killed"

    def __init__(self, rank: int, pid: int) -> None:
        self.rank, self.pid = rank, pid
        self._fd = os.pidfd_open(pid)  # of this process even when its number is given anew

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def meaning(self, silent_s: float) -> str | None:
        """One that is merely silent may be starved of processor time, and gets longer."""
        if silent_s >= _STOPPED_S and is_stopped(self.pid):
            return "is stopped by a signal"
        return "gives no sign of life" if silent_s >= _SILENT_S else None

    def renew(self, seconds: int = _LEASE_S) -> None:
        """Nothing: the peer would end this process, and need not be promised its end."""

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended already

    def wait_end(self, timeout_s: float) -> bool:
        return bool(select.select([self._fd], [], [], max(0.0, timeout_s))[0])


class DistantRank:
    """A rank of another machine: a `RankPeer`. Owned by the link's thread."""

    fate = "its link was closed"

    def __init__(self, rank: int, connection: socket.socket) -> None:
        """connection  the link's: it is read here only to find its end"""
        self.rank = rank
        self._connection = connection
        self._host = connection.getpeername()[0]
        self._lease: Lease | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} (at {self._host})"

    def meaning(self, silent_s: float) -> str | None:
        if silent_s < _DISTANT_SILENT_S:
            return None
        return "gives no sign of life: it hangs, is stopped, or is cut from the network"

    def renew(self, seconds: int = _LEASE_S) -> None:
        if self._lease is None:
            self._lease = Lease()
        self._lease.renew(seconds)

    def kill(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def wait_end(self, timeout_s: float) -> bool:
        """A process that has ended is one whose kernel has closed its link."""
        deadline = time.monotonic() + timeout_s
        while select.select([self._connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                if not self._connection.recv(1 << 12):
                    return True
            except BlockingIOError:
                pass
            except OSError:
                return True
            if time.monotonic() > deadline:
                break
        return False
