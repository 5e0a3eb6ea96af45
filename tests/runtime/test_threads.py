"""Each thread's loop on its own, then all of them under a storm of clients that come and go."""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.request import (
    ChatPrompt,
    Finish,
    Prompt,
    ReasoningMarkers,
    Request,
    SamplingParams,
    TextPrompt,
    Thinking,
)
from httpd.service import Job, Rejected, State
from runtime.config import ServerConfig
from runtime.detokenizer_thread import DetokenizerLoop
from runtime.engine_thread import EngineLoop
from runtime.inbox import LoopInbox
from runtime.lifecycle import Lifecycle
from runtime.messages import Accepted, Refused, Submission, Verdict
from runtime.monitor import Watchdog
from runtime.queue_limit import QueueCounts, QueueLimit
from runtime.rings import Rings
from runtime.service import ThreadedService
from runtime.tokenizer_pool import TokenizerLoop
from runtime.worker import Pulse, Stopped, Worker
from tests.fakes_engine import (
    CARD,
    FakeEncoder,
    FakeEngine,
    FakeGrammars,
    FakeTextMaker,
    fake_load,
)

LIMIT = 32  # tokens of context in the tokenizer's tests


class Threads:
    """The rings of a server and its threads, but for HTTP and the main one."""

    def __init__(
        self, *, max_running: int = 64, max_queued: int = 64, tokenizers: int = 2, loops: int = 1
    ) -> None:
        config = ServerConfig(
            EngineConfig(Path("fake"), max_running=max_running),
            max_queued=max_queued,
            tokenizer_threads=tokenizers,
            http_loops=loops,
        )
        self.counts = QueueCounts(loops)
        self.lifecycle = Lifecycle()
        self.rings = Rings(config)
        for wakeup in self.rings.wakeups:
            self.lifecycle.subscribe(wakeup)
        self.engine = FakeEngine()
        self.workers: list[Worker] = []
        self.max_requests = config.max_requests

    def start(self, **bodies: Callable[[Pulse], None]) -> None:
        for name, body in bodies.items():
            worker = Worker(name, body, self.lifecycle)
            self.workers.append(worker)
            worker.start()

    def start_all(self) -> None:
        self.lifecycle.ready(CARD, FakeGrammars(), FakeEncoder())
        rings = self.rings
        tokenizers = {
            f"tokenizer-{index}": TokenizerLoop(
                FakeEncoder(), CARD.max_model_len, CARD.vocab_size, rings.of_tokenizer(index)
            ).run
            for index in range(len(rings.tokenizers))
        }
        self.start(
            engine=self.engine_loop().run,
            detokenizer=DetokenizerLoop(FakeTextMaker(), rings.of_detokenizer()).run,
            **tokenizers,
        )

    def service(self, loop: int = 0) -> ThreadedService:
        limit = QueueLimit(self.max_requests, 1 << 20, self.counts, loop)
        return ThreadedService(self.lifecycle, self.rings.of_service(loop), limit)

    def engine_loop(self) -> EngineLoop:
        return EngineLoop(fake_load(self.engine), lambda *_: None, self.rings.of_engine())

    def close(self) -> None:
        """Ends all threads, and proves it."""
        self.lifecycle.stop()
        for worker in self.workers:
            assert worker.join(10), f"{worker.name} did not end"
        for wakeup in self.rings.wakeups:
            wakeup.close()


def request(request_id: int, *prompt: int, tokens: int = 2) -> Request:
    return Request(
        request_id, np.array(prompt, np.int32), SamplingParams(max_new_tokens=tokens), seed=0
    )


# Tokenizer threads


def tokenize(
    prompt: Prompt, tokens: int, *, given: bool = True, seed: int | None = None
) -> tuple[Verdict, Request | None]:
    """What becomes of a prompt in a context of LIMIT tokens."""
    threads = Threads()
    params = SamplingParams(max_new_tokens=tokens, seed=seed)
    submission = Submission((7,), Job(prompt, (params,), given), 0.0)
    threads.rings.submissions[0][0].sender.try_push(submission)
    threads.start(
        tokenizer=TokenizerLoop(FakeEncoder(), LIMIT, 256, threads.rings.of_tokenizer(0)).run
    )
    verdicts = threads.rings.verdicts[0][0].receiver
    while (verdict := verdicts.try_pop()) is None:
        assert threads.lifecycle.failure is None
    threads.close()
    return verdict, threads.rings.requests[0].receiver.try_pop()


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        ("hi", False),
        ("hi<think>", True),
        ("hi<think>\n", True),
        ("hi<think></think>", False),
        ("<think>\n</think>\n", False),
        ("</think>\n<think>", True),
    ],
)
def test_a_budget_for_reasoning_comes_with_the_markers_ids(text: str, opened: bool) -> None:
    threads = Threads()
    markers = ReasoningMarkers("<think>", "</think>")
    params = SamplingParams(max_new_tokens=3, reasoning=markers, thinking_budget=5)
    submission = Submission((7,), Job(TextPrompt(text), (params,), True), 0.0)
    threads.rings.submissions[0][0].sender.try_push(submission)
    threads.start(
        tokenizer=TokenizerLoop(FakeEncoder(), LIMIT, 256, threads.rings.of_tokenizer(0)).run
    )
    while (made := threads.rings.requests[0].receiver.try_pop()) is None:
        assert threads.lifecycle.failure is None
    threads.close()
    assert made.thinking == Thinking(ord("<"), ord(">"), 5)
    assert made.begins_reasoning is opened


@pytest.mark.parametrize("prompt_tokens", [1, LIMIT - 3])
def test_a_prompt_that_fits_goes_to_the_engine(prompt_tokens: int) -> None:
    verdict, made = tokenize(TextPrompt("x" * prompt_tokens), 3)
    assert verdict == Accepted((7,), prompt_tokens)
    assert made is not None and made.id == 7 and made.params.max_new_tokens == 3
    assert made.prompt_ids.tolist() == [ord("x")] * prompt_tokens


@pytest.mark.parametrize(
    ("prompt_tokens", "tokens", "given"),
    [(LIMIT - 2, 3, True), (LIMIT, 1, True), (LIMIT, 3, False), (LIMIT + 1, 3, False)],
)
def test_what_does_not_fit_is_refused(prompt_tokens: int, tokens: int, given: bool) -> None:
    prompt = ChatPrompt(({"role": "user", "content": "x" * prompt_tokens},))
    verdict, made = tokenize(prompt, tokens, given=given)
    assert made is None and isinstance(verdict, Refused)
    assert (verdict.status, verdict.param) == (400, "messages")
    assert verdict.code == "context_length_exceeded"
    assert f"maximum context length is {LIMIT} tokens" in verdict.message
    assert str(prompt_tokens) in verdict.message


@pytest.mark.parametrize(("default", "expected"), [(100, LIMIT - 10), (5, 5)])
def test_a_default_length_is_cut_to_the_context(default: int, expected: int) -> None:
    verdict, made = tokenize(TextPrompt("x" * 10), default, given=False)
    assert isinstance(verdict, Accepted)
    assert made is not None and made.params.max_new_tokens == expected


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_a_seed_is_kept_within_64_bits(seed: int) -> None:
    _, made = tokenize(TextPrompt("x"), 1, seed=seed)
    assert made is not None and made.seed == seed % 2**64


def test_without_a_seed_each_request_draws_its_own() -> None:
    drawn = {made.seed for _, made in (tokenize(TextPrompt("x"), 1) for _ in range(4)) if made}
    assert len(drawn) == 4 and all(0 <= seed < 2**64 for seed in drawn)


# The engine thread


def test_an_abort_never_overtakes_its_submission() -> None:
    """Both are there when the engine thread looks: the abort must find its request."""
    threads = Threads()
    for request_id in range(1, 5):
        threads.rings.requests[request_id % 2].sender.try_push(
            request(request_id, 65, tokens=10**6)
        )
        threads.rings.aborts[0].sender.try_push(request_id)
    threads.start(engine=threads.engine_loop().run)
    ended: set[int] = set()
    while len(ended) < 4:
        assert threads.lifecycle.failure is None
        for output in threads.rings.outputs.receiver.pop_all():
            ended |= set(output.request_ids[output.finishes == Finish.ABORT].tolist())
    threads.close()
    assert threads.engine.running == {} and sorted(threads.engine.aborted) == [1, 2, 3, 4]
    assert threads.engine.closed


def test_a_request_that_the_engine_refuses_gets_an_error() -> None:
    threads = Threads()
    threads.rings.requests[0].sender.try_push(request(3, 255))
    threads.start(engine=threads.engine_loop().run)
    while (output := threads.rings.outputs.receiver.try_pop()) is None:
        assert threads.lifecycle.failure is None
    threads.close()
    assert output.errors == ((3, "it can never fit"),)
    assert output.finishes.tolist() == [Finish.ERROR] and output.token_ids.tolist() == [-1]


def test_the_engine_hears_the_time_now_and_then_while_it_works() -> None:
    threads = Threads()
    begun_s = time.monotonic()
    threads.rings.requests[0].sender.try_push(request(1, 65, tokens=10**9))
    threads.start(engine=threads.engine_loop().run)
    while len(threads.engine.expiries) < 3:
        assert threads.lifecycle.failure is None
        threads.rings.outputs.receiver.pop_all()
    threads.close()
    told = threads.engine.expiries
    assert begun_s <= told[0] <= told[1] - 0.1 <= told[2] - 0.2 <= time.monotonic()


def test_a_slow_detokenizer_holds_the_engine_back_but_not_its_pulse() -> None:
    threads = Threads()
    threads.rings.requests[0].sender.try_push(request(1, 65, tokens=10**9))
    threads.start(engine=threads.engine_loop().run)
    ring = threads.rings.outputs
    last_beat_s = None
    for _ in range(3):  # waiting for room is no hang
        while threads.workers[0].pulse.last_beat_s == last_beat_s or ring.sender.pushed < 256:
            assert threads.lifecycle.failure is None
        last_beat_s = threads.workers[0].pulse.last_beat_s
    assert ring.sender.pushed == 256
    threads.close()
    assert threads.engine.closed and len(ring.receiver.pop_all()) == 256


def test_an_idle_engine_is_checked_and_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads()
    checked = threading.Event()
    monkeypatch.setattr("runtime.engine_thread._TIDY_EVERY_S", 0.0)
    monkeypatch.setattr(threads.engine, "check_integrity", checked.set)
    threads.rings.requests[0].sender.try_push(request(1, 65))
    threads.start(engine=threads.engine_loop().run)
    assert checked.wait(10)
    threads.close()


# The detokenizer thread


def test_a_matched_stop_goes_to_the_engine_and_its_end_to_the_client() -> None:
    threads = Threads()
    threads.start_all()
    threads.rings.requests[0].sender.try_push(request(1, *b"ab$cd", tokens=10**6))
    deltas = []
    while not deltas or deltas[-1].finish is Finish.NONE:
        assert threads.lifecycle.failure is None
        deltas += [
            each for told in threads.rings.deltas[0].receiver.pop_all() for each in told.deltas
        ]
    while not threads.engine.stopped:
        assert threads.lifecycle.failure is None
    threads.close()
    assert "".join(delta.text for delta in deltas) == "ab"
    assert deltas[-1].finish is Finish.STOP
    assert threads.engine.stopped == [1] and threads.engine.running == {}
    assert threads.rings.deltas[0].receiver.pop_all() == []


# Workers and the watch over them


def test_a_body_that_returns_early_is_a_failure() -> None:
    threads = Threads()
    threads.start(engine=lambda _: None)
    assert threads.workers[0].join(10)
    failure = threads.lifecycle.failure
    assert failure is not None and failure.thread == "engine" and "returned" in failure.cause
    assert threads.lifecycle.state is State.FAILED
    threads.close()


def test_stopped_is_no_failure() -> None:
    threads = Threads()

    def body(pulse: Pulse) -> None:
        while not pulse.is_stopping:
            pass
        raise Stopped

    threads.start(engine=body)
    threads.close()
    assert threads.lifecycle.failure is None


def test_the_first_failure_is_the_one_that_counts() -> None:
    threads = Threads()

    def fail(text: str) -> None:
        raise KeyError(text)

    threads.start(first=lambda _: fail("one"))
    assert threads.workers[0].join(10)
    threads.start(second=lambda _: fail("two"))
    assert threads.workers[1].join(10)
    failure = threads.lifecycle.failure
    assert failure is not None and failure.cause == "KeyError: 'one'"
    threads.close()


@pytest.mark.parametrize(
    ("silent_s", "watched", "fails"), [(9.0, True, False), (11.0, True, True), (11.0, False, False)]
)
def test_the_watchdog_takes_a_long_silence_for_a_hang(
    silent_s: float, watched: bool, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    threads = Threads()
    now_s = 1000.0
    watchdog = Watchdog(threads.lifecycle, 10.0, clock=lambda: now_s)
    release = threading.Event()

    def silent(pulse: Pulse) -> None:
        pulse.watched = watched
        pulse.last_beat_s = now_s - silent_s
        release.wait(10)
        raise Stopped

    threads.start(engine=silent)
    while threads.workers[0].pulse.last_beat_s != now_s - silent_s:
        pass
    watchdog.check(threads.workers)
    watchdog.disarm()
    assert (threads.lifecycle.failure is not None) == fails
    assert ("the engine thread hangs: no sign of life" in caplog.text) == fails
    release.set()
    threads.close()


# All together

CLIENTS, ROUNDS = 40, 40


async def client(service: ThreadedService, dice: random.Random, ends: list[str]) -> None:
    """Asks again and again; leaves at any moment, and checks what it reads."""
    for _ in range(ROUNDS):
        text = "".join(dice.choices("abcdef", k=dice.randrange(1, 30)))
        text += "$" * dice.randrange(2)
        tokens = dice.randrange(1, 60)
        patience = dice.randrange(8) if dice.random() < 0.5 else 10**9
        asking = asyncio.ensure_future(ask(service, text, tokens, patience))
        if dice.random() < 0.3:
            for _ in range(dice.randrange(5)):
                await asyncio.sleep(0)
            asking.cancel()
        try:
            ends.append(await asking)
        except asyncio.CancelledError:
            ends.append("cancelled")
        except Rejected as rejected:
            assert rejected.code == "queue_full"
            ends.append("full")
            await asyncio.sleep(0.001)


async def ask(service: ThreadedService, text: str, tokens: int, patience: int) -> str:
    params = SamplingParams(max_new_tokens=tokens)
    (route,) = await service.submit(Job(TextPrompt(text), (params,), True))
    endless = text * 60
    expected = endless[:tokens].split("$")[0]
    got = ""
    try:
        async for delta in route:
            got += delta.text
            assert expected.startswith(got)
            patience -= 1
            if patience < 0:
                return "left"
        assert got == expected
        return delta.finish.name
    finally:
        route.abort()


@pytest.mark.parametrize("loops", [1, 2, 4])
def test_clients_that_come_and_go_leave_nothing_behind(loops: int) -> None:
    """Nor does one loop's request ever get what another's was told."""
    threads = Threads(max_running=20, max_queued=10, loops=loops)
    threads.start_all()
    ends: list[list[str]] = [[] for _ in range(loops)]
    errors: list[BaseException] = []

    async def clients_of(loop: int) -> None:
        service = threads.service(loop)
        inbox = LoopInbox(threads.rings.of_http(loop), service.take_all)
        inbox.attach(asyncio.get_running_loop())
        clients = (
            client(service, random.Random(seed), ends[loop]) for seed in range(loop, CLIENTS, loops)
        )
        await asyncio.gather(*clients)
        assert await service.wait_none_left(10), f"{service.alive} routes are left"
        inbox.detach()

    def run(loop: int) -> None:
        try:
            asyncio.run(asyncio.wait_for(clients_of(loop), 60))
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(loop,)) for loop in range(loops)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(70)
        assert not thread.is_alive()
    assert errors == []
    while threads.engine.running:  # a matched stop may still be on its way
        assert threads.lifecycle.failure is None
    threads.close()
    assert threads.lifecycle.failure is None
    assert threads.counts.requests == threads.counts.tokens == [0] * loops
    assert sum(map(len, ends)) == CLIENTS * ROUNDS
    assert {"STOP", "LENGTH", "left", "cancelled", "full"} <= set().union(*ends)
