"""The simulator: the same figures each time, every token told, and rules that differ as they do."""

from dataclasses import replace

import numpy as np
import pytest

from perf.simulate import SETUPS, Setup, simulate
from perf.simulate_baseline import PrefillFirst
from perf.simulate_clock import COSTS, run
from perf.simulate_traffic import WORKLOADS, Traffic

OURS, BASELINE = Setup("ours"), Setup("baseline", PrefillFirst)


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
