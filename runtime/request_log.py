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

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

from engine.request import Delta, Finish, SamplingParams, Started
from httpd.traces import Trace
from runtime.live import MOST_REQUESTS, RunningRequest
from runtime.metrics.tally import Tally

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
    """Requests under way, and what all came to. Owned by its HTTP loop; any thread may read the
    tally."""

    def __init__(self) -> None:
        self.alive: dict[int, Tracked] = {}  # in order of arrival
        self.tally = Tally()

    # A request's way

    def open(
        self,
        ids: Sequence[int],
        params: Sequence[SamplingParams],
        trace: Trace | None,
        now_s: float,
    ) -> None:
        """Requests that share a prompt are on their way."""
        self.tally.choices.observe(len(ids))
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
            self.tally.output_tokens += made
            self.tally.per_second.add(now_s, 0, 0, 0, made)

    def forget_all(self) -> None:
        """The server failed: nobody will hear of what was under way."""
        self.alive.clear()

    def _first(self, tracked: Tracked, delta: Delta, made_s: float, now_s: float) -> None:
        tally = self.tally
        tracked.first_s = made_s
        tracked.cached_tokens = delta.cached_tokens
        prompt_tokens = tracked.prompt_tokens or 0
        tally.prompt_tokens += prompt_tokens
        tally.cached_tokens += delta.cached_tokens
        tally.host_tokens += delta.host_tokens
        tally.per_second.add(now_s, 0, prompt_tokens, delta.cached_tokens, 0)
        ttft_s = now_s - tracked.received_s
        tally.ttft.observe(ttft_s)
        tally.recent_ttft.add(now_s, ttft_s)
        if tracked.begun_s is not None and tracked.queued_s is not None:
            tally.recent_queue.add(now_s, tracked.begun_s - tracked.queued_s)

    def _gaps(self, gap_s: float, tokens: int, now_s: float) -> None:
        """So many tokens came so long after the one before them."""
        if tokens:
            self.tally.itl.observe(gap_s, tokens)
            self.tally.recent_itl.add(now_s, gap_s, tokens)

    def _end(self, tracked: Tracked, finish: Finish, now_s: float) -> None:
        tally = self.tally
        del self.alive[tracked.id]
        tracked.finish = finish
        tally.finished[_FINISH_NAMES[finish]] += 1
        tally.per_second.add(now_s, 1, 0, 0, 0)
        tally.prompt_sizes.observe(tracked.prompt_tokens or 0)
        tally.output_sizes.observe(tracked.output_tokens)
        tally.max_tokens.observe(tracked.max_tokens)
        if tracked.first_s is not None and tracked.begun_s is not None:
            self._measure(tracked, now_s)

    def _measure(self, tracked: Tracked, now_s: float) -> None:
        queued_s, begun_s, first_s = tracked.queued_s, tracked.begun_s, tracked.first_s
        assert queued_s is not None and begun_s is not None and first_s is not None
        tally = self.tally
        decode_s, e2e_s = tracked.last_s - first_s, tracked.sent_s - tracked.received_s
        tally.queue.observe(begun_s - queued_s)
        tally.prefill.observe(first_s - begun_s)
        tally.decode.observe(decode_s)
        tally.front_end.observe(queued_s - tracked.received_s + tracked.sent_s - tracked.last_s)
        tally.e2e.observe(e2e_s)
        tally.recent_e2e.add(now_s, e2e_s)
        if tracked.output_tokens > 1:
            tally.token_time.observe(decode_s / (tracked.output_tokens - 1))

    # What GET /live asks

    @property
    def encoding(self) -> int:
        """Requests that no thread behind the tokenizers has told of."""
        return sum(each.prompt_tokens is None for each in self.alive.values())

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
