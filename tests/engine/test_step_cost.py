"""Prompt tokens of a step are chosen from what steps took."""

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.step_cost import AIM, FLOOR_TOKENS, StepCost
from perf.simulate import WORKLOADS, Setup, simulate
from perf.simulate_costs import COSTS


def test_nothing_is_said_before_a_prompt_was_seen() -> None:
    cost = StepCost()
    cost.observe(8, 0, 0.01)
    assert cost.tokens_within(0.05, 8) is None


def test_what_is_left_beside_the_decode_rows_goes_to_prompts() -> None:
    cost = StepCost()
    cost.observe(8, 0, 0.010)
    cost.observe(8, 1000, 0.050)  # 40 ms for 1,000 tokens
    target_s = 0.030 / AIM
    assert cost.tokens_within(target_s, 8) == pytest.approx(500, abs=1)
    assert cost.tokens_within(target_s, 100) == pytest.approx(500, abs=1)  # the nearest known
    cost.observe(100, 0, 0.020)
    assert cost.tokens_within(target_s, 100) == pytest.approx(250, abs=1)


@pytest.mark.parametrize("target_s", [0.0, 0.010, 0.011])
def test_prompts_go_on_where_no_time_is_left(target_s: float) -> None:
    cost = StepCost()
    cost.observe(8, 0, 0.010)
    cost.observe(8, 1000, 0.050)
    assert cost.tokens_within(target_s, 8) == FLOOR_TOKENS


@pytest.mark.parametrize("decoding_s", [0.0, 0.010, 0.030])
def test_steps_come_to_take_what_they_should_whatever_was_seen_of_decoding(
    decoding_s: float,
) -> None:
    cost = StepCost()
    cost.observe(8, 0, decoding_s)  # 20 ms in truth, with 40 µs for each token
    tokens = 2048
    for _ in range(30):
        cost.observe(8, tokens, 0.020 + 40e-6 * tokens)
        tokens = cost.tokens_within(0.050, 8) or 0
    assert 0.020 + 40e-6 * tokens == pytest.approx(AIM * 0.050, rel=0.02)


def test_a_long_prompt_among_others_keeps_steps_near_the_target() -> None:
    traffic = WORKLOADS["long among short"](0, 40)
    plain, targeted = (
        simulate(Setup("fcfs", target_itl_ms=target), traffic, COSTS["14B"])
        for target in (None, 40)
    )
    assert plain["itl_p99_ms"] > 80
    assert targeted["itl_p99_ms"] < 40
    assert targeted["tokens_per_s"] > 0.9 * plain["tokens_per_s"]


def test_a_target_that_no_step_could_keep_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target_itl_ms is 0\.5; it must be between 1"):
        replace(EngineConfig(model=None), target_itl_ms=0.5)  # type: ignore[arg-type]
