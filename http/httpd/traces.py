"""One HTTP request's way through the server: when it came, what became of it, and of its parts.

`Edge` opens a trace for each request and closes it; whoever handles the request finds it by
`current_trace`, also in tasks that the handler starts. Kept of the last requests that generate or
are refused, for GET /debug/requests/{id}. Knows no text of any request.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from typing import Any, Final, Protocol

from httpd.copies import copy_of

MOST_TRACES: Final = 1024
CLIENT_LEFT: Final = 499  # nginx' number for a client that left before its answer began


class Part(Protocol):
    """One generation of a request: what the service keeps of it."""

    def told(self, received_s: float) -> dict[str, Any]:
        """As the schema `Timeline` says; times count from `received_s`."""
        ...


class Trace:
    """One request. Owned by its HTTP loop.

    Times are time.monotonic().
    """

    __slots__ = (
        "ended_s",
        "error",
        "parts",
        "path",
        "received_at_s",
        "received_s",
        "request_id",
        "response_id",
        "status",
        "traceparent",
    )

    def __init__(self, request_id: str, path: str, traceparent: str = "") -> None:
        """traceparent  the client's header of that name, as it came; empty: there was none"""
        self.request_id, self.path, self.traceparent = request_id, path, traceparent
        self.received_s, self.received_at_s = time.monotonic(), time.time()
        self.response_id: str | None = None
        self.status: int | None = None
        self.error: str | None = None  # code of what it was refused for, or failed with
        self.ended_s: float | None = None
        self.parts: list[Part] = []

    def told(self) -> dict[str, Any]:
        """As the schema `Timeline` says."""
        ended_s = None if self.ended_s is None else self.ended_s - self.received_s
        return {
            "request_id": self.request_id,
            "response_id": self.response_id,
            "path": self.path,
            "received_s": self.received_at_s,
            "status": self.status,
            "ended_s": ended_s,
            "error": self.error,
            "parts": [part.told(self.received_s) for part in self.parts],
        }


_CURRENT: Final[ContextVar[Trace | None]] = ContextVar("trace", default=None)


def current_trace() -> Trace | None:
    """The request that the calling task works for; None outside of one."""
    return _CURRENT.get()


class Traces:
    """Requests under way, the last ones, and how many ended in which way. Owned by its HTTP loop;
    others may read the counters, a moment late."""

    def __init__(
        self,
        paths: frozenset[str] = frozenset(),
        on_end: Callable[[Trace], None] | None = None,
    ) -> None:
        """
        paths   those that are counted by name; all else is "other", which nobody can blow up
        on_end  called with each that is kept, once it has ended; must not raise, nor take long
        """
        self.responses: Counter[tuple[str, int]] = Counter()  # by path and status
        self.refusals: Counter[str] = Counter()  # by code
        self._paths = paths
        self._on_end = on_end
        self._open: dict[int, Trace] = {}  # by identity: an id of a client's may come twice
        self._last: deque[Trace] = deque(maxlen=MOST_TRACES)

    @contextmanager
    def entry(self, request_id: str, path: str, traceparent: str = "") -> Iterator[Trace]:
        """The trace of one request while it is handled."""
        trace = Trace(request_id, path, traceparent)
        self._open[id(trace)] = trace
        token = _CURRENT.set(trace)
        try:
            yield trace
        finally:
            with suppress(ValueError):  # a coroutine that is closed from outside its context
                _CURRENT.reset(token)
            del self._open[id(trace)]
            trace.ended_s = time.monotonic()
            self._count(trace)

    def find(self, either_id: str) -> Trace | None:
        """The youngest of this x-request-id or this response id. Looks at all that are known.

        Safe from any thread.
        """
        under_way = [*self._open.copy().values()]
        for trace in chain(reversed(under_way), reversed(copy_of(self._last))):
            if either_id in (trace.request_id, trace.response_id):
                return trace
        return None

    def _count(self, trace: Trace) -> None:
        path = trace.path if trace.path in self._paths else "other"
        self.responses[path, trace.status or CLIENT_LEFT] += 1
        if trace.error is not None:
            self.refusals[trace.error] += 1
        # Whoever has no key must not push out the requests of those who have one.
        if trace.parts or (trace.error is not None and trace.status != 401 and path != "other"):
            self._last.append(trace)
            if self._on_end is not None:
                self._on_end(trace)
