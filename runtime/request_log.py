"""Every request's times and sizes: for metrics, for GET /live and for its timeline.

    received ─ submitted ─ encoded ─ queued ─ begun ─ first token … last token ─ sent
    └────────── front end ─────────┘ └ queue ┘└ prefill ┘└─── decode ───┘└ front end ┘

The engine's own times are of its thread; all are time.monotonic(), which threads share. So a
request's whole time is the sum of its queue, prefill, decode and front-end times.

Rules
- Phases are measured of requests that got a token and ended; ends of all requests are counted.
- Times between tokens are those at which they leave for the client: a step's tokens share one.

Knows neither routes nor rings.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

from engine.request import Delta, Finish, SamplingParams, Started
from httpd.traces import Trace
from runtime.live import MOST_REQUESTS, Latency, RunningRequest, Throughput
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
_HISTOGRAMS: Final = (
    "ttft", "itl", "token_time", "queue", "prefill", "decode", "front_end", "e2e", "prompt_sizes",
    "output_sizes", "max_tokens", "choices",
)  # fmt: skip
_COUNTS: Final = ("prompt_tokens", "cached_tokens", "host_tokens", "output_tokens")
_RECENT: Final = ("_recent_ttft", "_recent_itl", "_recent_queue", "_recent_e2e")
_FINISH_NAMES: Final = {each: each.name.lower() for each in Finish}


class Tracked:
    """One request from its submission to its end. Owned by its HTTP loop.

    Times are time.monotonic(), None until they come.
    """

    __slots__ = (
        *("begun_s", "cached_tokens", "encoded_s", "finish", "first_s", "id", "last_s"),
        *("max_tokens", "output_tokens", "prompt_tokens", "queued_s", "received_s", "sent_s"),
        *("submitted_s", "trace"),
    )

    def __init__(
        self, request_id: int, params: SamplingParams, trace: Trace | None, now_s: float
    ) -> None:
        self.id, self.trace, self.max_tokens = request_id, trace, params.max_new_tokens
        self.submitted_s = now_s
        self.received_s = now_s if trace is None else trace.received_s
        self.encoded_s: float | None = None
        self.queued_s: float | None = None
        self.begun_s: float | None = None
        self.first_s: float | None = None  # the engine had its first token
        self.last_s = 0.0  # likewise the last so far
        self.sent_s = 0.0  # the last so far left for the client
        self.prompt_tokens: int | None = None
        self.cached_tokens = 0
        self.output_tokens = 0
        self.finish = Finish.NONE

    def told(self, received_s: float) -> dict[str, Any]:
        """Satisfies httpd.traces.Part."""

        def since(at_s: float | None) -> float | None:
            return None if at_s is None else at_s - received_s

        has_token = self.first_s is not None
        return {
            "number": self.id,
            "finish": _FINISH_NAMES[self.finish] if self.finish else None,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "submitted_s": since(self.submitted_s),
            "encoded_s": since(self.encoded_s),
            "queued_s": since(self.queued_s),
            "begun_s": since(self.begun_s),
            "first_token_s": since(self.first_s),
            "last_token_s": since(self.last_s) if has_token else None,
            "sent_s": since(self.sent_s) if self.sent_s else None,
        }


class RequestLog:
    """Requests under way, and what those before them took. Owned by its HTTP loop; other threads
    may read histograms and counters."""

    def __init__(self) -> None:
        self.alive: dict[int, Tracked] = {}  # in order of arrival
        self.ttft = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.itl = Histogram(TOKEN_BOUNDS_S)
        self.token_time = Histogram(TOKEN_BOUNDS_S)  # decode time over tokens but the first
        self.queue = Histogram(REQUEST_BOUNDS_S)
        self.prefill = Histogram(REQUEST_BOUNDS_S)
        self.decode = Histogram(REQUEST_BOUNDS_S)
        self.front_end = Histogram(REQUEST_BOUNDS_S)
        self.e2e = Histogram(REQUEST_BOUNDS_S)
        self.prompt_sizes = Histogram(SIZE_BOUNDS)
        self.output_sizes = Histogram(SIZE_BOUNDS)
        self.max_tokens = Histogram(SIZE_BOUNDS)
        self.choices = Histogram(SIZE_BOUNDS)
        self.prompt_tokens = 0  # of requests that got their first token
        self.cached_tokens = 0
        self.host_tokens = 0  # of the cached ones, from host memory
        self.output_tokens = 0
        self.finished: Counter[str] = Counter()  # by reason
        self._recent_ttft, self._recent_itl = Recent(), Recent()
        self._recent_queue, self._recent_e2e = Recent(), Recent()
        self._per_second = PerSecond(4)

    def add(self, other: "RequestLog") -> None:
        """Takes in what another loop's log has counted, but for requests that are alive."""
        for name in _HISTOGRAMS:
            getattr(self, name).add(getattr(other, name))
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.finished.update(dict(other.finished))
        for name in _RECENT:
            getattr(self, name).add_all(getattr(other, name))
        self._per_second.add_all(other._per_second)

    # A request's way

    def open(
        self,
        ids: Sequence[int],
        params: Sequence[SamplingParams],
        trace: Trace | None,
        now_s: float,
    ) -> None:
        """Requests that share a prompt are on their way."""
        self.choices.observe(len(ids))
        for request_id, each in zip(ids, params, strict=True):
            tracked = Tracked(request_id, each, trace, now_s)
            self.alive[request_id] = tracked
            if trace is not None:
                trace.parts.append(tracked)

    def accept(self, request_id: int, prompt_tokens: int, encoded_s: float) -> None:
        tracked = self.alive.get(request_id)
        if tracked is not None:
            tracked.prompt_tokens, tracked.encoded_s = prompt_tokens, encoded_s

    def refuse(self, request_id: int) -> None:
        """It goes no further; its trace tells why, and counts it."""
        self.alive.pop(request_id, None)

    def start(self, started: Started) -> None:
        """The engine's word of a request whose first delta comes next; its acceptance may come
        later, since it takes another way."""
        tracked = self.alive.get(started.request.id)
        if tracked is not None:
            tracked.prompt_tokens = len(started.request.prompt_ids)
            tracked.queued_s, tracked.begun_s = started.queued_s, started.begun_s

    def take(self, deltas: Iterable[Delta], made_s: float, now_s: float) -> None:
        """What a step added.

        made_s  when the engine had its tokens
        now_s   when they leave for the clients
        """
        alive, made, gap_s, gap_tokens = self.alive, 0, -1.0, 0
        for delta in deltas:
            tracked = alive.get(delta.request_id)
            if tracked is None:
                continue
            if tokens := len(delta.token_ids):
                made += tokens
                if tracked.first_s is None:
                    self._first(tracked, delta, made_s, now_s)
                elif now_s - tracked.sent_s == gap_s:
                    gap_tokens += tokens
                else:  # rows of a step mostly share one gap: those are counted together
                    self._gaps(gap_s, gap_tokens, now_s)
                    gap_s, gap_tokens = now_s - tracked.sent_s, tokens
                tracked.last_s = made_s
                tracked.sent_s = now_s
                tracked.output_tokens = delta.completion_tokens
            if delta.finish:
                self._end(tracked, delta.finish, now_s)
        self._gaps(gap_s, gap_tokens, now_s)
        if made:
            self.output_tokens += made
            self._per_second.add(now_s, 0, 0, 0, made)

    def forget_all(self) -> None:
        """The server failed: nobody will hear of what was under way."""
        self.alive.clear()

    def _first(self, tracked: Tracked, delta: Delta, made_s: float, now_s: float) -> None:
        tracked.first_s = made_s
        tracked.cached_tokens = delta.cached_tokens
        prompt_tokens = tracked.prompt_tokens or 0
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += delta.cached_tokens
        self.host_tokens += delta.host_tokens
        self._per_second.add(now_s, 0, prompt_tokens, delta.cached_tokens, 0)
        ttft_s = now_s - tracked.received_s
        self.ttft.observe(ttft_s)
        self._recent_ttft.add(now_s, ttft_s)
        if tracked.begun_s is not None and tracked.queued_s is not None:
            self._recent_queue.add(now_s, tracked.begun_s - tracked.queued_s)

    def _gaps(self, gap_s: float, tokens: int, now_s: float) -> None:
        """So many tokens came so long after the one before them."""
        if tokens:
            self.itl.observe(gap_s, tokens)
            self._recent_itl.add(now_s, gap_s, tokens)

    def _end(self, tracked: Tracked, finish: Finish, now_s: float) -> None:
        del self.alive[tracked.id]
        tracked.finish = finish
        self.finished[_FINISH_NAMES[finish]] += 1
        self._per_second.add(now_s, 1, 0, 0, 0)
        self.prompt_sizes.observe(tracked.prompt_tokens or 0)
        self.output_sizes.observe(tracked.output_tokens)
        self.max_tokens.observe(tracked.max_tokens)
        if tracked.first_s is not None and tracked.begun_s is not None:
            self._measure(tracked, now_s)

    def _measure(self, tracked: Tracked, now_s: float) -> None:
        queued_s, begun_s, first_s = tracked.queued_s, tracked.begun_s, tracked.first_s
        assert queued_s is not None and begun_s is not None and first_s is not None
        decode_s, e2e_s = tracked.last_s - first_s, tracked.sent_s - tracked.received_s
        self.queue.observe(begun_s - queued_s)
        self.prefill.observe(first_s - begun_s)
        self.decode.observe(decode_s)
        self.front_end.observe(queued_s - tracked.received_s + tracked.sent_s - tracked.last_s)
        self.e2e.observe(e2e_s)
        self._recent_e2e.add(now_s, e2e_s)
        if tracked.output_tokens > 1:
            self.token_time.observe(decode_s / (tracked.output_tokens - 1))

    # What GET /live asks

    @property
    def encoding(self) -> int:
        """Requests that no thread behind the tokenizers has told of."""
        return sum(each.prompt_tokens is None for each in self.alive.values())

    def throughput(self, now_s: float) -> Throughput:
        return Throughput(*self._per_second.rates(now_s))

    def latency(self, now_s: float) -> Latency:
        recent = (self._recent_ttft, self._recent_itl, self._recent_queue, self._recent_e2e)
        return Latency(*(each.quantiles(now_s) for each in recent))

    def running(self, prefilling: Iterable[int], now_s: float) -> tuple[RunningRequest, ...]:
        """The oldest MOST_REQUESTS that are not over.

        prefilling  ids of those that have a row, and no token yet
        """
        in_prefill = set(prefilling)
        oldest = islice(self.alive.values(), MOST_REQUESTS)
        return tuple(_running(each, _phase(each, in_prefill), now_s) for each in oldest)


def _running(tracked: Tracked, phase: str, now_s: float) -> RunningRequest:
    trace = tracked.trace
    return RunningRequest(
        id=None if trace is None else trace.response_id,
        request_id=None if trace is None else trace.request_id,
        phase=phase,
        age_s=now_s - tracked.received_s,
        prompt_tokens=tracked.prompt_tokens,
        cached_tokens=tracked.cached_tokens,
        output_tokens=tracked.output_tokens,
        max_output_tokens=tracked.max_tokens,
    )


def _phase(tracked: Tracked, in_prefill: set[int]) -> str:
    if tracked.first_s is not None:
        return "decode"
    if tracked.id in in_prefill:
        return "prefill"
    return "encoding" if tracked.prompt_tokens is None else "waiting"
