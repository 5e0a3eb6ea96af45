"""Runs traffic through a scheduler against a virtual clock: hours in seconds, the same each time.

A step takes what its tokens cost on the device that the costs were measured on. One step is planned
ahead, as the engine does; planning takes no time, since the device computes meanwhile.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from engine.plan import StepPlan
from engine.request import Int32Array, StepOutput
from engine.scheduler import Scheduler
from perf.simulate_traffic import EOS, Traffic


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds of a step."""

    step: float  # reading the weights, launching
    decode_row: float
    kv_token: float  # of decode rows: each reads its own
    prefill_token: float

    def of(self, plan: StepPlan, cached: Int32Array) -> float:
        """cached  [decode rows] tokens of each"""
        prefill_tokens = len(plan.descriptor.prefill_tokens)
        decoding = self.decode_row * len(cached) + self.kv_token * int(cached.sum())
        return self.step + decoding + self.prefill_token * prefill_tokens


# From perf/results/bench_step_*.json and the decode table of PERF.md (one H200, context 600): the
# step at batch 1; keys and values at 4.1 TB/s; the rest at batch 256, a row each; prefill over all
# 142,827 tokens of the offline workload. At batch 128 this says 13.8 ms for 14B; 13.2 is measured.
COSTS: Final = {
    "0.6B": StepCosts(step=1.10, decode_row=0.001, kv_token=0.000028, prefill_token=0.0022),
    "14B": StepCosts(step=8.40, decode_row=0.018, kv_token=0.000040, prefill_token=0.039),
}


@dataclass(slots=True)
class Trace:
    """When each request got its tokens, in seconds of the virtual clock. Owned by one run."""

    token_s: dict[int, list[float]] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
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
        self._arrivals = deque(traffic.requests)
        self._in_flight: deque[tuple[StepPlan, Int32Array, float, float]] = deque()
        self._now_s = self._device_free_s = 0.0
        self._trace = Trace()

    def trace(self) -> Trace:
        while self._arrivals or self._scheduler.has_work or self._in_flight:
            self._turn()
        self._trace.retractions = self._scheduler.retractions
        self._trace.end_s = self._now_s
        return self._trace

    def _turn(self) -> None:
        while self._arrivals and self._arrivals[0].arrived_s <= self._now_s:
            self._scheduler.submit(self._arrivals.popleft())
        plan = self._scheduler.plan()
        if plan is not None:
            self._launch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > 1):
            self._commit()
        elif plan is None:
            assert self._arrivals, "requests wait, and nothing can be launched"
            self._now_s = max(self._now_s, self._arrivals[0].arrived_s)

    def _launch(self, plan: StepPlan) -> None:
        rows = self._scheduler.holdings.rows
        cost_s = self._costs.of(plan, rows.cached[plan.descriptor.decode_rows]) / 1e3
        self._device_free_s = max(self._device_free_s, self._now_s) + cost_s
        self._in_flight.append((plan, self._tokens(plan), self._device_free_s, cost_s))
        self._trace.steps += 1

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
        for request_id in output.request_ids.tolist():
            self._trace.token_s.setdefault(request_id, []).append(self._now_s)
