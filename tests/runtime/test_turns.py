"""Work on input takes turns with everything else on the loop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runtime.connections import AppInTurns
from runtime.turns import BUDGET_S, Turns

PIECES = 3


class Clock:
    now_s = 100.0

    def thread_time(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("runtime.turns.time", clock)
    return clock


def turns_of(tasks: int, work: Callable[[Turns], Awaitable[None]]) -> list[int]:
    """In which turn of the loop each piece of work of each of the counted `tasks` was done."""
    turn, worked = 0, []

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def one(turns: Turns) -> None:
        for _ in range(PIECES):
            await turns.wait()
            await work(turns)
            worked.append(turn)

    async def main() -> None:
        counting = asyncio.create_task(count_turns())
        turns = Turns()
        await asyncio.gather(*(turns.count(one(turns)) for _ in range(tasks)))
        counting.cancel()

    asyncio.run(asyncio.wait_for(main(), 10))
    assert len(worked) == tasks * PIECES
    return worked


@pytest.mark.parametrize(
    ("work_s", "most_a_turn"),
    [
        pytest.param(BUDGET_S / 10, 11, id="small pieces share a turn"),
        pytest.param(1.01 * BUDGET_S, 1, id="one that takes the budget has a turn of its own"),
    ],
)
def test_a_turn_has_only_so_much_input(clock: Clock, work_s: float, most_a_turn: int) -> None:
    async def work(_: Turns) -> None:
        clock.now_s += work_s

    worked = turns_of(20, work)
    assert max(worked.count(turn) for turn in set(worked)) <= most_a_turn


def test_those_who_wait_take_nothing_of_the_share(clock: Clock) -> None:
    """Each step costs something, looking whether it is one's turn included."""
    began_s = clock.now_s

    def thread_time() -> float:
        clock.now_s += BUDGET_S / 50
        return clock.now_s

    async def work(_: Turns) -> None:
        pass

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock, "thread_time", thread_time)
        turns_of(1000, work)
    assert clock.now_s - began_s < 1000 * PIECES * BUDGET_S / 5


def test_who_leaves_while_waiting_takes_no_turn(clock: Clock) -> None:
    async def main() -> None:
        turns = Turns()

        async def work() -> None:
            await turns.wait()
            clock.now_s += 2 * BUDGET_S

        tasks = [asyncio.create_task(turns.count(work())) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [False, True, False]

    asyncio.run(asyncio.wait_for(main(), 10))


def test_who_came_first_goes_first(clock: Clock) -> None:
    """Also where a piece takes more than those let in with it were told."""
    began: list[int] = []

    async def main() -> None:
        turns = Turns()

        async def work(index: int) -> None:
            await turns.wait()
            began.append(index)
            clock.now_s += 2 * BUDGET_S if index % 8 == 0 else BUDGET_S / 100

        await asyncio.gather(*(turns.count(work(index)) for index in range(40)))

    asyncio.run(asyncio.wait_for(main(), 10))
    assert began == sorted(began)


def test_what_a_piece_took_too_much_later_turns_go_without(clock: Clock) -> None:
    async def work(_: Turns) -> None:
        clock.now_s += 10.5 * BUDGET_S

    worked = turns_of(1, work)
    assert worked[1] - worked[0] >= 10 and worked[2] - worked[1] >= 10


def test_nobody_waits_for_seconds_that_one_piece_took(clock: Clock) -> None:
    async def work(_: Turns) -> None:
        clock.now_s += 1000 * BUDGET_S

    worked = turns_of(1, work)
    assert 5 < worked[1] - worked[0] < 20


def test_what_others_do_meanwhile_is_not_counted(clock: Clock) -> None:
    """A piece that waits for something has not worked all that time."""

    async def work(_: Turns) -> None:
        asyncio.get_running_loop().call_soon(lambda: setattr(clock, "now_s", clock.now_s + 1.0))
        await asyncio.sleep(0)

    worked = turns_of(1, work)
    assert worked[-1] <= worked[0] + PIECES


def test_an_app_works_on_input_until_it_answers(clock: Clock) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        clock.now_s += 10.5 * BUDGET_S
        await asyncio.sleep(0)
        await send({"type": "http.response.start"})
        await asyncio.sleep(0)
        clock.now_s += 1000 * BUDGET_S

    async def main() -> None:
        turns, sent, waited = Turns(), [], 0

        async def send(event: Any) -> None:
            sent.append(event["type"])

        await AppInTurns(app, turns)({}, None, send)  # type: ignore[arg-type]
        assert sent == ["http.response.start"]
        other = asyncio.ensure_future(turns.count(turns.wait()))
        while not other.done():
            await asyncio.sleep(0)
            waited += 1
        assert 5 < waited < 20

    asyncio.run(asyncio.wait_for(main(), 10))


def test_counted_work_is_driven_like_any_other() -> None:
    """Its value, its exception, what it is cancelled with, and what it waits for."""

    async def main() -> None:
        turns, heard = Turns(), []

        async def fails() -> None:
            await asyncio.sleep(0)
            raise KeyError("its own")

        async def waits() -> str:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                heard.append("cancelled")
                await asyncio.sleep(0)  # it may still wait
                raise
            return "never"

        assert await turns.count(asyncio.sleep(0.001, "value")) == "value"
        with pytest.raises(KeyError, match="its own"):
            await turns.count(fails())
        task = asyncio.create_task(turns.count(waits()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert heard == ["cancelled"]

    asyncio.run(asyncio.wait_for(main(), 10))
