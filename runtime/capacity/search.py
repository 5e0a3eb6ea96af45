"""A search for the most users that a server keeps its promise to, with answers that are noisy.

Asks four times as many, again and again, from where the caller thinks best, until a trial misses;
then halves what is between, then asks again at both sides of the boundary. A number of users is
decided by the majority of at most three trials, and the result stands only where both sides were
decided by two trials that agree: one trial that a busy machine spoilt changes nothing. A trial that
says itself that it was spoilt is made again, a few times. Beyond 20 users the two sides may be 5 %
apart.

Assumes that more users never fare better, as the truth beneath the noise. Knows neither servers nor
what the promise is: see measure.py.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

_COARSE: Final = 20  # of so many users, one more is a twentieth
_STEP: Final = 4  # a trial takes long with few users, too: as long as its answers
_SPOILT: Final = 3  # trials of so many users, and more would be spoilt as well


class Status(StrEnum):
    """How a search ended."""

    FOUND = "found"
    NONE = "none"  # missed with a single user
    MOST = "most"  # kept with as many users as may be tried
    TIME = "time"  # it was up: at least so many
    CLIENT = "client"  # with more users the load itself could not keep up: at least so many
    CONTEXT = "context"  # the workload is longer than the server's context
    FAILED = "failed"  # the server answers no request


class Verdict(Protocol):
    """What a trial says."""

    @property
    def kept(self) -> bool: ...

    @property
    def is_spoilt(self) -> bool:
        """Not by the server: what was missed proves nothing."""


@dataclass(frozen=True, slots=True)
class Found:
    """The boundary."""

    status: Status
    users: int  # the most that were kept; 0: none
    missed_at: int | None  # the fewest that were missed


@dataclass(slots=True)
class _Votes:
    """What trials have said about each number of users. Owned by its search."""

    kept: dict[int, int] = field(default_factory=dict)
    missed: dict[int, int] = field(default_factory=dict)

    def add(self, users: int, kept: bool) -> None:
        votes = self.kept if kept else self.missed
        votes[users] = votes.get(users, 0) + 1

    def of(self, users: int) -> int:
        """More than 0: kept; less: missed; two of either are a decision."""
        return self.kept.get(users, 0) - self.missed.get(users, 0)

    def is_settled(self, users: int) -> bool:
        return max(self.kept.get(users, 0), self.missed.get(users, 0)) > 1

    def boundary(self) -> tuple[int, int | None]:
        """The most users that were kept below the fewest that were missed, and those."""
        known = self.kept.keys() | self.missed.keys()
        high = min((users for users in known if self.of(users) < 0), default=None)
        below = (users for users in known if self.of(users) > 0 and (high is None or users < high))
        return max(below, default=0), high

    def tied(self) -> int | None:
        known = self.kept.keys() | self.missed.keys()
        return next((users for users in sorted(known) if self.of(users) == 0), None)


def search(
    measure: Callable[[int], Verdict], most: int, is_time_up: Callable[[], bool] = lambda: False,
    *, first: int = 1,
) -> Found:  # fmt: skip
    """The most users, of 1 to `most`.

    measure     one trial with so many users
    is_time_up  asked before each trial; a trial that was cut short by the time does not count
    first       where it begins
    """
    votes, spoilt = _Votes(), Counter[int]()
    while (users := _next(votes, most, first)) is not None:
        if is_time_up():
            return _at_least(votes, Status.TIME)
        trial = measure(users)
        if is_time_up() and not trial.kept:
            return _at_least(votes, Status.TIME)
        if trial.kept or not trial.is_spoilt:  # a late client makes figures worse, never better
            votes.add(users, trial.kept)
            continue
        spoilt[users] += 1
        if spoilt[users] == _SPOILT:
            return _at_least(votes, Status.CLIENT)
    low, high = votes.boundary()
    if high is None:
        return Found(Status.MOST, low, None)
    return Found(Status.FOUND if low else Status.NONE, low, high)


def _at_least(votes: _Votes, status: Status) -> Found:
    low, high = votes.boundary()
    return Found(status, low, high)


def _next(votes: _Votes, most: int, first: int) -> int | None:
    """How many users the next trial has; None: there is no more to ask."""
    tied = votes.tied()
    if tied is not None:
        return tied
    low, high = votes.boundary()
    if high is None and low < most:
        return min(_STEP * low or first, most)
    if high is not None and high - low > max(1, low // _COARSE):
        return (low + high) // 2
    sides = [users for users in (low, high) if users]
    return next((users for users in sides if not votes.is_settled(users)), None)
