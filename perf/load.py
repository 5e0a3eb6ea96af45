"""Load for an OpenAI-compatible server: seeded requests, sent by threads with a loop of their own.

- A request's clock starts before it is sent; where its time was planned, at that time, so that a
  client which lags makes figures worse, never better.
- Tokens are counted by the server's usage. Several may arrive in one event, and several events in
  one read: what arrives together is one arrival.

Knows no statistics.
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from perf.http2 import Http2Transport


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a workload."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    at_s: float | None = None  # after the start; None: as soon as there is room


@dataclass(frozen=True, slots=True)
class Sample:
    """How one request went. Seconds of time.perf_counter."""

    planned: Planned
    sent_s: float
    ended_s: float
    arrivals_s: tuple[float, ...]  # of text
    output_tokens: int  # by usage
    text: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    url: str
    model: str
    http2: bool


def make_plan(
    seed: int,
    requests: int,
    *,
    vocab: int,
    input_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    rate: float | None,
) -> list[Planned]:
    """Random prompts of random lengths.

    input_tokens, output_tokens  smallest and largest, both included
    rate  requests a second, as a Poisson process; None: a closed loop
    """
    rng = random.Random(seed)
    plan, at_s = [], 0.0
    for _ in range(requests):
        prompt = tuple(rng.randrange(vocab) for _ in range(rng.randint(*input_tokens)))
        if rate is not None:
            at_s += rng.expovariate(rate)
        plan.append(Planned(prompt, rng.randint(*output_tokens), None if rate is None else at_s))
    return plan


def new_client(target: Target) -> httpx.AsyncClient:
    """A client without limits of its own; over HTTP/2 all requests share a connection."""
    transport = Http2Transport() if target.http2 else None
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=target.url, transport=transport, limits=limits, timeout=None, verify=False
    )


def body_of(target: Target, planned: Planned, **more: Any) -> dict[str, Any]:
    return {
        "model": target.model, "prompt": list(planned.prompt_ids), "temperature": 0,
        "max_tokens": planned.output_tokens, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip


class _Answer:
    """What has come of one streamed answer. Owned by its load thread."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens = 0
        self._rest = b""

    def feed(self, part: bytes) -> bool:
        """True where `part` brought text. Raises ValueError for an error event."""
        *events, self._rest = (self._rest + part).split(b"\n\n")
        had = len(self.texts)
        for event in events:
            if event.startswith(b"data: {"):
                self._take(json.loads(event[6:]))
        return len(self.texts) > had

    def _take(self, chunk: dict[str, Any]) -> None:
        if chunk.get("error"):
            raise ValueError(chunk["error"].get("message"))
        if chunk.get("usage"):
            self.tokens = chunk["usage"]["completion_tokens"]
        if chunk["choices"] and chunk["choices"][0]["text"]:
            self.texts.append(chunk["choices"][0]["text"])


async def ask(client: httpx.AsyncClient, target: Target, planned: Planned, sent_s: float) -> Sample:
    """Sends one request and reads its answer to the end."""
    answer, arrivals_s, error = _Answer(), [], None
    body = body_of(target, planned)
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code}: {(await response.aread()).decode()}")
            async for part in response.aiter_raw():
                if answer.feed(part):
                    arrivals_s.append(time.perf_counter())
        if answer.tokens != planned.output_tokens:
            raise ValueError(f"{answer.tokens} tokens came; {planned.output_tokens} were asked for")
    except (ValueError, httpx.HTTPError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    ended_s = time.perf_counter()
    text = "".join(answer.texts)
    return Sample(planned, sent_s, ended_s, tuple(arrivals_s), answer.tokens, text, error)


@dataclass
class LoadThread:
    """One thread's part of a plan. Owned by that thread; others may read how long `samples` is."""

    target: Target
    plan: Sequence[Planned]
    concurrency: int | None  # None: each at its planned time
    samples: list[Sample] = field(default_factory=list)
    failure: BaseException | None = None

    def start(self, start_s: float) -> threading.Thread:
        """start_s  time.perf_counter at which the plan begins, the same for all threads"""
        thread = threading.Thread(target=self._run, args=(start_s,), name="load")
        thread.start()
        return thread

    def _run(self, start_s: float) -> None:
        try:
            asyncio.run(self._send_all(start_s))
        except BaseException as failure:  # the main thread raises it
            self.failure = failure

    async def _send_all(self, start_s: float) -> None:
        async with new_client(self.target) as client, asyncio.TaskGroup() as group:
            await asyncio.sleep(start_s - time.perf_counter())
            if self.concurrency is None:
                for planned in self.plan:
                    group.create_task(self._send_at(client, planned, start_s))
                return
            rest = iter(self.plan)
            for _ in range(self.concurrency):
                group.create_task(self._send_one_by_one(client, rest))

    async def _send_at(self, client: httpx.AsyncClient, planned: Planned, start_s: float) -> None:
        assert planned.at_s is not None
        sent_s = start_s + planned.at_s
        await asyncio.sleep(sent_s - time.perf_counter())
        self.samples.append(await ask(client, self.target, planned, sent_s))

    async def _send_one_by_one(self, client: httpx.AsyncClient, rest: Any) -> None:
        for planned in rest:
            sent_s = time.perf_counter()
            self.samples.append(await ask(client, self.target, planned, sent_s))
