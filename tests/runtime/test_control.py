"""An admin's commands on their way to the engine thread and back."""

import asyncio
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import pytest

from engine.request import Finish, SamplingParams, TextPrompt
from engine.step_trace import StepRecord
from httpd.service import Job, Rejected
from runtime.control import COMMANDS, ServerControl
from runtime.inbox import LoopInbox
from runtime.lifecycle import Failure
from tests.fakes_engine import CARD, FakeEncoder, FakeGrammars, step_record
from tests.runtime.test_threads import Threads

Result = TypeVar("Result")


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()


def control_of(threads: Threads, keeps_steps: bool = True) -> ServerControl:
    rings = threads.rings.of_control(0)
    return ServerControl(threads.lifecycle, rings, threads.service(), keeps_steps=keeps_steps)


def run(awaited: Awaitable[Result]) -> Result:
    return asyncio.run(asyncio.wait_for(awaited, 10))


def test_a_flush_is_done_by_the_engine_thread(threads: Threads) -> None:
    threads.start_all()
    control = control_of(threads)

    async def flush_again_and_again() -> list[int]:
        at_once = await asyncio.gather(*(control.flush_cache() for _ in range(3 * COMMANDS)))
        return [*at_once, await control.flush_cache()]

    assert run(flush_again_and_again()) == [7] + [0] * (3 * COMMANDS)


def test_steps_come_as_a_line_each(threads: Threads) -> None:
    threads.start_all()
    lines = run(control_of(threads).read_steps(3)).splitlines()
    steps = [StepRecord.of_json(line.decode()) for line in lines]
    assert steps == [step_record(step) for step in (7, 8, 9)]


def test_steps_that_nobody_keeps_are_none_to_be_read(threads: Threads) -> None:
    threads.start_all()
    with pytest.raises(Rejected, match="--trace-steps") as refused:
        run(control_of(threads, keeps_steps=False).read_steps(3))
    assert (refused.value.status, refused.value.code) == (404, "steps_not_traced")


def test_an_answer_goes_to_nobody_but_who_asked_for_it(threads: Threads) -> None:
    """Those who left before it came are answered by nothing, and fill no ring."""
    control = control_of(threads)
    threads.lifecycle.ready(CARD, FakeGrammars(), FakeEncoder())

    async def main() -> tuple[list[str | None], int]:
        codes = []
        for _ in range(COMMANDS + 2):
            asking = asyncio.ensure_future(control.flush_cache())
            await asyncio.sleep(0)
            asking.cancel()
            try:
                await asking
            except Rejected as rejected:
                codes.append(rejected.code)
            except asyncio.CancelledError:
                codes.append(None)
        threads.start_all()
        while True:
            try:
                return codes, await control.flush_cache()
            except Rejected:
                await asyncio.sleep(0.001)

    codes, pages = run(main())
    assert codes == [None] * COMMANDS + ["busy"] * 2
    assert pages == 0  # the first, who left, had them


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_flush_ends_with_the_server(threads: Threads, when: str) -> None:
    control = control_of(threads)
    failure = Failure("engine", "injected")

    async def main() -> None:
        if when == "before":
            with pytest.raises(Rejected) as caught:
                await control.flush_cache()
            assert (caught.value.status, caught.value.code) == (503, "loading")
        threads.lifecycle.ready(CARD, FakeGrammars(), FakeEncoder())
        asking = asyncio.ensure_future(control.flush_cache())
        await asyncio.sleep(0)
        threads.lifecycle.fail(failure)
        with pytest.raises(Rejected) as caught:
            await asking
        assert (caught.value.status, caught.value.code) == (503, "failed")

    run(main())


class Loop:
    """What one HTTP loop has for its admin and others'. Owned by the test's loop."""

    def __init__(self, threads: Threads, index: int) -> None:
        self.service = threads.service(index)
        self.control = ServerControl(
            threads.lifecycle, threads.rings.of_control(index), self.service
        )
        self.inbox = LoopInbox(threads.rings.of_http(index), self._on_items)
        self.inbox.attach(asyncio.get_running_loop())

    def _on_items(self) -> None:
        self.service.take_all()
        self.control.take_all()


@pytest.mark.parametrize("loops", [1, 2, 4])
def test_abort_all_ends_every_request_of_every_loop_and_tells_its_client(loops: int) -> None:
    threads = Threads(loops=loops)
    threads.start_all()

    async def main() -> list[Finish]:
        all_loops = [Loop(threads, index) for index in range(loops)]
        params = (SamplingParams(max_new_tokens=9),)
        routes = [
            (await loop.service.submit(Job(TextPrompt("endless"), params, True)))[0]
            for loop in all_loops
            for _ in range(3)
        ]
        assert await all_loops[-1].control.abort(None) == 3 * loops
        ends = []
        for route in routes:
            async for delta in route:
                last = delta
            ends.append(last.finish)
        assert await all_loops[0].control.abort(None) == 0
        for loop in all_loops:
            loop.inbox.detach()
        return ends

    assert run(main()) == [Finish.ABORT] * 3 * loops
    threads.close()


def test_a_response_is_found_whichever_loop_makes_it() -> None:
    threads = Threads(loops=3)
    threads.start_all()
    ended: list[str] = []

    async def main() -> list[int]:
        loops = [Loop(threads, index) for index in range(3)]
        with loops[2].control.running.entry("cmpl-2", lambda: ended.append("cmpl-2")):
            counts = [await loop.control.abort("cmpl-2") for loop in loops]
        counts.append(await loops[0].control.abort("cmpl-2"))
        for loop in loops:
            loop.inbox.detach()
        return counts

    assert run(main()) == [1, 1, 1, 0]
    assert ended == ["cmpl-2"] * 3
    threads.close()


def test_a_loop_that_has_ended_is_not_waited_for_long(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.control._LOOPS_S", 0.01)
    threads.lifecycle.ready(CARD, FakeGrammars(), FakeEncoder())
    control = control_of(threads)  # nobody takes its commands
    assert run(control.abort(None)) == 0
