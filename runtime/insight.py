"""What the server knows of itself, put together for those who ask over HTTP.

Reads what other threads have told last (`Latest`), and the HTTP loops' logs of requests. Knows no
routes.
"""

import asyncio
import dataclasses
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.core import EngineStats
from engine.step_counters import STEP_BOUNDS_S
from httpd.service import State
from httpd.traces import Traces
from runtime.capacity.estimate import report_on
from runtime.capacity.gpu import Gpus
from runtime.capacity.host import read_host
from runtime.capacity.report import Capacity
from runtime.gil import is_gil_enabled
from runtime.latest import Latest
from runtime.lifecycle import Lifecycle
from runtime.live import WINDOW_S, Latency, Live, Load, Quantiles, Steps, Tier
from runtime.messages import ModelFacts
from runtime.metrics.histogram import bucket_quantiles
from runtime.metrics.merged import merged_logs, merged_traces, youngest_trace
from runtime.metrics.scrape import Sources, exposition
from runtime.monitor_thread import Sample
from runtime.queue_limit import QueueLimit
from runtime.request_log import RequestLog

_NOTHING: Final = Quantiles(0, None, None, None, None)
_NO_LATENCY: Final = Latency(_NOTHING, _NOTHING, _NOTHING, _NOTHING)


@dataclass(frozen=True, slots=True)
class InsightRings:
    """What other threads tell."""

    stats: Latest[EngineStats]
    capacity: Latest[Capacity]
    sample: Latest[Sample]
    facts: Latest[ModelFacts]  # once the model is loaded
    depths: Callable[[], Mapping[str, int]]


class ServerInsight:
    """`httpd.insight.Insight` over threads. Owned by its HTTP loop."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        rings: InsightRings,
        logs: Sequence[RequestLog],
        traces: Sequence[Traces],
        limit: QueueLimit,
        *,
        version: str,
        max_running: int,
        max_alive: int,
    ) -> None:
        """
        logs         of every HTTP loop
        traces       likewise
        limit        what waits
        max_running  rows of the engine
        max_alive    requests beyond which clients are told to come later
        """
        self._lifecycle = lifecycle
        self._rings = rings
        self._logs = logs
        self._traces = traces
        self._limit = limit
        self._version = version
        self._max_running = max_running
        self._max_alive = max_alive
        self._begun_s = time.monotonic()

    # httpd.insight.Insight

    async def capacity(self) -> dict[str, Any]:
        report = self._rings.capacity.value
        if report is None:
            nothing = Gpus((), None, None, "they have not been looked at yet")
            return dataclasses.asdict(report_on(nothing, read_host(), None))
        sample, facts = self._rings.sample.value, self._rings.facts.value
        if sample is not None:
            report = dataclasses.replace(
                report, at_s=time.time(), devices=sample.gpus, host=sample.host
            )
        if facts is not None:
            report = dataclasses.replace(report, measured_kv_tokens=facts.kv_tokens)
        return dataclasses.asdict(report)

    def live(self) -> dict[str, Any]:
        return dataclasses.asdict(self._live())

    async def metrics(self) -> bytes:
        live = self._live(brief=True)
        sources = Sources(
            merged_logs(self._logs).tally, merged_traces(self._traces),
            lambda: self._rings.stats.value, self._rings.depths, self._facts,
        )  # fmt: skip
        return await asyncio.to_thread(exposition, sources, live)

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        trace = youngest_trace(self._traces, request_id)
        return None if trace is None else trace.told()

    def _live(self, brief: bool = False) -> Live:
        """brief  without quantiles and single requests, which take a while to gather"""
        now_s, log = time.monotonic(), merged_logs(self._logs)
        stats, sample = self._rings.stats.value, self._rings.sample.value
        card = self._lifecycle.card
        prefilling = () if stats is None else stats.prefilling
        return Live(
            at_s=time.time(),
            uptime_s=now_s - self._begun_s,
            state=self._lifecycle.state.value,
            version=self._version,
            gil_enabled=is_gil_enabled(),
            model=None if card is None else card.id,
            window_s=WINDOW_S,
            throughput=log.tally.throughput(now_s),
            latency=_NO_LATENCY if brief else log.tally.latency(now_s),
            load=self._load(stats, log),
            kv=None if stats is None else _kv_tier(stats),
            host_kv=None if stats is None else _host_tier(stats),
            steps=None if stats is None else _steps(stats, sample, now_s),
            gpus=() if sample is None else sample.gpus.gpus,
            memory_available_bytes=None if sample is None else sample.host.memory_available_bytes,
            warnings=() if sample is None else sample.warnings,
            requests=() if brief else log.running(prefilling, now_s),
        )

    def _load(self, stats: EngineStats | None, log: RequestLog) -> Load:
        running, waiting = (0, 0) if stats is None else (stats.running, stats.waiting)
        rows_are_free = running < self._max_running and waiting == 0
        is_ready = self._lifecycle.state is State.READY
        estimate_s = self._limit.start_estimate_s(rows_are_free=rows_are_free)
        return Load(
            alive=len(log.alive),
            encoding=log.encoding,
            waiting=waiting,
            running=running,
            max_running=self._max_running,
            max_alive=self._max_alive,
            waiting_tokens=self._limit.tokens,
            start_estimate_s=estimate_s if is_ready else None,
        )

    def _facts(self) -> dict[str, str]:
        facts = self._rings.facts.value
        told = {
            "version": self._version,
            "python": platform.python_version(),
            "gil": "on" if is_gil_enabled() else "off",
        }
        if facts is not None:
            told |= {"device": facts.device, "dtype": facts.dtype, "model": facts.card.id}
            if facts.rank_sums:
                told["rank_sums"] = facts.rank_sums
        return told


def _kv_tier(stats: EngineStats) -> Tier:
    """In tokens of whole pages. What is cached and locked is held by running requests."""
    page, free, cached = stats.page_size, stats.free_pages, stats.evictable_pages
    return Tier(
        total_tokens=stats.total_pages * page,
        used_tokens=(stats.total_pages - free - cached) * page,
        cached_tokens=cached * page,
        free_tokens=free * page,
    )


def _host_tier(stats: EngineStats) -> Tier | None:
    """Likewise of the host's memory, of which no request holds any; None: there is no such tier."""
    page, host = stats.page_size, stats.host
    if not host.capacity:
        return None
    return Tier(
        total_tokens=host.capacity * page,
        used_tokens=0,
        cached_tokens=host.cached * page,
        free_tokens=(host.capacity - host.cached) * page,
    )


def _steps(stats: EngineStats, sample: Sample | None, now_s: float) -> Steps:
    """Of the time since the monitor's oldest look at the engine, about a window ago."""
    before_s, before = (now_s, stats) if sample is None or sample.before is None else sample.before
    steps = stats.steps - before.steps
    counts = [
        now - then
        for now, then in zip(stats.counts.by_duration, before.counts.by_duration, strict=True)
    ]
    idle_share = None
    if now_s > before_s:
        busy = (stats.counts.busy_s - before.counts.busy_s) / (now_s - before_s)
        idle_share = min(max(1 - busy, 0.0), 1.0)
    return Steps(
        steps=stats.steps,
        step_s=bucket_quantiles(STEP_BOUNDS_S, counts),
        host_s=(stats.host_s - before.host_s) / steps if steps else None,
        retractions=stats.retractions,
        idle_share=idle_share,
    )
