"""The thread that sends traces: what HTTP loops leave when a request ends, in batches.

Guarantees
- Nobody waits for it. A loop leaves a trace in a bounded ring; where that is full, the trace is
  dropped and counted.
- A collector that is gone, slow or wrong costs traces and nothing else; it is said once, and once
  more when traces are taken again. Where some are lost again and again, that is said once a minute.

Knows nothing of OpenTelemetry: see otlp.py.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from httpd.traces import Trace
from runtime.channel import Channel
from runtime.inbox import Wakeup

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 1.0  # between two times of sending
_ROOM: Final = 4096  # traces of a loop: four seconds of a thousand requests each
_BATCH: Final = 256  # requests of one message, of about 2 KB each
_TELL_EVERY_S: Final = 60.0
_FLUSH_S: Final = 1.0  # at the end, for what is left


@dataclass(frozen=True, slots=True)
class Ended:
    """One request, whole."""

    timeline: dict[str, Any]  # as `Trace.told`; nobody writes it any more
    traceparent: str  # the client's header; empty: there was none


class TraceSender(Protocol):
    """What sends. `send` is called by the thread, `interrupt` by any."""

    def send(self, ended: Sequence[Ended]) -> str | None:
        """Why they could not be sent; None: they were. May take seconds."""
        ...

    def interrupt(self) -> None:
        """Makes a `send` give up where it waits to try again."""
        ...


class Telemetry:
    """The thread and the rings to it. Owned by the main thread, but for what `on_end` gives."""

    def __init__(
        self, endpoint: str, loops: int, make: Callable[[str], TraceSender], room: int = _ROOM
    ) -> None:
        """
        loops  HTTP loops, each of which has a ring
        make   called on the thread with the endpoint: it may import what takes seconds
        """
        self._endpoint, self._make = endpoint, make
        self._wakeup = Wakeup()  # what a ring wants; nobody sleeps at these
        self._rings = [Channel[Ended](room, self._wakeup) for _ in range(loops)]
        self._dropped = [0] * loops  # each written by its loop alone
        self._sender: TraceSender | None = None
        self._stop = threading.Event()
        # A daemon, as a library's wait for a dead host cannot be ended everywhere.
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def on_end(self, loop: int) -> Callable[[Trace], None]:
        """What this HTTP loop calls with each trace that has ended."""
        sender, dropped = self._rings[loop].sender, self._dropped

        def leave(trace: Trace) -> None:
            if not sender.try_push(Ended(trace.told(), trace.traceparent)):
                dropped[loop] += 1

        return leave

    def start(self) -> None:
        self._thread.start()

    def close(self, flush_s: float = _FLUSH_S, give_up_s: float = _FLUSH_S) -> bool:
        """Ends the thread; True once it has ended. The loops must have ended before.

        flush_s    for the last traces to be sent
        give_up_s  likewise for a `send` that is interrupted then
        """
        if self._thread.ident is None:
            return True
        self._stop.set()
        self._thread.join(flush_s)
        if self._thread.is_alive() and self._sender is not None:
            self._sender.interrupt()
            self._thread.join(give_up_s)
        has_ended = not self._thread.is_alive()
        if has_ended:
            self._wakeup.close()
        return has_ended

    # The thread's life

    def _run(self) -> None:
        try:
            self._sender = sender = self._make(self._endpoint)
        except Exception:  # a library's, whatever it may be: serving goes on
            log.exception("no traces are sent to %s", _shown(self._endpoint))
            return
        outcome = _Outcome(_shown(self._endpoint))
        while True:
            stops = self._stop.wait(_INTERVAL_S)
            self._send_all(sender, outcome)
            if stops:
                return

    def _send_all(self, sender: TraceSender, outcome: "_Outcome") -> None:
        ended = [each for ring in self._rings for each in ring.receiver.pop_all()]
        for start in range(0, len(ended), _BATCH):
            batch = ended[start : start + _BATCH]
            try:
                why = sender.send(batch)
            except Exception as error:  # likewise
                why = f"{type(error).__name__}: {error}"
            outcome.tell(why, len(batch), sum(self._dropped))


def _shown(url: str) -> str:
    """Without a name and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class _Outcome:
    """Says what changes: that traces are lost, and that they no longer are. Owned by the thread."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._fails = False
        self._lost = 0  # in batches that were not sent
        self._told_lost, self._told_s = 0, -math.inf

    def tell(self, why: str | None, requests: int, dropped: int) -> None:
        """
        why      the batch could not be sent; None: it was
        dropped  requests, so far, for which there was no room
        """
        self._lost += 0 if why is None else requests
        lost = self._lost + dropped
        if why is not None and not self._fails:
            log.warning("traces cannot be sent to %s, and are lost: %s", self._endpoint, why)
        elif why is None and lost > self._told_lost and (self._fails or self._is_due()):
            log.warning(
                "traces are sent to %s; of %d requests they were lost",
                self._endpoint, lost - self._told_lost,
            )  # fmt: skip
            self._told_lost, self._told_s = lost, time.monotonic()
        self._fails = why is not None

    def _is_due(self) -> bool:
        return time.monotonic() - self._told_s >= _TELL_EVERY_S
