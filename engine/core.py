"""The engine: requests in, tokens out, one step at a time.

The same object serves HTTP, where the engine thread calls it, and offline use, where the caller
does. Knows nothing of text, sockets or other threads.
"""

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from engine.cache_outline import CacheOutline, outline_of
from engine.executor import Executor, LaunchedStep
from engine.plan import StepPlan
from engine.prefix_cache import HostCounts
from engine.request import Finish, Request, StepOutput
from engine.request_times import RequestTimes
from engine.scheduler import Scheduler
from engine.step_counters import StepCounters, StepCounts
from engine.step_trace import StepRecord


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What was settled while the engine was built."""

    max_model_len: int  # prompt + output, tokens; a request within it always fits
    kv_tokens: int
    vocab_size: int
    page_size: int
    device: str
    dtype: str
    overlap: bool
    rank_sums: str = ""  # of several ranks: fused with norms, or apart


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for people and metrics; pages are KV pages, seconds are of this engine's life."""

    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    evictable_pages: int
    total_pages: int
    page_size: int
    steps: int
    retractions: int
    host_s: float  # planning and committing, without waiting for the device
    counts: StepCounts = StepCounts()
    prefilling: tuple[int, ...] = ()  # ids of requests whose prompts are being computed
    host: HostCounts = HostCounts()  # the prefix cache's tier in host memory


class Engine:
    """Scheduler and executor, and the steps in flight between them. Owned by one thread."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, overlap: bool, facts: EngineFacts
    ) -> None:
        self.facts = facts
        self._scheduler = scheduler
        self._executor = executor
        self._depth = 1 if overlap else 0  # steps that stay in flight after `step` returns
        self._in_flight: deque[tuple[StepPlan, LaunchedStep, float]] = deque()  # and since when
        self._done_s = 0.0  # when the last step was
        self._times = RequestTimes()
        self._counters = StepCounters()
        self._block = np.empty(1024, np.int32)
        self._steps = 0
        self._host_s = 0.0

    def submit(self, request: Request) -> None:
        """Queues a request. Raises ValueError where it can never be served."""
        self._scheduler.submit(request)
        self._times.queue(request.id, time.monotonic())

    def abort(self, request_id: int) -> None:
        """Ends a request; the next output says so. Does nothing where it has already ended."""
        self._scheduler.end(request_id, Finish.ABORT)

    def stop_matched(self, request_id: int) -> None:
        """A stop string was found in the text: end it. Whoever found it tells the client."""
        self._scheduler.end(request_id, Finish.STOP)

    def expire(self, now_s: float) -> None:
        """Ends requests that have become too old at `now_s`; the next output says so."""
        self._scheduler.expire(now_s)

    def flush_cache(self) -> int:
        """Frees the pages that only the prefix cache holds; how many those were."""
        return self._scheduler.holdings.flush_cache()

    def outline_cache(self) -> CacheOutline:
        """The prefix cache as it can be drawn; takes a bounded time."""
        return outline_of(self._scheduler.holdings.cache)

    def last_steps(self, count: int) -> tuple[StepRecord, ...]:
        """The last steps that are done and why they were so, oldest first; none without a trace."""
        trace = self._scheduler.trace
        return () if trace is None else trace.last(count)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_work

    def step(self) -> StepOutput | None:
        """Launches the next step and commits the oldest; None where there was nothing to do.

        Blocks until a step in flight is done where nothing else can be launched.
        """
        begun = time.perf_counter()
        plan = self._scheduler.plan()
        self._host_s += time.perf_counter() - begun
        if plan is not None:
            self._launch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            return self._commit_oldest()
        ended = self._scheduler.take_ended(time.monotonic())
        return None if ended is None else self._times.stamped(ended)

    def _launch(self, plan: StepPlan) -> None:
        for request_id in self._scheduler.request_ids(plan.descriptor.joined[:, 0].tolist()):
            self._times.begin(request_id, time.monotonic())
        block = plan.descriptor.encode_into(self._block)
        if len(block) > len(self._block):
            self._block = np.empty(2 * len(block), np.int32)  # for the next of its size
        begun = time.perf_counter()
        self._in_flight.append((plan, self._executor.launch_no_sync(block), begun))
        self._steps += 1

    def _commit_oldest(self) -> StepOutput:
        plan, launched, launched_s = self._in_flight.popleft()
        token_ids, logprobs = launched.wait_tokens_sync(), launched.wait_logprobs_sync()
        begun = time.perf_counter()
        # The device began this step once it had the last one behind it.
        took_s = begun - max(launched_s, self._done_s)
        self._scheduler.observe(plan, took_s, begun)
        prefill_tokens = len(plan.descriptor.prefill_tokens)
        self._counters.observe(took_s, prefill_tokens, len(plan.sample_rows))
        self._done_s = begun
        output = self._scheduler.commit(plan, token_ids, logprobs, time.monotonic())
        self._host_s += time.perf_counter() - begun
        return self._times.stamped(output)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            running=scheduler.running,
            waiting=len(scheduler.waiting),
            free_pages=scheduler.holdings.pool.free_pages,
            cached_pages=scheduler.holdings.cache.cached_pages,
            evictable_pages=scheduler.holdings.cache.evictable_pages,
            total_pages=scheduler.holdings.pool.capacity,
            page_size=scheduler.page_size,
            steps=self._steps,
            retractions=scheduler.retractions,
            host_s=self._host_s,
            counts=self._counters.counts(),
            prefilling=self._times.begun(),
            host=scheduler.holdings.cache.host_counts,
        )

    def check_integrity(self) -> None:
        """Asserts the scheduler's invariants. Walks everything: for tests and idle moments."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Gives the device's memory back. The engine is not used afterwards."""
        self._in_flight.clear()
        self._executor.close()
