"""Whether a load's own threads kept up: told by what they did, not by what the server did."""

import asyncio
import os
import time

import pytest

from client.bench.strain import BUSY_SHARE, LAG_MS, Strain, threads_for, watching, worst


@pytest.mark.parametrize(
    ("users", "processors", "threads"),
    [(1, 16, 1), (32, 16, 1), (33, 16, 2), (128, 16, 4), (512, 16, 8), (512, 2, 1), (9, 1, 1)],
)
def test_threads_follow_users_and_processors(users: int, processors: int, threads: int) -> None:
    assert threads_for(users, processors) == threads


def test_threads_leave_half_of_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    assert threads_for(512) == 2


def test_the_worst_thread_is_told() -> None:
    both = worst([Strain(1, 0.2, 40.0), Strain(1, 0.7, 3.0)])
    assert both == Strain(2, 0.7, 40.0) and not both.is_too_much
    assert str(both) == "2 load threads, busy for 70% of the time, late by 40.0 ms (p99)"
    assert Strain(1, BUSY_SHARE + 0.01, 0.0).is_too_much
    assert Strain(1, 0.0, LAG_MS + 1).is_too_much
    assert worst([]) == Strain(0, 0.0, 0.0)


def strain_of(work_s: float, rest_s: float) -> Strain:
    """Of a thread that works for so long without a pause, and then rests."""

    async def main() -> Strain:
        async with watching() as watch:
            await asyncio.sleep(0)  # the watch looks at its clock
            end_s = time.thread_time() + work_s
            while time.thread_time() < end_s:
                pass
            await asyncio.sleep(rest_s)
            strain = watch.strain()
        assert len(asyncio.all_tasks()) == 1, "nobody watches any more"
        return strain

    return asyncio.run(main())


def test_a_loop_that_is_held_up_is_late() -> None:
    late = strain_of(work_s=0.2, rest_s=0.1)
    assert late.lag_p99_ms > 100 and late.is_too_much and late.busy_share > 0


def test_a_thread_that_rests_is_not_busy() -> None:
    assert strain_of(work_s=0.0, rest_s=0.2).busy_share < 0.5
