"""Which requests have become too old.

Knows no clock: whoever calls says what time it is. Ages count from the request's arrival, so they
are the same for a request that was retracted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from engine.rows import Rows
from engine.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How old a request may become, in seconds; None is any age."""

    queue_s: float | None = None  # before it first starts
    running_s: float | None = None  # once it has started

    def expired(self, now_s: float, queue: WaitingQueue, rows: Rows) -> list[tuple[int, str]]:
        """Of each request that is too old, its id and what to tell the client.

        now_s  on the clock of `Request.arrived_s`

        Walks the queue only where its oldest request may be too old.
        """
        return [*self._waiting(now_s, queue), *self._running(now_s, rows)]

    def _waiting(self, now_s: float, queue: WaitingQueue) -> Iterator[tuple[int, str]]:
        limits = [limit for limit in (self.queue_s, self.running_s) if limit is not None]
        if not limits or not len(queue) or now_s - queue.oldest.request.arrived_s < min(limits):
            return
        for waiting in queue:
            limit = self.running_s if waiting.retracted else self.queue_s
            if limit is not None and now_s - waiting.request.arrived_s >= limit:
                yield waiting.request.id, _late(limit) if waiting.retracted else _busy(limit)

    def _running(self, now_s: float, rows: Rows) -> Iterator[tuple[int, str]]:
        if self.running_s is None:
            return
        for row in rows.live().tolist():
            request = rows.requests[row]
            if request is not None and now_s - request.arrived_s >= self.running_s:
                yield request.id, _late(self.running_s)


NO_TIMEOUTS: Final = Timeouts()


def _busy(limit_s: float) -> str:
    return f"The server is busy: the request did not start within {limit_s:g} s. Try again later."


def _late(limit_s: float) -> str:
    return f"The request took longer than {limit_s:g} s, which is the server's limit."
