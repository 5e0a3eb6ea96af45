"""What it costs to look at a server: one scrape of /metrics, one answer of /live.

    python -m perf.bench_metrics

In this process, over a log of requests that holds 1,000 running ones and has seen a window full of
steps. Processor time of the thread, so that other programs do not count; best and median.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import click

import perf  # noqa: F401  (the path)
from engine.request import Delta, Finish, SamplingParams
from httpd.text import json_bytes
from httpd.traces import Traces
from perf.results import save
from runtime.insight import InsightRings, ServerInsight
from runtime.latest import Latest
from runtime.lifecycle import Lifecycle
from runtime.metrics.scrape import Sources, exposition
from runtime.queue_limit import QueueCounts, QueueLimit
from runtime.request_log import RequestLog
from tests.fakes_requests import started

STEPS_A_SECOND = 200
RUNNING = 1000


def busy_log(running: int) -> tuple[RequestLog, float]:
    """A log with so many requests in the middle of their answers; seconds a token took."""
    log, now_s = RequestLog(), time.monotonic() - 10
    params = (SamplingParams(max_new_tokens=10_000),)
    for number in range(running):
        log.open((number,), params, None, now_s)
        log.start(started(number, 100, now_s, now_s))
    steps = 10 * STEPS_A_SECOND
    told = [Delta(number, "x", (1,), Finish.NONE, 1, 0) for number in range(running)]
    begun = time.thread_time()
    for step in range(steps):
        at_s = now_s + step / STEPS_A_SECOND
        log.take(told, at_s, at_s)
    return log, (time.thread_time() - begun) / (steps * running)


def timed(act: Callable[[], Any], runs: int) -> dict[str, float]:
    act()
    took = []
    for _ in range(runs):
        begun = time.thread_time()
        act()
        took.append(1e3 * (time.thread_time() - begun))
    return {"best_ms": min(took), "median_ms": statistics.median(took)}


@click.command()
@click.option("--running", default=RUNNING, show_default=True)
@click.option("--runs", default=30, show_default=True)
def main(running: int, runs: int) -> None:
    """Measures scrapes."""
    log, token_s = busy_log(running)
    rings = InsightRings(Latest(), Latest(), Latest(), Latest(), dict)
    limit = QueueLimit(2048, 1 << 22, QueueCounts(1))
    insight = ServerInsight(
        Lifecycle(), rings, [log], [Traces()], limit, version="0", max_running=1024, max_alive=3072
    )  # fmt: skip
    sources = Sources(log.tally, Traces(), lambda: None, dict, dict)
    figures = {
        "running": running,
        "log_us_per_token": 1e6 * token_s,
        "before_a_scrape_on_the_http_loop": timed(lambda: insight._live(brief=True), runs),
        "scrape": timed(lambda: exposition(sources, insight._live(brief=True)), runs),
        "live": timed(lambda: json_bytes(dataclasses.asdict(insight._live())), runs),
    }
    for name, value in figures.items():
        print(name, value)
    print(save("bench_metrics", figures))


if __name__ == "__main__":
    main()
