"""A thread that is watched: it beats while it is well, and its end is never silent.

Guarantees: an exception that leaves the body, of any kind, ends the server with its stack in the
log; so does a body that returns before the server stops. Knows nothing of what bodies do.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from httpd.service import State
from runtime.channel import Sender
from runtime.lifecycle import Failure, Lifecycle

log = logging.getLogger(__name__)

TICK_S: Final = 0.25  # the longest that a thread sleeps, or waits for room, between two beats


class Stopped(Exception):
    """Raised inside a body that waits for something when the server stops."""


class OperatorError(Exception):
    """What an operator must put right; told without a stack, which would hide it."""


class Pulse:
    """The sign of life of one thread. Owned by that thread; the monitor reads it.

    Each field is replaced whole, by the owner alone (library/threadsafety).
    """

    __slots__ = ("_lifecycle", "last_beat_s", "watched")

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self.last_beat_s: float | None = None  # time.monotonic(); None before the thread runs
        self.watched = True  # False while a long silence is no fault, as in loading

    def beat(self) -> None:
        self.last_beat_s = time.monotonic()

    @property
    def is_stopping(self) -> bool:
        return self._lifecycle.is_stopping

    def push(self, sender: Sender[Any], item: object) -> None:
        """Sends, waiting for room as long as it takes: backpressure. Raises Stopped."""
        while not sender.push_wait(item, TICK_S):
            self.beat()
            if self.is_stopping:
                raise Stopped


class Worker:
    """One thread and its pulse. Owned by the main thread."""

    def __init__(
        self,
        name: str,
        body: Callable[[Pulse], None],
        lifecycle: Lifecycle,
        *,
        ends_first: bool = False,
    ) -> None:
        """
        body        runs on the thread; returns once `is_stopping`
        ends_first  it may return before that, as soon as the server drains or has failed
        """
        self.name = name
        self.pulse = Pulse(lifecycle)
        self._body = body
        self._ends_first = ends_first
        self._lifecycle = lifecycle
        # A daemon, so that a thread that hangs cannot keep a failed process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """True once the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def silent_s(self, now_s: float) -> float:
        """Seconds since the last beat; 0 before the first and while nobody is to watch."""
        last_beat_s = self.pulse.last_beat_s
        if last_beat_s is None or not self.pulse.watched:
            return 0.0
        return now_s - last_beat_s

    def _run(self) -> None:
        try:
            self.pulse.beat()
            self._body(self.pulse)
            if not self._may_return():
                raise RuntimeError(f"the {self.name} thread returned while the server runs")
        except Stopped:
            pass
        except BaseException as error:  # a panic inside a Rust extension is no Exception
            report_failure(self.name, error, self._lifecycle)

    def _may_return(self) -> bool:
        if self._ends_first and self._lifecycle.state in (State.DRAINING, State.FAILED):
            return True
        return self._lifecycle.is_stopping


def report_failure(thread: str, error: BaseException, lifecycle: Lifecycle) -> None:
    """Ends the server for `error`, with its stack in the log."""
    if isinstance(error, OperatorError):
        lifecycle.fail(Failure(thread, str(error)))
        return
    cause = f"{type(error).__name__}: {error}"
    log.critical("the %s thread failed: %s", thread, cause, exc_info=error)
    lifecycle.fail(Failure(thread, cause))
