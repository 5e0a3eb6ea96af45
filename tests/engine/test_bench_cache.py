"""The benchmark of the cache ends when it is told to, and keeps what it has by then."""

from typing import Any

import numpy as np

from engine.cache_factory import build_prefix_cache
from engine.core import Engine
from engine.pages import PagePool
from engine.request import Int32Array
from engine.scheduler import Scheduler
from perf.bench_cache import Part, measure
from perf.cache_runs import Clients
from tests.fakes_executor import VOCAB, FakeExecutor, fake_engine

FOREVER = float("inf")


def build_engine() -> Engine:
    scheduler = Scheduler(
        pool=PagePool(65), cache=build_prefix_cache("radix", 4), max_running=4, max_model_len=64,
        prefill_budget=None, eos_ids=(), vocab_size=VOCAB,
    )  # fmt: skip
    return fake_engine(scheduler, FakeExecutor(65, 4, 4, 16), overlap=True)


def ids(*tokens: int) -> Int32Array:
    return np.array(tokens, np.int32)


def clients(engine: Engine) -> Clients:
    """Two who say three things each, behind one beginning."""
    ends = [[ids(client, turn, 7, 7) for turn in range(3)] for client in range(2)]
    return Clients(engine, [ids(1, 2, 3, 4)] * 2, ends, out=4)


def test_every_client_says_all_and_finds_what_was_said_before() -> None:
    engine = build_engine()
    figures = clients(engine).run(FOREVER)
    assert not figures["is_cut"] and figures["requests"] == 6
    # Prompts of 8, 16 and 24 tokens; a turn finds all before it but for the last page's rest.
    assert 0.4 < figures["cached_share"] < 0.7
    assert not engine.has_work


def test_a_run_without_time_is_cut_and_leaves_nothing_behind() -> None:
    engine = build_engine()
    figures = clients(engine).run(until_s=0.0)
    assert figures["is_cut"] and figures["requests"] == 0 and figures["ttft_p50_ms"] is None
    assert not engine.has_work
    engine.check_integrity()


def part(name: str) -> Part:
    return name, lambda until_s: {"until_s": until_s}


def test_each_part_is_kept_as_soon_as_it_is_measured() -> None:
    kept: list[Any] = []
    parts = [part("one"), part("two"), part("two")]
    results = measure(
        parts, 1000.0, lambda results: kept.append((len(results["runs"]), results["left_out"]))
    )
    assert kept == [(1, ["two", "two"]), (2, ["two"]), (2, [])]
    assert results["left_out"] == []
    first, second, third = (
        each["until_s"] for name in ("one", "two") for each in results["runs"][name]
    )
    # A third of the time, half of the rest, all of the rest.
    assert second - first > 100 and third - second > 100


def test_parts_are_left_out_once_the_time_is_up() -> None:
    kept: list[Any] = []
    results = measure([part("one"), part("two")], 0.0, kept.append)
    assert results == {"runs": {}, "left_out": ["one", "two"]} and kept == []
