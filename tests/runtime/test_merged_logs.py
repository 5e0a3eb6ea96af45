"""Several loops' logs, read as one."""

import threading
from collections import Counter
from dataclasses import fields

from engine.request import Delta, Finish, SamplingParams
from httpd.traces import Traces
from runtime.metrics.histogram import Histogram
from runtime.metrics.merged import merged_logs, merged_traces, youngest_trace
from runtime.metrics.tally import Tally
from runtime.request_log import RequestLog
from tests.fakes_requests import started

PARAMS = SamplingParams(max_new_tokens=8)


def answer(log: RequestLog, request_id: int, at_s: float, tokens: int) -> None:
    """A whole request in two steps: so many tokens, and one."""
    log.open([request_id], [PARAMS], None, at_s)
    log.accept(request_id, 5, at_s + 0.1)
    log.start(started(request_id, 5, at_s + 0.2, at_s + 0.3))
    first = Delta(request_id, "x", (1,) * tokens, Finish.NONE, tokens, 2, host_tokens=1)
    log.take([first], at_s + 0.4, at_s + 0.5)
    last = Delta(request_id, "x", (1,), Finish.STOP, tokens + 1, 2)
    log.take([last], at_s + 0.6, at_s + 0.7)


def test_the_sum_says_what_one_log_would_have_said() -> None:
    logs, one = [RequestLog() for _ in range(3)], RequestLog()
    for number in range(1, 13):
        for log in (logs[number % 3], one):
            answer(log, number, 100.0 + number / 4, number)
    for number, at_s in ((20, 104.1), (21, 104.0), (22, 104.2)):
        for log in (logs[number % 3], one):
            log.open([number], [PARAMS], None, at_s)
    logs[1].refuse(22)
    one.refuse(22)
    merged = merged_logs(logs)
    # Every one of them: none may be right with one loop, and empty with three.
    for each in fields(Tally):
        got, wanted = getattr(merged.tally, each.name), getattr(one.tally, each.name)
        if isinstance(got, Histogram):
            assert got.counts == wanted.counts and abs(got.total - wanted.total) < 1e-9
            assert any(got.counts)
        elif isinstance(got, int | Counter):
            assert got == wanted and got
    assert merged.tally.output_tokens == sum(range(1, 13)) + 12
    assert merged.tally.latency(105.0) == one.tally.latency(105.0)
    assert merged.tally.throughput(105.0) == one.tally.throughput(105.0)
    assert list(merged.alive) == [21, 20]  # the oldest first
    assert merged_logs(logs[:1]) is logs[0]


def test_counts_of_traces_are_added() -> None:
    several = [Traces(frozenset({"/x"})) for _ in range(2)]
    for traces in several:
        for path in ("/x", "/y"):
            with traces.entry("id", path) as trace:
                trace.status, trace.error = 404, "unknown_url"
    merged = merged_traces(several)
    assert merged.responses == {("/x", 404): 2, ("other", 404): 2}
    assert merged.refusals == {"unknown_url": 4}


def test_a_trace_is_the_youngest_whichever_loop_had_it() -> None:
    several = [Traces(frozenset({"/x"})) for _ in range(3)]
    for loop in (1, 0, 2, 1):
        with several[loop].entry("again", "/x") as trace:
            trace.error = "queue_full"
    assert youngest_trace(several, "again") is trace
    assert youngest_trace(several, "other") is None


def test_logs_are_read_while_their_loops_count() -> None:
    logs, stop = [RequestLog(), RequestLog()], threading.Event()
    answer(logs[0], 2, 100.0, 1)

    def count() -> None:
        number = 1
        while not stop.is_set():
            answer(logs[1], number, 100.0 + number / 1000, 2)
            number += 2

    counting = threading.Thread(target=count)
    counting.start()
    try:
        sums = [merged_logs(logs).tally.output_tokens for _ in range(200)]
    finally:
        stop.set()
        counting.join(10)
    assert not counting.is_alive()
    assert sums == sorted(sums) and sums[-1] > 1
