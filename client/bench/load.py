"""Sends a workload, by threads with a loop of their own, and times what comes.

- A request's clock starts before it is sent; where its time was planned, at that time, so that a
  client which lags makes figures worse, never better.
- Tokens are counted by the server's usage. Several may arrive in one event, and several events in
  one read: what arrives together is one arrival.
- An answer that is not what was asked for is an error of its request, never a figure.

Knows no statistics.
"""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from client.bench.strain import Strain, watching
from client.bench.workload import CountTokens, History, Sampling, Session, Turn
from client.events import EventReader, StreamError, text_of
from client.target import Target, new_client


@dataclass(frozen=True, slots=True)
class Sample:
    """How one request went. Seconds of time.perf_counter."""

    sent_s: float
    ended_s: float
    arrivals_s: tuple[float, ...] = ()  # of text
    prompt_tokens: int = 0  # by usage, as the next two
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    finish: str | None = None
    error: str | None = None


class WrongAnswer(Exception):
    """An answer of status 200 that is not what was asked for."""


class _Answer:
    """What has come of one streamed answer. Owned by its load thread."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.arrivals_s: list[float] = []
        self.finish: str | None = None
        self.usage: dict[str, Any] = {}
        self._events = EventReader()

    def feed(self, part: bytes) -> None:
        had = len(self.texts)
        for chunk in self._events.feed(part):
            self.usage = chunk.get("usage") or self.usage
            if text := text_of(chunk):
                self.texts.append(text)
            for choice in chunk.get("choices") or ():
                self.finish = choice.get("finish_reason") or self.finish
        if len(self.texts) > had:
            self.arrivals_s.append(time.perf_counter())

    def check(self, turn: Turn, sampling: Sampling, count: CountTokens | None) -> None:
        """Raises WrongAnswer for an answer that is cut, or of another length than asked for."""
        if self.finish is None:
            raise WrongAnswer("the stream ended without a finish_reason")
        if not self.usage and count is not None:
            self.usage = {"completion_tokens": count("".join(self.texts))}
        made = self.usage.get("completion_tokens")
        if made is None:
            raise WrongAnswer("the server sent no usage: --tokenizer counts tokens instead")
        if sampling.ignore_eos and made != turn.output_tokens:
            raise WrongAnswer(f"{made} tokens came; {turn.output_tokens} were asked for")
        if made > turn.output_tokens:
            raise WrongAnswer(f"{made} tokens came; at most {turn.output_tokens} were asked for")

    def sample(self, sent_s: float, error: str | None) -> Sample:
        details = self.usage.get("prompt_tokens_details") or {}
        return Sample(
            sent_s, time.perf_counter(), tuple(self.arrivals_s),
            self.usage.get("prompt_tokens", 0), self.usage.get("completion_tokens", 0),
            details.get("cached_tokens") or 0, "".join(self.texts), self.finish, error,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asking:
    """How requests are made, the same for all of a load."""

    target: Target
    sampling: Sampling
    count: CountTokens | None = None  # of a text, where the server sends no usage
    timeout_s: float | None = None  # for one whole answer
    until_s: float | None = None  # time.perf_counter() after which no answer is waited for

    async def ask(
        self, client: httpx.AsyncClient, history: History, turn: Turn, sent_s: float
    ) -> Sample:
        """Sends one request and reads its answer to the end."""
        answer, error = _Answer(), None
        path, body = history.ask(turn)
        try:
            async with asyncio.timeout(self._wait_s()):
                await self._read(client, path, body, answer)
            answer.check(turn, self.sampling, self.count)
        except (WrongAnswer, StreamError, TimeoutError, httpx.HTTPError) as failure:
            error = f"{type(failure).__name__}: {failure}".removeprefix("WrongAnswer: ")
        return answer.sample(sent_s, error)

    def _wait_s(self) -> float | None:
        left_s = None if self.until_s is None else self.until_s - time.perf_counter()
        return min((s for s in (self.timeout_s, left_s) if s is not None), default=None)

    async def _read(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any], answer: _Answer
    ) -> None:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")
                raise WrongAnswer(f"{response.status_code}: {said[:300]}")
            async for part in response.aiter_raw():
                answer.feed(part)


@dataclass
class LoadThread:
    """One thread's part of a load. Owned by that thread; others may read how long `samples` is."""

    asking: Asking
    sessions: Sequence[Session]
    concurrency: int | None  # sessions at a time; None: each at its planned time
    ramp_up_s: float = 0.0  # until all of `concurrency` have begun
    samples: list[Sample] = field(default_factory=list)
    strain: Strain | None = None  # once all has been sent and answered
    failure: BaseException | None = None

    def start(self, start_s: float) -> threading.Thread:
        """start_s  time.perf_counter at which the load begins, the same for all threads"""
        thread = threading.Thread(target=self._run, args=(start_s,), name="load")
        thread.start()
        return thread

    def _run(self, start_s: float) -> None:
        try:
            asyncio.run(self._send_all(start_s))
        except BaseException as failure:  # the main thread raises it
            self.failure = failure

    async def _send_all(self, start_s: float) -> None:
        await asyncio.sleep(start_s - time.perf_counter())
        async with watching() as watch:
            await self._send_sessions(start_s)
            self.strain = watch.strain()

    async def _send_sessions(self, start_s: float) -> None:
        async with new_client(self.asking.target) as client, asyncio.TaskGroup() as group:
            if self.concurrency is None:
                for session in self.sessions:
                    group.create_task(self._send_at(client, session, start_s))
                return
            rest = iter(self.sessions)
            for index in range(self.concurrency):
                delay_s = self.ramp_up_s * index / self.concurrency
                group.create_task(self._send_one_by_one(client, rest, delay_s))

    async def _send_at(self, client: httpx.AsyncClient, session: Session, start_s: float) -> None:
        assert session.at_s is not None
        sent_s = start_s + session.at_s
        await asyncio.sleep(sent_s - time.perf_counter())
        await self._send(client, session, sent_s)

    async def _send_one_by_one(
        self, client: httpx.AsyncClient, rest: Iterator[Session], delay_s: float
    ) -> None:
        await asyncio.sleep(delay_s)
        for session in rest:
            await self._send(client, session, time.perf_counter())

    async def _send(self, client: httpx.AsyncClient, session: Session, sent_s: float) -> None:
        """All turns of a session; a turn that fails ends it, and the rest fail with it."""
        history = History(session, self.asking.sampling, self.asking.target.model)
        for index, turn in enumerate(session.turns):
            if turn.pause_s or index:
                await asyncio.sleep(turn.pause_s)
                sent_s = time.perf_counter()
            sample = await self.asking.ask(client, history, turn, sent_s)
            self.samples.append(sample)
            if sample.error is not None:
                skipped = len(session.turns) - index - 1
                lost = Sample(sent_s, sample.ended_s, error="not sent: a turn before it failed")
                self.samples.extend([lost] * skipped)
                return
            history.take(sample.text)
