"""How a rank learns that another one was stopped by a signal before they have met.

Until then there is no link whose silence could tell. But /proc has all processes of this machine,
and those of a job have what torchrun told them in their environment. Of another machine's ranks it
knows nothing: they are missed when the time to meet is over.
"""

import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from runtime.ranks.links import RanksError
from runtime.ranks.peers import RankProcess, is_stopped
from runtime.ranks.rank import Rank

LOOK_S: Final = 1.0
# Looks, not seconds: Ctrl-Z and fg stop and wake a whole job, one process a moment after the other.
_LOOKS: Final = 3


class StoppedRanks:
    """Looks after some ranks of a job. Owned by the main thread."""

    def __init__(self, place: Rank, ranks: Collection[int]) -> None:
        """
        place  of this process
        ranks  those to look after, of which the ones on other machines cannot be seen
        """
        self._job, self._ranks = place.job, set(ranks) & set(place.near)
        self._looks: dict[int, int] = {}  # by process, that in a row have found it stopped
        self._next_s = time.monotonic() + LOOK_S  # ranks that come as they should look at nothing

    def check(self) -> None:
        """Looks once a second, however often it is called.

        Raises RanksError where a rank stays stopped, and ends that.
        """
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_S
        self._looks = {pid: self._looks.get(pid, 0) + 1 for pid in _stopped_processes()}
        for pid, looks in self._looks.items():
            process = _try_process(pid, self._job) if looks == _LOOKS else None
            if process is not None and process.rank in self._ranks:
                process.kill()
                raise RanksError(f"{process} is stopped by a signal; it was killed")


def _stopped_processes() -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and is_stopped(int(folder.name)):
            yield int(folder.name)


def _try_process(pid: int, job: str) -> RankProcess | None:
    """None for a process that is no rank of the job, has ended, or is another user's."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        place = Rank.of_environment(dict(word.split("=", 1) for word in words if "=" in word))
        process = RankProcess(place.rank, pid)
    except (OSError, ValueError):
        return None
    return process if place.job == job and not place.is_alone else None
