"""Runs traffic through a scheduler against a virtual clock: hours in seconds, the same each time.

A step takes what its tokens cost on the device that the costs were measured on. One step is planned
ahead, as the engine does; planning takes no time, since the device computes meanwhile. Copies
between the tiers of the prefix cache go one after the other on a stream of their own, by the rules
of engine/descriptor.py, and slow down nothing that does not wait for them.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

import numpy as np

from engine.plan import StepPlan
from engine.request import Finish, Int32Array, Request, StepOutput
from engine.scheduler import Scheduler
from perf.simulate_costs import StepCosts
from perf.simulate_traffic import EOS, Traffic


@dataclass(slots=True)
class Trace:
    """When each request got its tokens, in seconds of the virtual clock. Owned by one run."""

    arrived_s: dict[int, float] = field(default_factory=dict)
    token_s: dict[int, list[float]] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    host_tokens: dict[int, int] = field(default_factory=dict)  # of these, from host memory
    retractions: int = 0
    steps: int = 0
    end_s: float = 0.0


def run(scheduler: Scheduler, traffic: Traffic, costs: StepCosts) -> Trace:
    """Serves all of the traffic; `scheduler` has nothing else to do."""
    return _Run(scheduler, traffic, costs).trace()


class _Run:
    """One run's clock and steps in flight. Owned by the caller."""

    def __init__(self, scheduler: Scheduler, traffic: Traffic, costs: StepCosts) -> None:
        self._scheduler = scheduler
        self._traffic = traffic
        self._costs = costs
        first = [each for each in traffic.requests if each.id not in traffic.after]
        self._arrivals = [(each.arrived_s, each.id, each) for each in first]
        heapify(self._arrivals)
        self._followers = self._by_leader()
        self._in_flight: deque[tuple[StepPlan, Int32Array, float, float]] = deque()
        self._now_s = self._device_free_s = 0.0
        self._copied_s = 0.0  # when all copies so far are made
        self._trace = Trace()

    def trace(self) -> Trace:
        while self._arrivals or self._scheduler.has_work or self._in_flight:
            self._turn()
        self._trace.retractions = self._scheduler.retractions
        self._trace.end_s = self._now_s
        return self._trace

    def _turn(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now_s:
            arrived_s, request_id, request = heappop(self._arrivals)
            self._trace.arrived_s[request_id] = arrived_s
            self._scheduler.submit(request)
        plan = self._scheduler.plan()
        if plan is not None:
            self._launch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > 1):
            self._commit()
        elif plan is None:
            assert self._arrivals, "requests wait, and nothing can be launched"
            self._now_s = max(self._now_s, self._arrivals[0][0])

    def _launch(self, plan: StepPlan) -> None:
        step = plan.descriptor
        begins_s = max(self._device_free_s, self._now_s, self._copied_s)
        if len(step.copies.words):
            copied = len(step.copies.words) * self._scheduler.page_size
            cost_s = copied * self._costs.copied_token / 1e3
            self._copied_s = max(self._copied_s, self._now_s) + cost_s
            if step.copies.first:
                begins_s = max(begins_s, self._copied_s)
        cost_s = self._cost_s(plan)
        self._device_free_s = begins_s + cost_s
        self._in_flight.append((plan, self._tokens(plan), self._device_free_s, cost_s))
        self._trace.steps += 1

    def _cost_s(self, plan: StepPlan) -> float:
        """Of what the step computes; a step may only copy."""
        rows, step = self._scheduler.holdings.rows, plan.descriptor
        decode_rows, prefill_tokens = len(step.decode_rows), len(step.prefill_tokens)
        if not decode_rows and not prefill_tokens:
            return 0.0
        kv_tokens = int(rows.cached[step.decode_rows].sum())
        return self._costs.of(decode_rows, kv_tokens, prefill_tokens) / 1e3

    def _tokens(self, plan: StepPlan) -> Int32Array:
        """Any id, but EOS where the request's answer is as long as the traffic says."""
        rows, tokens = self._scheduler.holdings.rows, np.full(len(plan.sample_rows), EOS + 1)
        pairs = zip(plan.sample_rows.tolist(), plan.sample_positions.tolist(), strict=True)
        for index, (row, position) in enumerate(pairs):
            request = rows.requests[row]
            assert request is not None
            if position + 1 - len(request.prompt_ids) >= self._traffic.lengths[request.id]:
                tokens[index] = EOS
        return tokens.astype(np.int32)

    def _commit(self) -> None:
        plan, tokens, done_s, cost_s = self._in_flight.popleft()
        self._now_s = max(self._now_s, done_s)
        self._scheduler.observe(plan, cost_s, self._now_s)
        self._take(self._scheduler.commit(plan, tokens, None))

    def _take(self, output: StepOutput) -> None:
        for started in output.started:
            self._trace.cached_tokens[started.request.id] = started.cached_tokens
            self._trace.host_tokens[started.request.id] = started.host_tokens
        for request_id in output.request_ids.tolist():
            self._trace.token_s.setdefault(request_id, []).append(self._now_s)
        for request_id in output.request_ids[output.finishes != Finish.NONE].tolist():
            for pause_s, request in self._followers.get(request_id, ()):
                comes = replace(request, arrived_s=self._now_s + pause_s)
                heappush(self._arrivals, (comes.arrived_s, comes.id, comes))

    def _by_leader(self) -> dict[int, list[tuple[float, Request]]]:
        """Of each request that others follow, their pauses and themselves."""
        followers: dict[int, list[tuple[float, Request]]] = {}
        for request in self._traffic.requests:
            if request.id in self._traffic.after:
                leader, pause_s = self._traffic.after[request.id]
                followers.setdefault(leader, []).append((pause_s, request))
        return followers
