"""The service against rings that the test itself empties and fills."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.core import EngineStats
from engine.grammar.spec import Regex
from engine.request import Delta, Finish, SamplingParams, TextPrompt
from httpd.service import Constraint, Job, Occupancy, Rejected, State
from runtime.channel import Channel
from runtime.inbox import Wakeup
from runtime.latest import Latest
from runtime.lifecycle import Failure, Lifecycle
from runtime.messages import Accepted, Refused, StepDeltas, Submission, Verdict
from runtime.queue_limit import QueueCounts, QueueLimit
from runtime.request_ids import request_ids
from runtime.route import Route
from runtime.service import ServiceRings, ThreadedService
from tests.fakes_engine import CARD, FakeEncoder, FakeGrammars
from tests.fakes_executor import FakeGrammar
from tests.timing import check_linear

PARAMS = SamplingParams(max_new_tokens=8)
MAX_QUEUED_TOKENS = 1000


class Bench:
    """A service with both ends of its rings. Owned by the test's loop."""

    def __init__(self, *, max_requests: int = 4, threads: int = 2) -> None:
        self.wakeup = Wakeup()
        self.lifecycle = Lifecycle()
        self.lifecycle.ready(CARD, FakeGrammars(), FakeEncoder())
        pool = range(threads)
        self.submissions = [Channel[Submission](max_requests, self.wakeup) for _ in pool]
        self.verdicts = [Channel[Verdict](8, self.wakeup) for _ in pool]
        self.deltas = Channel[StepDeltas](8, self.wakeup)
        self.aborts = Channel[int](max_requests, self.wakeup)
        self.stats = Latest[EngineStats]()
        rings = ServiceRings(
            request_ids(0, 1),
            tuple(ring.sender for ring in self.submissions),
            tuple(ring.receiver for ring in self.verdicts),
            self.deltas.receiver,
            self.aborts.sender,
            self.stats,
        )
        self.service = ThreadedService(
            self.lifecycle, rings, QueueLimit(max_requests, MAX_QUEUED_TOKENS, QueueCounts(1))
        )

    async def submit(self, text: str = "hi") -> asyncio.Task[Route]:
        """A submission under way."""

        async def one() -> Route:
            (route,) = await self.service.submit(Job(TextPrompt(text), (PARAMS,), True))
            return route

        task = asyncio.create_task(one())
        await asyncio.sleep(0)
        return task

    async def accepted(self) -> Route:
        task = await self.submit()
        self.accept(self.submitted()[-1].ids[0])
        return await task

    def submitted(self) -> list[Submission]:
        return [each for ring in self.submissions for each in ring.receiver.pop_all()]

    def accept(self, request_id: int, *, ring: int = 0) -> None:
        self.verdicts[ring].sender.try_push(Accepted((request_id,), 5))
        self.service.take_all()

    def tell(self, *deltas: Delta) -> None:
        self.deltas.sender.try_push(StepDeltas(deltas))
        self.service.take_all()

    def aborts_sent(self) -> list[int]:
        return self.aborts.receiver.pop_all()


def delta(request_id: int, text: str = "", finish: Finish = Finish.NONE, tokens: int = 1) -> Delta:
    return Delta(request_id, text, (ord(text),) if len(text) == 1 else (), finish, tokens, 0)


def scenario(body: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    """A test on a loop, with a bench that must be empty at the end."""

    def test() -> None:
        async def main() -> None:
            bench = Bench()
            await asyncio.wait_for(body(bench), 10)
            assert bench.service.alive == 0
            assert await bench.service.wait_none_left(0)
            bench.wakeup.close()

        asyncio.run(main(), debug=True)

    test.__doc__ = body.__doc__
    return test


async def collect(route: Route) -> list[Delta]:
    return [each async for each in route]


@scenario
async def test_a_request_from_submission_to_finish(bench: Bench) -> None:
    task = await bench.submit("hello")
    (submission,) = bench.submitted()
    assert submission.job == Job(TextPrompt("hello"), (PARAMS,), True)
    assert not task.done()
    bench.accept(submission.ids[0])
    route = await task
    assert route.prompt_tokens == 5
    reading = asyncio.create_task(collect(route))
    await asyncio.sleep(0)
    bench.tell(delta(route.id, "a"))
    for _ in range(3):
        await asyncio.sleep(0)
    bench.tell(delta(route.id, "b", Finish.STOP, 2))
    assert [each.text for each in await reading] == ["a", "b"]
    route.abort()
    assert bench.aborts_sent() == []


@scenario
async def test_deltas_that_piled_up_come_as_one(bench: Bench) -> None:
    route = await bench.accepted()
    text = "abcdefgh" * 40
    for tokens, char in enumerate(text, 1):
        bench.tell(delta(route.id, char, tokens=tokens))
    bench.tell(delta(route.id, "", Finish.LENGTH, len(text)))
    (merged,) = await collect(route)
    assert merged.text == text and bytes(merged.token_ids).decode() == text
    assert merged.finish is Finish.LENGTH and merged.completion_tokens == len(text)


@scenario
async def test_piling_up_takes_linear_time(bench: Bench) -> None:
    """A client that reads nothing makes nobody's loop slow."""

    def seconds(count: int) -> float:
        route = Route(1, lambda _: None)
        some = [delta(1, "w", tokens=tokens) for tokens in range(1, count + 1)]
        begun = time.thread_time()
        for each in some:
            route.add(each)
        return time.thread_time() - begun

    check_linear(seconds, 16_000)


@scenario
async def test_reasoning_piles_up_beside_text(bench: Bench) -> None:
    route = await bench.accepted()
    for tokens, char in enumerate("abcd" * 40, 1):
        thought = replace(delta(route.id, tokens=tokens), reasoning=char, reasoning_tokens=tokens)
        bench.tell(thought)
    bench.tell(replace(delta(route.id, "x", Finish.STOP, 161), reasoning_tokens=160))
    (merged,) = await collect(route)
    assert (merged.reasoning, merged.text) == ("abcd" * 40, "x")
    assert (merged.reasoning_tokens, merged.completion_tokens) == (160, 161)


@scenario
async def test_all_deltas_before_the_verdict(bench: Bench) -> None:
    """They take another way, and may be faster."""
    task = await bench.submit()
    (submission,) = bench.submitted()
    bench.tell(delta(submission.ids[0], "x"), delta(submission.ids[0], "y", Finish.STOP, 2))
    assert bench.service.alive == 1 and not task.done()
    bench.accept(submission.ids[0])
    assert [each.text for each in await collect(await task)] == ["xy"]


@scenario
async def test_a_refusal_is_raised_and_ends_the_route(bench: Bench) -> None:
    task = await bench.submit()
    (submission,) = bench.submitted()
    refused = Refused(submission.ids, 400, "too long", "messages", "context_length_exceeded")
    bench.verdicts[1].sender.try_push(refused)
    bench.service.take_all()
    with pytest.raises(Rejected) as raised:
        await task
    told = raised.value
    assert (told.status, told.message, told.param, told.code) == (
        400, "too long", "messages", "context_length_exceeded",
    )  # fmt: skip


@scenario
async def test_a_client_that_leaves_while_the_verdict_is_open(bench: Bench) -> None:
    task = await bench.submit()
    (submission,) = bench.submitted()
    task.cancel()
    await asyncio.wait([task])
    assert bench.aborts_sent() == [] and bench.service.alive == 1
    bench.accept(submission.ids[0])
    assert bench.aborts_sent() == [submission.ids[0]]
    bench.tell(delta(submission.ids[0], finish=Finish.ABORT))


@scenario
async def test_a_client_that_leaves_and_a_refusal(bench: Bench) -> None:
    task = await bench.submit()
    (submission,) = bench.submitted()
    task.cancel()
    await asyncio.wait([task])
    bench.verdicts[0].sender.try_push(Refused(submission.ids, 400, "no"))
    bench.service.take_all()
    assert bench.aborts_sent() == []


@scenario
async def test_a_client_that_leaves_in_the_moment_of_acceptance(bench: Bench) -> None:
    task = await bench.submit()
    (submission,) = bench.submitted()
    bench.accept(submission.ids[0])  # the task has not run since
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and bench.aborts_sent() == [submission.ids[0]]
    bench.tell(delta(submission.ids[0], finish=Finish.ABORT))


@scenario
async def test_abort_is_sent_once_and_what_comes_later_is_dropped(bench: Bench) -> None:
    route = await bench.accepted()
    bench.tell(delta(route.id, "a"))
    route.abort()
    route.abort()
    assert bench.aborts_sent() == [route.id]
    bench.tell(delta(route.id, "b"))
    assert bench.service.alive == 1, "it counts until the engine has let go of it"
    bench.tell(delta(route.id, finish=Finish.ABORT))


@scenario
async def test_an_abort_crosses_the_last_delta(bench: Bench) -> None:
    route = await bench.accepted()
    bench.tell(delta(route.id, "a", Finish.STOP))
    route.abort()
    assert bench.aborts_sent() == []
    bench.tell(delta(route.id, finish=Finish.ABORT))  # nobody's any more


@scenario
async def test_occupancy_is_what_the_engine_told_last(bench: Bench) -> None:
    assert bench.service.occupancy() is None
    bench.stats.value = EngineStats(
        running=2, waiting=1, free_pages=10, cached_pages=9, evictable_pages=5, total_pages=20,
        page_size=16, steps=7, retractions=0, host_s=0.0,
    )  # fmt: skip
    assert bench.service.occupancy() == Occupancy(0, 2, 1, 15, 20)
    route = await bench.accepted()
    assert bench.service.occupancy() == Occupancy(1, 2, 1, 15, 20)
    bench.tell(delta(route.id, "x", Finish.STOP))


@scenario
async def test_the_limit_counts_everything_alive(bench: Bench) -> None:
    routes = [await bench.accepted() for _ in range(3)]
    waiting = await bench.submit()
    routes[0].abort()
    with pytest.raises(Rejected) as raised:
        await (await bench.submit())
    assert (raised.value.status, raised.value.code, raised.value.retry_after_s) == (
        503, "queue_full", 1,
    )  # fmt: skip
    bench.tell(delta(routes[0].id, finish=Finish.ABORT))
    again = await bench.submit()
    assert bench.aborts_sent() == [routes[0].id]
    for task in (waiting, again):
        task.cancel()
    await asyncio.wait([waiting, again])
    for submission in bench.submitted():
        bench.accept(submission.ids[0])
    aborted = bench.aborts_sent()
    assert len(aborted) == 2
    for request_id in [*aborted, *(route.id for route in routes[1:])]:
        bench.tell(delta(request_id, finish=Finish.ABORT))


@scenario
async def test_submissions_go_to_the_thread_with_the_fewest(bench: Bench) -> None:
    tasks = [await bench.submit() for _ in range(4)]
    queues = [ring.receiver.pop_all() for ring in bench.submissions]
    assert [len(queue) for queue in queues] == [2, 2]
    for submission in queues[0]:
        bench.accept(submission.ids[0], ring=0)
        bench.tell(delta(submission.ids[0], finish=Finish.STOP))
    tasks += [await bench.submit() for _ in range(2)]
    assert [len(ring.receiver.pop_all()) for ring in bench.submissions] == [2, 0]
    bench.service.fail_all()
    await asyncio.wait(tasks)
    assert [task.exception() is None for task in tasks].count(True) == 2


@pytest.mark.parametrize("state", [State.LOADING, State.DRAINING, State.FAILED])
def test_only_a_ready_server_takes_requests(state: State) -> None:
    async def main() -> None:
        bench = Bench()
        if state is State.LOADING:
            bench.service._lifecycle = Lifecycle()
        if state is State.DRAINING:
            bench.lifecycle.drain()
        if state is State.FAILED:
            bench.lifecycle.fail(Failure("engine", "a test"))
        with pytest.raises(Rejected) as raised:
            await (await bench.submit())
        assert (raised.value.status, raised.value.code) == (503, state.value)
        assert bench.submitted() == [] and bench.service.state() is state
        bench.wakeup.close()

    asyncio.run(main())


@scenario
async def test_draining_in_time(bench: Bench) -> None:
    route = await bench.accepted()
    waiting = asyncio.create_task(bench.service.wait_none_left(10))
    await asyncio.sleep(0)
    assert not waiting.done()
    bench.tell(delta(route.id, "a", Finish.STOP))
    assert await waiting


@scenario
async def test_abort_all_tells_clients_and_waits_for_verdicts(bench: Bench) -> None:
    route, pending = await bench.accepted(), await bench.submit()
    (submission,) = bench.submitted()
    assert not await bench.service.wait_none_left(0.001)
    bench.service.abort_all()
    bench.service.abort_all()
    assert bench.aborts_sent() == [route.id]
    bench.tell(delta(route.id, finish=Finish.ABORT))
    assert (await collect(route))[-1].finish is Finish.ABORT
    bench.accept(submission.ids[0])
    assert bench.aborts_sent() == [submission.ids[0]]
    bench.tell(delta(submission.ids[0], finish=Finish.ABORT))
    assert (await collect(await pending))[-1].finish is Finish.ABORT


@scenario
async def test_an_end_at_the_servers_wish_is_told(bench: Bench) -> None:
    route = await bench.accepted()
    route.end()
    route.end()
    assert bench.aborts_sent() == [route.id]
    bench.tell(delta(route.id, finish=Finish.ABORT))
    assert (await collect(route))[-1].finish is Finish.ABORT
    route.end()
    assert bench.aborts_sent() == []


@scenario
async def test_fail_all_ends_every_route_without_other_threads(bench: Bench) -> None:
    route, pending = await bench.accepted(), await bench.submit()
    reading = asyncio.create_task(collect(route))
    await asyncio.sleep(0)
    bench.tell(delta(route.id, "a"))
    bench.service.fail_all()
    assert (await reading)[-1].finish is Finish.ERROR
    with pytest.raises(Rejected) as raised:
        await pending
    assert raised.value.status == 503
    for submission in bench.submitted():
        bench.accept(submission.ids[0])  # late, and for nobody


def test_a_delta_for_nobody_is_dropped() -> None:
    async def main() -> Any:
        bench = Bench()
        bench.tell(delta(99, "a", Finish.STOP))
        bench.wakeup.close()
        return bench.service.alive

    assert asyncio.run(main()) == 0


@scenario
async def test_several_generations_of_one_prompt(bench: Bench) -> None:
    """One submission, one verdict, and each route for itself from there on."""
    task = asyncio.ensure_future(
        bench.service.submit(Job(TextPrompt("hi"), (PARAMS, PARAMS, PARAMS), True))
    )
    await asyncio.sleep(0)
    (submission,) = bench.submitted()
    assert len(set(submission.ids)) == len(submission.job.params) == 3
    bench.verdicts[0].sender.try_push(Accepted(submission.ids, 5))
    bench.service.take_all()
    first, second, third = await task
    assert [route.prompt_tokens for route in (first, second, third)] == [5, 5, 5]
    second.abort()
    assert bench.aborts_sent() == [second.id]
    bench.tell(delta(second.id, finish=Finish.ABORT))
    bench.tell(delta(first.id, "a", Finish.STOP), delta(third.id, "b", Finish.STOP))
    assert [[one.text for one in await collect(route)] for route in (first, third)] == [
        ["a"],
        ["b"],
    ]


@scenario
async def test_several_generations_are_refused_or_left_together(bench: Bench) -> None:
    def ask() -> "asyncio.Future[Sequence[Route]]":
        asked = bench.service.submit(Job(TextPrompt("hi"), (PARAMS, PARAMS), True))
        return asyncio.ensure_future(asked)

    refused, left = ask(), ask()
    await asyncio.sleep(0)
    one, two = bench.submitted()
    bench.verdicts[0].sender.try_push(Refused(one.ids, 400, "no"))
    left.cancel()
    bench.service.take_all()
    with pytest.raises(Rejected, match="no"):
        await refused
    with pytest.raises(asyncio.CancelledError):
        await left
    bench.verdicts[0].sender.try_push(Accepted(two.ids, 5))
    bench.service.take_all()
    assert bench.aborts_sent() == list(two.ids)
    bench.tell(*(delta(each, finish=Finish.ABORT) for each in two.ids))


@scenario
async def test_more_generations_than_there_is_room_for_are_refused_whole(bench: Bench) -> None:
    with pytest.raises(Rejected, match="limit"):
        await bench.service.submit(Job(TextPrompt("x"), (PARAMS,) * 1000, True))
    assert bench.submitted() == []


@pytest.mark.parametrize(
    ("pattern", "status", "param"), [("odd", 400, "response_format"), ("busy", 503, None)]
)
def test_a_grammar_that_cannot_be_used_is_refused(
    pattern: str, status: int, param: str | None
) -> None:
    @scenario
    async def body(bench: Bench) -> None:
        constraint = Constraint(Regex(pattern), "response_format")
        with pytest.raises(Rejected) as refusal:
            await bench.service.submit(Job(TextPrompt("hi"), (PARAMS,), True, constraint))
        assert (refusal.value.status, refusal.value.param) == (status, param)
        assert bench.submitted() == []

    body()


@scenario
async def test_a_compiled_grammar_goes_along(bench: Bench) -> None:
    constraint = Constraint(Regex("known"), "response_format")
    asked = bench.service.submit(Job(TextPrompt("hi"), (PARAMS,), True, constraint))
    task = asyncio.ensure_future(asked)
    while not (submissions := bench.submitted()):
        await asyncio.sleep(0.001)
    assert submissions[0].grammar == FakeGrammar(3)
    bench.accept(submissions[0].ids[0])
    (route,) = await task
    bench.tell(delta(route.id, "x", Finish.STOP))


@scenario
async def test_prompts_that_wait_are_bounded_by_their_tokens(bench: Bench) -> None:
    """Guessed before they are tokenized; with their first token they wait no more."""
    first = await bench.submit("x" * 3000)
    (submission,) = bench.submitted()
    with pytest.raises(Rejected, match="over the limit of 1000") as refusal:
        await (await bench.submit("x" * 3000))
    assert (refusal.value.status, refusal.value.retry_after_s) == (503, 1)
    second = await bench.submit("x" * 400)
    bench.accept(submission.ids[0])
    route = await first
    bench.tell(delta(route.id, "a"))
    third = await bench.submit("x" * 3000)
    bench.tell(delta(route.id, "", Finish.STOP))
    for waiting in bench.submitted():
        bench.accept(waiting.ids[0])
    for task in (second, third):
        bench.tell(delta((await task).id, "b", Finish.STOP))
