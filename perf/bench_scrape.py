"""What scraping costs throughput: tokens a second with /metrics asked every second, and without.

    python -m perf.bench_scrape --streams 8 --answer-tokens 2500    # answers longer than all of it
    python -m perf.bench_scrape --replay        # the front end alone, as fast as it goes

One server under a steady load of long answers; intervals with and without scrapes alternate (ABBA),
so that what else the machine does falls on both. Tokens are those of /metrics at each interval's
ends, one scrape in either kind. The ratio's error is the standard error over pairs of intervals.
"""

import re
import statistics
import time
from dataclasses import dataclass, field

import click
import httpx

from client.bench.datasets.prompts import PromptMaker
from client.bench.datasets.synthetic import random_lengths
from client.bench.load import Asking, LoadThread
from client.bench.workload import Sampling
from client.target import Target
from perf.results import save
from perf.serving import Served, serving
from runtime.setup.model import default_folder


@dataclass
class Intervals:
    """Tokens a second of each interval, in their order. Owned by the main thread."""

    plain: list[float] = field(default_factory=list)
    scraped: list[float] = field(default_factory=list)
    scrapes_s: list[float] = field(default_factory=list)  # as the client saw them

    def figures(self) -> dict[str, float]:
        ratios = [a / b for a, b in zip(self.scraped, self.plain, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        return {
            "pairs": len(ratios),
            "plain_tokens_per_s": statistics.mean(self.plain),
            "scraped_tokens_per_s": statistics.mean(self.scraped),
            "ratio": sum(self.scraped) / sum(self.plain),
            "ratio_of_pairs_median": statistics.median(ratios),
            "ratio_standard_error": error,
            "scrape_ms_median": 1e3 * statistics.median(self.scrapes_s),
        }


def tokens(client: httpx.Client, intervals: Intervals) -> tuple[int, float]:
    """Sent to clients so far, and when they were counted: in the middle of one scrape."""
    begun_s = time.perf_counter()
    text = client.get("/metrics").text
    took_s = time.perf_counter() - begun_s
    intervals.scrapes_s.append(took_s)
    found = re.search(r"^plait_output_tokens_total (\S+)$", text, re.MULTILINE)
    assert found is not None
    return int(float(found.group(1))), begun_s + took_s / 2


def interval(client: httpx.Client, intervals: Intervals, seconds: int, scraped: bool) -> None:
    before, begun_s = tokens(client, intervals)
    for second in range(1, seconds + 1):
        time.sleep(max(0.0, begun_s + second - time.perf_counter()))
        if scraped and second < seconds:
            tokens(client, intervals)
    after, ended_s = tokens(client, intervals)
    rate = (after - before) / (ended_s - begun_s)
    (intervals.scraped if scraped else intervals.plain).append(rate)


def measure(
    served: Served, streams: int, answer_tokens: int, pairs: int, seconds: int
) -> Intervals:
    """Raises RuntimeError where the load ended, or failed, before the measuring did."""
    maker = PromptMaker(as_ids=True)
    # Said again and again: the replayed engine ends a hundred a second.
    sessions = 100 * random_lengths(maker, 0, 8_000, (16, 32), (answer_tokens,) * 2)
    target = Target(served.url, served.model)
    load = LoadThread(Asking(target, Sampling(chat=False)), sessions, streams)
    thread, intervals = load.start(time.perf_counter()), Intervals()
    with httpx.Client(base_url=served.url, timeout=30) as client:
        time.sleep(5)  # until all streams have begun
        for pair in range(pairs):
            for scraped in (False, True) if pair % 2 else (True, False):
                interval(client, intervals, seconds, scraped)
    wrong = next((sample.error for sample in tuple(load.samples) if sample.error), None)
    if wrong is not None or not thread.is_alive():
        raise RuntimeError(f"the load did not last: {wrong or load.failure}")
    sessions.clear()  # no more are begun
    thread.join()
    return intervals


@click.command()
@click.option("--streams", default=32, show_default=True)
@click.option("--answer-tokens", default=512, show_default=True)
@click.option("--pairs", default=12, show_default=True, help="Of intervals with and without.")
@click.option("--seconds", default=5, show_default=True, help="Of an interval.")
@click.option("--replay", is_flag=True, help="A server whose engine only replays text.")
@click.option("--name", default="bench_scrape", show_default=True, help="Of the result.")
def main(
    streams: int, answer_tokens: int, pairs: int, seconds: int, replay: bool, name: str
) -> None:
    """Measures throughput with and without scrapes."""
    flags = ["--step-ms", "0"] if replay else ["--model", str(default_folder())]
    with serving(flags, "perf.frontend_server" if replay else "runtime.serve") as served:
        figures = measure(served, streams, answer_tokens, pairs, seconds).figures()
    for key, value in figures.items():
        print(f"{key}: {value:.4g}")
    print(
        save(
            name,
            {
                "streams": streams,
                "answer_tokens": answer_tokens,
                "seconds": seconds,
                "replay": replay,
                **figures,
            },
        )
    )


if __name__ == "__main__":
    main()
