"""Work on input takes turns with everything else on the loop."""

import asyncio

import pytest

from runtime.turns import BUDGET_S, Turns


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    thread_time = monotonic


@pytest.mark.parametrize(
    ("work_s", "most_a_turn"),
    [
        pytest.param(BUDGET_S / 10, 11, id="small pieces share a turn"),
        pytest.param(1.01 * BUDGET_S, 1, id="one that takes the budget has a turn of its own"),
    ],
)
def test_a_turn_has_only_so_much_input(
    monkeypatch: pytest.MonkeyPatch, work_s: float, most_a_turn: int
) -> None:
    clock = Clock()
    monkeypatch.setattr("runtime.turns.time", clock)
    turn, worked = 0, []

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def work(turns: Turns) -> None:
        for _ in range(3):
            await turns.wait()
            clock.now_s += work_s
            worked.append(turn)

    async def main() -> None:
        counting = asyncio.create_task(count_turns())
        turns = Turns()
        await asyncio.gather(*(work(turns) for _ in range(20)))
        counting.cancel()

    asyncio.run(asyncio.wait_for(main(), 10))
    assert len(worked) == 60
    assert max(worked.count(turn) for turn in set(worked)) <= most_a_turn


def test_after_a_long_piece_others_have_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = Clock(), []
    monkeypatch.setattr("runtime.turns.time", clock)
    sleep = asyncio.sleep

    async def sleep_at_once(delay_s: float) -> None:
        if delay_s:
            slept.append(round(delay_s, 6))
            clock.now_s += delay_s
        await sleep(0)

    async def main() -> None:
        monkeypatch.setattr("runtime.turns.asyncio.sleep", sleep_at_once)
        turns = Turns()
        for took_s in (0.02, 0.5, 0.0):
            await turns.wait()
            clock.now_s += took_s
            await sleep(0)
        await turns.wait()

    asyncio.run(asyncio.wait_for(main(), 10))
    assert slept == [0.02, 0.05]
