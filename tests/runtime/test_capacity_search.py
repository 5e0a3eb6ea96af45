"""The search for the most users: exact where trials are, and sound where some are wrong."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.capacity.search import Found, Status, search

MOST = 300


@dataclass(frozen=True)
class Trial:
    kept: bool
    is_spoilt: bool = False


class Machine:
    """Keeps its promise to so many users; the trials of `wrong` say the opposite."""

    def __init__(self, carries: int, wrong: frozenset[tuple[int, int]] = frozenset()) -> None:
        self.carries, self.asked = carries, Counter[int]()
        self._wrong = wrong

    def __call__(self, users: int) -> Trial:
        assert 1 <= users <= MOST
        self.asked[users] += 1
        lies = (users, self.asked[users]) in self._wrong
        return Trial((users <= self.carries) != lies)


def check(machine: Machine, found: Found, most: int = MOST) -> None:
    """The boundary lies between what was found, and each side was asked twice."""
    carries = min(machine.carries, most)
    if carries == most:
        assert found == Found(Status.MOST, most, None)
        assert machine.asked[most] >= 2
        return
    assert found.status is (Status.FOUND if carries else Status.NONE)
    assert found.missed_at is not None
    assert found.users <= carries < found.missed_at
    assert found.missed_at - found.users <= max(1, found.users // 20)
    assert machine.asked[found.missed_at] >= 2
    assert not found.users or machine.asked[found.users] >= 2


@given(st.integers(0, 2 * MOST), st.integers(1, MOST), st.integers(1, 2 * MOST))
def test_what_is_measured_well_is_found(carries: int, most: int, first: int) -> None:
    machine = Machine(carries)
    check(machine, search(machine, most, first=first), most)
    assert machine.asked.total() <= 2 * most.bit_length() + 4
    assert max(machine.asked.values()) <= 2


@given(st.integers(0, MOST + 9), st.dictionaries(st.integers(1, MOST), st.integers(1, 3)))
def test_a_trial_of_each_number_may_be_wrong(carries: int, wrong: dict[int, int]) -> None:
    machine = Machine(carries, frozenset(wrong.items()))
    check(machine, search(machine, MOST))
    assert max(machine.asked.values()) <= 3


@given(st.lists(st.booleans(), max_size=3 * MOST))
def test_it_ends_whatever_is_said(said: list[bool]) -> None:
    words = iter(said)
    asked = Counter[int]()

    def measure(users: int) -> Trial:
        asked[users] += 1
        return Trial(next(words, False))

    found = search(measure, MOST)
    assert max(asked.values()) <= 3
    assert found.missed_at is None or found.users < found.missed_at


@pytest.mark.parametrize(
    ("carries", "trials", "found"),
    [
        (100, 0, Found(Status.TIME, 0, None)),
        (100, 4, Found(Status.TIME, 64, None)),
        (5, 5, Found(Status.TIME, 4, 10)),
    ],
)
def test_time_may_run_out(carries: int, trials: int, found: Found) -> None:
    machine = Machine(carries)
    assert search(machine, MOST, lambda: machine.asked.total() >= trials) == found


def test_a_search_may_begin_near_its_end() -> None:
    machine = Machine(100)
    check(machine, search(machine, MOST, first=64))
    assert min(machine.asked) == 64 and machine.asked.total() <= 10


class Late(Machine):
    """Beyond so many users, the client is late: for ever, or as often as is said."""

    def __init__(self, carries: int, keeps_up: int, times: int = MOST) -> None:
        super().__init__(carries)
        self._keeps_up, self._times = keeps_up, times

    def __call__(self, users: int) -> Trial:
        kept = super().__call__(users).kept
        if users <= self._keeps_up or self._times == 0:
            return Trial(kept)
        self._times -= 1
        return Trial(kept=False, is_spoilt=True)


@given(st.integers(0, MOST), st.integers(1, MOST))
def test_what_a_late_client_missed_is_not_the_servers(carries: int, keeps_up: int) -> None:
    machine = Late(carries, keeps_up)
    found = search(machine, MOST)
    assert found.users <= carries and (found.missed_at is None or found.missed_at > carries)
    if found.status is Status.CLIENT:
        assert found.missed_at is None or keeps_up < found.missed_at
        assert max(machine.asked.values()) == 3
    else:
        check(machine, found)


@given(st.integers(0, 2 * MOST), st.integers(1, 2))
def test_a_client_that_is_late_by_chance_changes_nothing(carries: int, times: int) -> None:
    machine = Late(carries, 0, times)
    check(machine, search(machine, MOST))


def test_what_was_kept_by_a_late_client_is_kept() -> None:
    assert search(lambda _: Trial(kept=True, is_spoilt=True), 9) == Found(Status.MOST, 9, None)


def test_a_miss_that_time_cut_short_says_nothing() -> None:
    machine, calls = Machine(1), iter([False, False, False, True])
    assert search(machine, MOST, lambda: next(calls)) == Found(Status.TIME, 1, None)
