"""Whether a load kept up itself: what its own threads did with their time.

A client that is late makes a server look slow. Two signs of it: a thread that worked nearly all of
the time, and a loop that ran later than it was told to, for want of a processor, too.

Knows no requests.
"""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

BUSY_SHARE: Final = 0.8  # above it, what comes waits for what came before
LAG_MS: Final = 50.0  # as far as people see it
_LOOK_S: Final = 0.02  # between two looks at the loop's lag
_USERS_A_THREAD: Final = 32  # at 75 events a second of each, a sixth of a processor's time


def threads_for(users: int, processors: int | None = None) -> int:
    """How many load threads suit: one for 32 users; half of the processors are left to others.

    processors  None: those that this process may use
    """
    processors = processors or len(os.sched_getaffinity(0))
    return max(1, min(math.ceil(users / _USERS_A_THREAD), processors // 2))


@dataclass(frozen=True, slots=True)
class Strain:
    """How hard it was for a load's threads; of each figure the worst of them."""

    threads: int
    busy_share: float  # processor time over time
    lag_p99_ms: float  # how late a loop was

    @property
    def is_busy(self) -> bool:
        return self.busy_share > BUSY_SHARE

    @property
    def is_late(self) -> bool:
        return self.lag_p99_ms > LAG_MS

    @property
    def is_too_much(self) -> bool:
        return self.is_busy or self.is_late

    def __str__(self) -> str:
        threads = "thread" if self.threads == 1 else "threads"
        return (
            f"{self.threads} load {threads}, busy for {self.busy_share:.0%} of the time, "
            f"late by {self.lag_p99_ms:,.1f} ms (p99)"
        )


def worst(strains: Sequence[Strain]) -> Strain:
    return Strain(
        sum(each.threads for each in strains),
        max((each.busy_share for each in strains), default=0.0),
        max((each.lag_p99_ms for each in strains), default=0.0),
    )


class Watch:
    """Watches one thread and its loop. Owned by that thread."""

    def __init__(self) -> None:
        self._begun_s, self._worked_s = time.perf_counter(), time.thread_time()
        self._late_s: list[float] = []

    async def look(self) -> None:
        """Until it is cancelled."""
        while True:
            due_s = time.perf_counter() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            self._late_s.append(time.perf_counter() - due_s)

    def strain(self) -> Strain:
        """Since the beginning."""
        passed_s = time.perf_counter() - self._begun_s
        worked_s = time.thread_time() - self._worked_s
        late_s = float(np.percentile(self._late_s, 99)) if self._late_s else 0.0
        return Strain(1, worked_s / max(passed_s, 1e-9), max(0.0, late_s) * 1e3)


@asynccontextmanager
async def watching() -> AsyncIterator[Watch]:
    """Watches the loop that it is on, until the end of the block."""
    watch = Watch()
    looking = asyncio.create_task(watch.look())
    try:
        yield watch
    finally:
        looking.cancel()
        await asyncio.wait([looking])
