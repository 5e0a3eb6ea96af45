"""The watch over all threads: a hang ends the server with every stack in the log.

Two levels. A thread that is silent too long is reported by the main thread. Where the main thread
itself cannot run any more, because some C code stops the whole interpreter, faulthandler's own C
thread writes the stacks and ends the process.
"""

import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Final

from runtime.lifecycle import Failure, Lifecycle
from runtime.worker import Worker

log = logging.getLogger(__name__)

_REARM_S: Final = 5.0  # arming starts a thread: not at every turn


class Watchdog:
    """Looks after the workers' pulses. Owned by the main thread."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limit_s  silence that is a hang"""
        self._lifecycle = lifecycle
        self._limit_s = limit_s
        self._clock = clock
        self._armed_s: float | None = None

    def check(self, workers: Sequence[Worker]) -> None:
        """Ends the server where one of `workers` hangs."""
        now_s = self._clock()
        for worker in workers:
            silent_s = worker.silent_s(now_s)
            if worker.is_alive and silent_s > self._limit_s:
                self._report(worker.name, silent_s)
        if self._armed_s is None or now_s - self._armed_s >= _REARM_S:
            self._armed_s = now_s
            self.arm(self._limit_s + 2 * _REARM_S)

    def arm(self, limit_s: float) -> None:
        """Ends the process after `limit_s`, whatever it does then, unless armed anew before."""
        faulthandler.dump_traceback_later(limit_s, exit=True)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _report(self, thread: str, silent_s: float) -> None:
        cause = f"no sign of life for {silent_s:.0f} s; the limit is {self._limit_s:g} s"
        if self._lifecycle.fail(Failure(thread, cause, is_hang=True)):
            log.critical("the %s thread hangs: %s", thread, cause)


def all_stacks() -> str:
    """The Python stack of every thread. Waits for each to reach a point where it can be read."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"Thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)
