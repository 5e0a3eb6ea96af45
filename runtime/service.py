"""What the HTTP routes ask for, answered over the rings to the other threads.

Rules
- A route exists before its request is sent on, and until its request is over: refused, or accepted
  and finished. The routes alive are thus all requests anywhere in the server, and the queue limit
  bounds them, every buffer that holds one entry a request, and the memory of them all.
- An abort is sent once, and only after the acceptance was seen (see engine_thread.py).

Knows no sockets, and no HTTP beyond what `Rejected` carries.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.core import EngineStats
from engine.errors import PromptError
from engine.grammar.spec import GrammarError
from engine.request import CompiledGrammar, Delta, Finish, Prompt
from httpd.service import Constraint, Job, ModelCard, Occupancy, Rejected, State
from httpd.traces import current_trace
from runtime.channel import Receiver, Sender
from runtime.gil import is_gil_enabled
from runtime.grammar_jobs import THREADS, GrammarJobs
from runtime.latest import Latest
from runtime.lifecycle import Codec, Lifecycle
from runtime.messages import Accepted, StepDeltas, Submission, Verdict
from runtime.queue_limit import Place, QueueLimit, guessed_tokens
from runtime.request_log import RequestLog
from runtime.route import Route
from runtime.text_jobs import MAX_JOBS, TextJobs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceRings:
    """One HTTP loop's ends. A sender always has room: see rings.py."""

    ids: Iterator[int]  # of this loop's requests
    submissions: tuple[Sender[Submission], ...]  # one for each tokenizer thread
    verdicts: tuple[Receiver[Verdict], ...]  # likewise
    deltas: Receiver[StepDeltas]
    aborts: Sender[int]
    stats: Latest[EngineStats]


class ThreadedService:
    """`httpd.service.Service` over threads. Owned by its HTTP loop."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        rings: ServiceRings,
        limit: QueueLimit,
        requests: RequestLog | None = None,
        *,
        loops: int = 1,
    ) -> None:
        """
        requests  is told of each one
        loops     in the server, of which this is one's
        """
        self._lifecycle = lifecycle
        self._rings = rings
        self._limit = limit
        self._routes: dict[int, Route] = {}
        self._requests = requests or RequestLog()
        self._places: dict[int, Place] = {}  # of each route, in what the limit bounds
        self._encoding = [0] * len(rings.submissions)  # submissions at each tokenizer thread
        self._text_jobs = TextJobs(max(1, MAX_JOBS // loops))
        self._grammar_jobs = GrammarJobs(max(1, THREADS // loops))
        self._none_left = asyncio.Event()
        self._none_left.set()

    # httpd.service.Service

    def state(self) -> State:
        return self._lifecycle.state

    def gil_enabled(self) -> bool:
        return is_gil_enabled()

    def model(self) -> ModelCard:
        card = self._lifecycle.card
        assert card is not None, "the model is known once the server is ready"
        return card

    def occupancy(self) -> Occupancy | None:
        stats = self._rings.stats.value
        if stats is None:
            return None
        return Occupancy(
            requests=self._limit.requests,
            running=stats.running,
            waiting=stats.waiting,
            available_pages=stats.free_pages + stats.evictable_pages,
            total_pages=stats.total_pages,
            host_cached_pages=stats.host.cached,
            host_total_pages=stats.host.capacity,
        )

    async def submit(self, job: Job) -> tuple[Route, ...]:
        grammar = None if job.constraint is None else await self._compile(job.constraint)
        routes = self._open(job.prompt, len(job.params))
        ids = tuple(route.id for route in routes)
        now_s = time.monotonic()
        self._requests.open(ids, job.params, current_trace(), now_s)
        submission = Submission(ids, job, now_s, grammar)
        shortest = min(range(len(self._encoding)), key=self._encoding.__getitem__)
        self._encoding[shortest] += 1
        self._send(self._rings.submissions[shortest], submission)
        try:
            await routes[0].wait_verdict()  # which is that of all
        except asyncio.CancelledError:
            for route in routes:
                route.abort()
            raise
        return routes

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        try:
            ids = await self._text_jobs.run(self._codec.encode_prompt, prompt)
        except PromptError as error:
            raise Rejected(400, error.message, param=error.param, code="invalid_prompt") from None
        return tuple(ids.tolist())

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        decode = partial(self._codec.decode, skip_special_tokens=False)
        return await self._text_jobs.run(decode, token_ids)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return await self._text_jobs.run(self._codec.token_texts, token_ids)

    @property
    def _codec(self) -> Codec:
        codec = self._lifecycle.codec
        assert codec is not None, "text is encoded once the server is ready"
        return codec

    async def _compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises `Rejected`."""
        compiler = self._lifecycle.grammars
        assert compiler is not None, "grammars are compiled once the server is ready"
        try:
            return await self._grammar_jobs.compile(compiler, constraint.spec)
        except GrammarError as error:
            if error.transient:
                raise Rejected(503, error.message, code="busy", retry_after_s=1) from None
            raise Rejected(
                400, f"Invalid '{constraint.param}': {error.message}.",
                param=constraint.param, code="invalid_grammar",
            ) from None  # fmt: skip

    def _open(self, prompt: Prompt, count: int) -> tuple[Route, ...]:
        state = self._lifecycle.state
        if state is not State.READY:
            message = f"The server is {state.value}; it does not take requests now."
            raise Rejected(503, message, code=state.value)
        place = self._limit.admit(guessed_tokens(prompt), count)
        routes = tuple(Route(next(self._rings.ids), self._abort) for _ in range(count))
        self._routes.update((route.id, route) for route in routes)
        self._places.update((route.id, place) for route in routes)
        self._none_left.clear()
        return routes

    # What comes from the other threads

    def take_all(self) -> None:
        """Empties the rings into the routes."""
        for index, ring in enumerate(self._rings.verdicts):
            verdicts = ring.pop_all()
            self._encoding[index] -= len(verdicts)
            for verdict in verdicts:
                self._on_verdict(verdict)
        for step in self._rings.deltas.pop_all():
            for started in step.started:
                self._requests.start(started)
            self._requests.take(step.deltas, step.made_s, time.monotonic())
            for delta in step.deltas:
                self._on_delta(delta)

    def _on_verdict(self, verdict: Verdict) -> None:
        for request_id in verdict.ids:
            route = self._routes.get(request_id)
            if route is None:
                continue  # it ended with the server: see fail_all
            if isinstance(verdict, Accepted):
                self._places[route.id].settle(verdict.prompt_tokens)
                self._requests.accept(route.id, verdict.prompt_tokens, verdict.encoded_s)
                route.accept(verdict.prompt_tokens)
                if route.abort_wanted and not route.finished:
                    self._send(self._rings.aborts, route.id)
            else:
                self._requests.refuse(route.id)
                route.refuse(
                    Rejected(
                        verdict.status, verdict.message, param=verdict.param, code=verdict.code
                    )
                )
            self._drop_if_over(route)

    def _on_delta(self, delta: Delta) -> None:
        route = self._routes.get(delta.request_id)
        if route is not None:
            self._places[route.id].begin()
            route.add(delta)
            self._drop_if_over(route)

    def _drop_if_over(self, route: Route) -> None:
        if route.is_over:
            del self._routes[route.id]
            self._places.pop(route.id).end()
            if not self._routes:
                self._none_left.set()

    def _abort(self, route: Route) -> None:
        if route.abort_wanted:
            return
        route.abort_wanted = True
        if route.accepted:
            self._send(self._rings.aborts, route.id)

    @staticmethod
    def _send(sender: Sender[Any], item: object) -> None:
        """Into a ring that has room, whatever happens."""
        if not sender.try_push(item):
            raise RuntimeError("a ring that holds every request is full")

    # The end

    @property
    def alive(self) -> int:
        """Requests of this loop that are not over."""
        return len(self._routes)

    async def wait_none_left(self, timeout_s: float) -> bool:
        """True once no request is left, False where some are after `timeout_s`."""
        waiting = asyncio.ensure_future(self._none_left.wait())
        await asyncio.wait([waiting], timeout=timeout_s)
        waiting.cancel()
        return not self._routes

    def abort_all(self) -> None:
        """Ends every request; their clients are told."""
        for route in list(self._routes.values()):
            self._abort(route)

    def fail_all(self) -> None:
        """Ends every route with an error, without the help of other threads."""
        message = "The server failed and is going down."
        for route in self._routes.values():
            route.add(_error(route.id, message))
            route.refuse(Rejected(503, message, code="failed"))
        self._routes.clear()
        self._places.clear()
        self._requests.forget_all()
        self._none_left.set()


def _error(request_id: int, message: str) -> Delta:
    return Delta(request_id, "", (), Finish.ERROR, 0, 0, error=message)
