"""What all requests of a loop came to: counts, histograms and the last few seconds of them.

A new metric of requests is a field here, a line where request_log.py sees it happen, and a line of
scrape.py. Knows no single request.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from runtime.live import Latency, Throughput
from runtime.metrics.histogram import Histogram, PerSecond, Recent

# Each bound is a line of text in every scrape, twice where vLLM has the same histogram.
FIRST_TOKEN_BOUNDS_S: Final = (
    0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
TOKEN_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
REQUEST_BOUNDS_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0,
    960.0,
)  # fmt: skip
SIZE_BOUNDS: Final = (
    1, 10, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
)  # fmt: skip

_first_token = partial(Histogram, FIRST_TOKEN_BOUNDS_S)
_token = partial(Histogram, TOKEN_BOUNDS_S)
_request = partial(Histogram, REQUEST_BOUNDS_S)
_size = partial(Histogram, SIZE_BOUNDS)


@dataclass(slots=True)
class Tally:
    """Owned by one HTTP loop; any thread may read it."""

    ttft: Histogram = field(default_factory=_first_token)
    itl: Histogram = field(default_factory=_token)
    token_time: Histogram = field(default_factory=_token)  # decode time over tokens but the first
    queue: Histogram = field(default_factory=_request)
    prefill: Histogram = field(default_factory=_request)
    decode: Histogram = field(default_factory=_request)
    front_end: Histogram = field(default_factory=_request)
    e2e: Histogram = field(default_factory=_request)
    prompt_sizes: Histogram = field(default_factory=_size)
    output_sizes: Histogram = field(default_factory=_size)
    max_tokens: Histogram = field(default_factory=_size)
    choices: Histogram = field(default_factory=_size)
    prompt_tokens: int = 0  # of requests that got their first token
    cached_tokens: int = 0
    host_tokens: int = 0  # of the cached ones, from host memory
    output_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by reason
    recent_ttft: Recent = field(default_factory=Recent)
    recent_itl: Recent = field(default_factory=Recent)
    recent_queue: Recent = field(default_factory=Recent)
    recent_e2e: Recent = field(default_factory=Recent)
    # Requests that ended, prompt tokens, those of them that were cached, output tokens.
    per_second: PerSecond = field(default_factory=partial(PerSecond, 4))

    def add(self, other: "Tally") -> None:
        """Takes in another loop's, which may be counting meanwhile."""
        for each in dataclasses.fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(ours, int):
                setattr(self, each.name, ours + theirs)
            elif isinstance(ours, Counter):
                ours.update(dict(theirs))
            else:
                ours.add_all(theirs)

    def throughput(self, now_s: float) -> Throughput:
        return Throughput(*self.per_second.rates(now_s))

    def latency(self, now_s: float) -> Latency:
        recent = (self.recent_ttft, self.recent_itl, self.recent_queue, self.recent_e2e)
        return Latency(*(each.quantiles(now_s) for each in recent))
