"""What GET /live tells of the engine, from what the engine told last."""

import asyncio
from dataclasses import replace

from engine.core import EngineStats
from engine.prefix_cache import HostCounts
from httpd.traces import Traces
from runtime.insight import InsightRings, ServerInsight
from runtime.latest import Latest
from runtime.lifecycle import Lifecycle
from runtime.queue_limit import QueueCounts, QueueLimit
from runtime.request_log import RequestLog
from tests.fakes_engine import FACTS

STATS = EngineStats(
    running=1, waiting=0, free_pages=50, cached_pages=30, evictable_pages=20, total_pages=100,
    page_size=16, steps=1, retractions=0, host_s=0.0,
)  # fmt: skip


def insight(stats: EngineStats, rank_sums: str = "") -> ServerInsight:
    rings = InsightRings(Latest(), Latest(), Latest(), Latest(), dict)
    rings.stats.value, rings.facts.value = stats, replace(FACTS, rank_sums=rank_sums)
    limit = QueueLimit(10, 1000, QueueCounts(1))
    return ServerInsight(
        Lifecycle(), rings, [RequestLog()], [Traces()], limit,
        version="0", max_running=8, max_alive=10,
    )  # fmt: skip


def test_tiers_are_told_in_tokens() -> None:
    told = insight(replace(STATS, host=HostCounts(cached=40, capacity=400))).live()
    assert told["kv"] == {
        "total_tokens": 1600, "used_tokens": 480, "cached_tokens": 320, "free_tokens": 800,
    }  # fmt: skip
    assert told["host_kv"] == {
        "total_tokens": 6400, "used_tokens": 0, "cached_tokens": 640, "free_tokens": 5760,
    }  # fmt: skip


def test_there_is_no_second_tier_without_host_memory() -> None:
    assert insight(STATS).live()["host_kv"] is None


def test_how_ranks_sum_is_told_of_several() -> None:
    assert b'rank_sums="fused"' in asyncio.run(insight(STATS, "fused").metrics())
    assert b"rank_sums" not in asyncio.run(insight(STATS).metrics())
