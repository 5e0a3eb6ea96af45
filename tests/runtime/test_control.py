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
from runtime.queue_limit import QueueLimit
from runtime.service import ThreadedService
from tests.fakes_engine import CARD, FakeEncoder, FakeGrammars, step_record
from tests.runtime.test_threads import Threads

Result = TypeVar("Result")


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()


def control_of(threads: Threads) -> ServerControl:
    service = ThreadedService(
        threads.lifecycle, threads.rings.of_service(), QueueLimit(threads.max_requests, 1 << 20)
    )
    return ServerControl(threads.lifecycle, threads.rings.of_control(), service)


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


def test_abort_all_ends_every_request_and_tells_its_client(threads: Threads) -> None:
    threads.start_all()

    async def main() -> list[Finish]:
        service = ThreadedService(
            threads.lifecycle, threads.rings.of_service(), QueueLimit(threads.max_requests, 1 << 20)
        )
        control = ServerControl(threads.lifecycle, threads.rings.of_control(), service)
        inbox = LoopInbox(threads.rings.of_http(), service.take_all)
        inbox.attach(asyncio.get_running_loop())
        params = (SamplingParams(max_new_tokens=9),)
        routes = [
            (await service.submit(Job(TextPrompt("endless"), params, True)))[0] for _ in range(3)
        ]
        assert control.abort_all() == 3
        ends = []
        for route in routes:
            async for delta in route:
                last = delta
            ends.append(last.finish)
        assert control.abort_all() == 0
        inbox.detach()
        return ends

    assert run(main()) == [Finish.ABORT] * 3
