"""What is counted and measured of requests: exactly what clients saw."""

import random

import pytest

from engine.request import Delta, Finish, SamplingParams
from httpd.traces import Traces
from runtime.metrics.histogram import Histogram
from runtime.request_log import RequestLog
from tests.fakes_requests import started

PARAMS = SamplingParams(max_new_tokens=8)


def delta(request_id: int, so_far: int, finish: Finish = Finish.NONE, tokens: int = 1) -> Delta:
    return Delta(request_id, "x", (7,) * tokens, finish, so_far, 3)


def count(histogram: Histogram) -> int:
    return sum(histogram.counts)


def test_a_requests_time_is_the_sum_of_its_phases() -> None:
    log = RequestLog()
    log.open((1,), (PARAMS,), None, 100.0)
    log.accept(1, 5, 100.5)
    log.start(started(1, 5, queued_s=101.0, begun_s=103.0))
    log.take([delta(1, 1)], 107.0, 107.25)
    log.take([delta(1, 2)], 115.0, 115.5)
    log.take([delta(1, 3, Finish.STOP)], 123.0, 123.125)
    assert not log.alive
    tally = log.tally
    assert (tally.queue.total, tally.prefill.total, tally.decode.total) == (2.0, 4.0, 16.0)
    assert tally.front_end.total == 1.0 + 0.125
    assert tally.e2e.total == 23.125 == 2.0 + 4.0 + 16.0 + 1.125
    assert tally.ttft.total == 7.25
    assert (count(tally.itl), tally.itl.total) == (2, 8.25 + 7.625)
    assert tally.token_time.total == 8.0
    assert (tally.prompt_tokens, tally.cached_tokens, tally.output_tokens) == (5, 3, 3)
    assert tally.finished == {"stop": 1}


def test_a_first_token_may_come_before_the_acceptance() -> None:
    log = RequestLog()
    log.open((1,), (PARAMS,), None, 0.0)
    log.start(started(1, 5, 1.0, 1.0))
    log.take([delta(1, 1)], 2.0, 2.0)
    log.accept(1, 5, 0.5)
    assert log.tally.prompt_tokens == 5 and log.alive[1].encoded_s == 0.5


def test_who_ends_without_a_token_is_counted_and_not_measured() -> None:
    log = RequestLog()
    log.open((1, 2, 3), (PARAMS,) * 3, None, 0.0)
    log.take([Delta(1, "", (), Finish.ABORT, 0, 0)], 1.0, 1.0)
    log.refuse(2)
    log.refuse(2)
    log.refuse(3)
    log.take([delta(9, 1)], 1.0, 1.0)  # of nobody
    tally = log.tally
    assert not log.alive and tally.finished == {"abort": 1}
    assert count(tally.e2e) == count(tally.ttft) == tally.output_tokens == 0
    assert (count(tally.choices), tally.choices.total) == (1, 3.0)


def test_counts_are_those_of_the_clients() -> None:
    """A storm of steps in which requests join, get one or two tokens, and end in every way."""
    rng = random.Random(3)
    log, now_s, gaps = RequestLog(), 0.0, 0
    made: dict[int, int] = {}
    ended: dict[int, tuple[int, Finish]] = {}
    for step in range(400):
        now_s += rng.choice([0.01, 0.01, 0.02])
        request_id = step + 1
        log.open((request_id,), (PARAMS,), None, now_s)
        log.start(started(request_id, 4, now_s, now_s))
        made[request_id] = 0
        deltas = []
        for each in list(made):
            tokens = rng.choice([1, 1, 2])
            gaps += tokens if made[each] else 0
            made[each] += tokens
            finish = rng.choice([Finish.NONE] * 4 + [Finish.STOP, Finish.LENGTH])
            deltas.append(delta(each, made[each], finish, tokens))
            if finish:
                ended[each] = made.pop(each), finish
        log.take(deltas, now_s, now_s)
    assert set(log.alive) == set(made)
    tokens = [count for count, _ in ended.values()] + list(made.values())
    tally = log.tally
    assert tally.output_tokens == sum(tokens)
    assert count(tally.ttft) == len(tokens)
    assert count(tally.itl) == gaps
    assert count(tally.e2e) == count(tally.output_sizes) == len(ended)
    assert tally.output_sizes.total == sum(count for count, _ in ended.values())
    for reason in (Finish.STOP, Finish.LENGTH):
        assert tally.finished[reason.name.lower()] == [f for _, f in ended.values()].count(reason)


def test_phases() -> None:
    log = RequestLog()
    for number in (1, 2, 3, 4):
        log.open((number,), (PARAMS,), None, 10.0)
    for number in (2, 3, 4):
        log.accept(number, 6, 10.0)
    log.start(started(4, 6, 10.0, 10.0))
    log.take([delta(4, 1)], 11.0, 11.0)
    told = {each.phase: each for each in log.running([3], 12.0)}
    assert list(told) == ["encoding", "waiting", "prefill", "decode"]
    assert told["decode"].output_tokens == 1 and told["decode"].age_s == 2.0
    assert log.encoding == 1


def test_a_requests_timeline_is_found_by_both_of_its_ids() -> None:
    traces, log = Traces(), RequestLog()
    with traces.entry("mine", "/v1/completions") as trace:
        trace.response_id = "cmpl-1"
        log.open((1, 2), (PARAMS,) * 2, trace, trace.received_s + 1)
        log.start(started(1, 6, trace.received_s + 2, trace.received_s + 3))
        log.take([delta(1, 1)], trace.received_s + 4, trace.received_s + 5)
        assert traces.find("mine") is trace is traces.find("cmpl-1")
        assert log.running((), trace.received_s + 6)[0].id == "cmpl-1"
    found = traces.find("cmpl-1")
    assert found is trace and traces.find("other") is None
    first, second = found.told()["parts"]
    times = [first[f"{name}_s"] for name in ("submitted", "queued", "begun", "first_token", "sent")]
    assert times == pytest.approx([1, 2, 3, 4, 5])
    assert first["finish"] is None and second["first_token_s"] is None
