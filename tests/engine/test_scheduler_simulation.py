"""The simulator: the same figures each time, every token told, and rules that differ as they do."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from perf.simulate import SETUPS, WORKLOADS, Setup, add_fairness, simulate
from perf.simulate_baseline import PrefillFirst
from perf.simulate_clock import run
from perf.simulate_costs import COSTS, fit_costs, read_trace
from perf.simulate_goals import goals_of
from perf.simulate_sessions import parked_chats
from perf.simulate_traffic import Traffic

OURS = Setup("ours", target_itl_ms=None)
BASELINE = Setup("baseline", PrefillFirst, target_itl_ms=None)


@pytest.fixture(scope="module")
def long_prompts() -> Traffic:
    return WORKLOADS["long among short"](0, 25)


@pytest.fixture(scope="module")
def memory_short() -> Traffic:
    traffic = WORKLOADS["memory short"](0, 12)
    lengths = {number: min(length, 150) for number, length in traffic.lengths.items()}
    return replace(traffic, kv_tokens=70 * 64, lengths=lengths)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_every_request_gets_all_its_tokens(setup: Setup, memory_short: Traffic) -> None:
    trace = run(setup.build(memory_short.kv_tokens), memory_short, COSTS["0.6B"])
    for request in memory_short.requests:
        times = trace.token_s[request.id]
        assert len(times) == min(memory_short.lengths[request.id], 2048)
        assert times[0] > request.arrived_s and (np.diff(times) > 0).all()


def test_two_runs_are_the_same(memory_short: Traffic) -> None:
    costs = COSTS["14B"]
    assert simulate(OURS, memory_short, costs) == simulate(OURS, memory_short, costs)


def test_a_lone_decode_step_takes_what_it_costs(long_prompts: Traffic) -> None:
    first = replace(long_prompts, requests=long_prompts.requests[1:2])
    costs = COSTS["14B"]
    trace = run(OURS.build(first.kv_tokens), first, costs)
    (request,) = first.requests
    gaps = 1e3 * np.diff(trace.token_s[request.id])
    length = len(request.prompt_ids)
    expected = costs.step + costs.decode_row + costs.kv_token * np.arange(length + 1, length + 3)
    assert gaps[:2] == pytest.approx(expected)


def test_prefill_first_stalls_whoever_decodes(long_prompts: Traffic) -> None:
    ours, baseline = (simulate(each, long_prompts, COSTS["14B"]) for each in (OURS, BASELINE))
    assert ours["itl_max_ms"] < 100 < 2 * ours["itl_max_ms"] < baseline["itl_max_ms"]


def test_reserving_whole_allowances_leaves_memory_idle(memory_short: Traffic) -> None:
    ours, baseline = (simulate(each, memory_short, COSTS["14B"]) for each in (OURS, BASELINE))
    assert baseline["retractions"] == 0
    assert ours["tokens_per_s"] > 1.2 * baseline["tokens_per_s"]


def test_an_agents_turn_comes_after_its_last_answer_and_finds_it_cached() -> None:
    traffic = WORKLOADS["agent sessions"](0, 16)
    trace = run(OURS.build(traffic.kv_tokens), traffic, COSTS["0.6B"])
    assert len(traffic.after) == 14  # two sessions of 8 turns
    for number, (before, pause_s) in traffic.after.items():
        assert trace.arrived_s[number] == pytest.approx(trace.token_s[before][-1] + pause_s)
        prompt, earlier = (traffic.requests[n].prompt_ids for n in (number, before))
        assert trace.cached_tokens[number] >= len(earlier) - 64
        assert (prompt[: len(earlier)] == earlier).all()


@pytest.fixture(scope="module")
def parked() -> Traffic:
    """Three people, and a pool that has no room for two of them."""
    return replace(parked_chats(0, 13), kv_tokens=100 * 64)


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_host_tier_keeps_what_the_pool_has_no_room_for(
    parked: Traffic, write: Literal["through", "back"]
) -> None:
    without, tiered = (
        simulate(setup, parked, COSTS["14B"]) for setup in (OURS, replace(OURS, host=write))
    )
    assert without["from_host_share"] == 0
    assert tiered["from_host_share"] > 0.3
    assert tiered["cached_share"] > without["cached_share"] + 0.25
    assert tiered["ttft_p50_ms"] < 0.5 * without["ttft_p50_ms"]


def test_what_is_loaded_is_waited_for(parked: Traffic) -> None:
    setup = replace(OURS, host="through")
    rows = [
        run(setup.build(parked.kv_tokens), parked, replace(COSTS["14B"], copied_token=cost_ms))
        for cost_ms in (0.0, 1.0)
    ]
    number = next(number for number, tokens in rows[1].host_tokens.items() if tokens)
    waits_s = [row.token_s[number][0] - row.arrived_s[number] for row in rows]
    assert waits_s[1] - waits_s[0] > 0.9e-3 * rows[1].host_tokens[number]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_is_served(workload: str) -> None:
    traffic = WORKLOADS[workload](1, 12)
    row = simulate(OURS, traffic, COSTS["0.6B"])
    assert len(row["waits_s"]) == len(traffic.requests) > 0
    assert min(row["waits_s"]) > 0


def test_fairness_is_each_ones_wait_by_its_wait_under_fcfs() -> None:
    rows = [
        {"setup": "fcfs", "waits_s": [0.1, 2.0, 4.0]},
        {"setup": "other", "waits_s": [0.9, 5.0, 1.0]},
    ]
    add_fairness(rows)
    assert [row["wait_max_times_fcfs"] for row in rows] == [1.0, 2.5]
    assert [row["longest_wait_times_fcfs"] for row in rows] == [1.0, 1.25]


def test_goals_are_told_as_reached_or_not() -> None:
    def row(setup: str, itl: float, good: float, **more: float) -> dict[str, object]:
        figures = {"itl_p99_ms": itl, "goodput_per_s": good, "tokens_per_s": 100.0}
        return {"setup": setup, **figures, "longest_wait_times_fcfs": 1.0, **more}

    def goals(ours: float, alone: float, longest: float, tokens: float) -> list[bool]:
        swept = [
            row(setup, itl, good, rate=rate)
            for rate, theirs, itl_theirs in ((1.0, 3.0, 90.0), (2.0, 2.0, 300.0))
            for setup, itl, good in (("base", itl_theirs, theirs), ("ours", 40.0, ours))
        ]
        alone_rows = [
            row("ours", alone, 1.0, longest_wait_times_fcfs=longest, tokens_per_s=tokens),
            row("ours, no target", 45.0, 1.0),
        ]
        beside = [row("ours", 40.0, 1.0), row("ours, no target", 90.0, 1.0)]
        told = goals_of(
            {"long among short": beside, "short alone": alone_rows},
            {"long among short": swept},
            baseline="base",
            default="ours",
        )
        return [goal["reached"] for goal in told.values()]

    assert goals(3.0, 20.0, 3.0, 99.0) == [True] * 4
    assert goals(2.9, 19.9, 3.1, 98.0) == [False] * 4


def test_costs_are_learnt_from_a_trace_of_steps(tmp_path: Path, long_prompts: Traffic) -> None:
    simulate(OURS, long_prompts, COSTS["14B"], tmp_path / "steps.jsonl")
    records = read_trace(tmp_path / "steps.jsonl")
    told, costs = fit_costs(records), COSTS["14B"]
    assert records[-1].decode_rows == 1 and any(record.chunks for record in records)
    for part in ("step", "decode_row", "kv_token", "prefill_token"):
        assert getattr(told, part) == pytest.approx(getattr(costs, part), rel=0.01)
