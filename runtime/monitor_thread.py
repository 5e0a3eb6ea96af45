"""The monitor thread: reports what the machine can carry, then looks at its GPUs once a second.

Knows no requests. Nobody waits for it: a driver that hangs makes its samples old, and nothing else.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine.core import EngineStats
from runtime.capacity.estimate import Asked, report_on
from runtime.capacity.gpu import Gpus
from runtime.capacity.host import read_host
from runtime.capacity.nvml import Nvml
from runtime.capacity.report import Capacity, Host
from runtime.capacity.warn import Watch
from runtime.inbox import Inbox, Wakeup
from runtime.latest import Latest
from runtime.live import WINDOW_S, Warned
from runtime.worker import Pulse

log = logging.getLogger(__name__)

EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the monitor saw last."""

    at_s: float  # time.monotonic()
    gpus: Gpus
    host: Host
    warnings: tuple[Warned, ...]
    before: tuple[float, EngineStats] | None  # what the engine told a window ago, and when


@dataclass(frozen=True, slots=True)
class MonitorRings:
    """What the monitor reads and tells."""

    wakeup: Wakeup
    stats: Latest[EngineStats]
    capacity: Latest[Capacity]  # as it was before the model was loaded
    sample: Latest[Sample]


class MonitorLoop:
    """Samples and warns. Owned by the monitor thread."""

    def __init__(
        self,
        rings: MonitorRings,
        asked: Asked | None,
        tell: Callable[[Capacity], None],
        open_nvml: Callable[[], Nvml] = Nvml,
    ) -> None:
        """
        asked  what the report is about; None: the machine alone
        tell   is given the report once, on this thread
        """
        self._rings = rings
        self._asked = asked
        self._tell = tell
        self._open_nvml = open_nvml
        self._inbox = Inbox(rings.wakeup, [])
        self._told: deque[tuple[float, EngineStats]] = deque()
        self._watch = Watch()

    def run(self, pulse: Pulse) -> None:
        """The thread's body."""
        pulse.watched = False  # a driver may hang, and no request needs it
        nvml = self._open_nvml()
        try:
            report = report_on(nvml.read(), read_host(), self._asked)
            self._rings.capacity.value = report
            self._tell(report)
            while not pulse.is_stopping:
                self._rings.sample.value = self._sample(nvml.read(), time.monotonic())
                self._inbox.wait(EVERY_S)
        finally:
            nvml.close()

    def _sample(self, gpus: Gpus, now_s: float) -> Sample:
        host, stats = read_host(), self._rings.stats.value
        if stats is not None:
            self._told.append((now_s, stats))
        while self._told and self._told[0][0] < now_s - WINDOW_S:
            self._told.popleft()
        warnings = self._watch.look(gpus, host, stats, now_s)
        return Sample(now_s, gpus, host, warnings, self._told[0] if self._told else None)
