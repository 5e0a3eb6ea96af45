"""Copies between the device and host memory: their bandwidth, and what they cost the engine.

Steps are made by hand and given to an executor, with no scheduler in between.
"""

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from engine.descriptor import (
    JOINED_WORDS,
    NO_COPIES,
    PAGE_IN,
    PAGE_OUT,
    PageCopies,
    StepDescriptor,
)
from engine.executor import Executor, LaunchedStep
from engine.limits import COPIED_BYTES_A_STEP
from engine.request import Int32Array
from perf.cache_runs import Bench

_DECODE_RUNS: Final = 7  # measurements of decode steps: each row's tokens
_NO_ROWS: Final = np.empty(0, np.int32)


class CopyDriver:
    """Steps made by hand: copies, decode rows, or both. Owned by the caller."""

    def __init__(self, executor: Executor, rows: int, steps: int) -> None:
        """
        rows   that decode
        steps  of each measurement
        """
        self._executor, self._rows, self._steps = executor, rows, steps
        self._step = 0
        self._first_free = 1
        self._launched: list[LaunchedStep] = []

    def begin_decoding(self) -> None:
        """The rows get a token, and pages for all measurements."""
        size, rows = self._executor.page_size, np.arange(self._rows, dtype=np.int32)
        each = -(-(2 + _DECODE_RUNS * (self._steps + 2)) // size)
        pages = np.arange(1, 1 + self._rows * each, dtype=np.int32)
        self._first_free = 1 + len(pages)
        joined = np.zeros((self._rows, JOINED_WORDS), np.int32)
        joined[:, 0] = rows
        zeros, ones = np.zeros_like(rows), np.ones_like(rows)
        index = np.tile(np.arange(each, dtype=np.int32), self._rows)
        self._launch(
            joined=joined,
            page_writes=np.stack([rows.repeat(each), index, pages], axis=1),
            segments=np.stack([rows, zeros, ones, ones], axis=1),
            prefill_tokens=rows + 1,
        )

    def copy_ms(self, direction: int, pages: int) -> float:
        """Of the copies of one step, without anything beside them."""
        return 1e3 * self._timed(lambda: self._launch(copies=self._copies(direction, pages)))

    def decode_ms(self, direction: int, pages: int) -> float:
        """Of a step, beside copies of so many pages in this direction."""
        rows, copies = np.arange(self._rows, dtype=np.int32), self._copies(direction, pages)
        return 1e3 * self._timed(lambda: self._launch(rows, copies=copies))

    def _copies(self, direction: int, pages: int) -> PageCopies:
        if not pages:
            return NO_COPIES
        slots = np.arange(1, 1 + pages, dtype=np.int32)
        pages_on_device = slots - 1 + self._first_free
        return PageCopies(
            np.stack([np.full_like(slots, direction), pages_on_device, slots], axis=1)
        )

    def _timed(self, launch: Callable[[], None]) -> float:
        """Seconds of a step, in the mean of all; the last copies are waited for."""
        launch()
        self._finish()
        begun = time.perf_counter()
        for _ in range(self._steps):
            launch()
            if len(self._launched) > 1:
                self._launched.pop(0).wait_tokens_sync()
        self._finish()
        return (time.perf_counter() - begun) / self._steps

    def _finish(self) -> None:
        self._launch()  # which waits for the copies before it
        for step in self._launched:
            step.wait_tokens_sync()
        self._launched.clear()

    def _launch(self, decode_rows: Int32Array = _NO_ROWS, **parts: Any) -> None:
        self._step += 1
        descriptor = StepDescriptor(self._step, decode_rows, max_length=1, **parts)
        self._launched.append(self._executor.launch_no_sync(descriptor.encode()))


def measure_copies(bench: Bench) -> dict[str, Any]:
    """Pages out and in: alone, and beside decode steps.

    A step with as many copies as the engine allows takes as long as they do. What they cost those
    who only decode is the slowdown beside copies that take half as long as a step.
    """
    size = bench.size
    most = max(1, min(COPIED_BYTES_A_STEP // bench.page_bytes, size.most_copied))
    tokens = 2 + _DECODE_RUNS * (size.copy_steps + 2)
    each = -(-tokens // size.page_size)
    engine = bench.engine(
        max_kv_tokens=(1 + size.clients * each + most) * size.page_size,
        max_model_len=each * size.page_size,
        max_running=size.clients,
        host_cache_gib=(most + 2) * bench.page_bytes / 2**30,
    )
    driver = CopyDriver(engine._executor, size.clients, size.copy_steps)
    driver.begin_decoding()
    alone_ms = driver.decode_ms(PAGE_OUT, 0)
    found: dict[str, Any] = {"rows": size.clients, "page_mb": bench.page_bytes / 1e6}
    for name, direction in (("out", PAGE_OUT), ("in", PAGE_IN)):
        copy_ms = driver.copy_ms(direction, most)
        half = min(most, max(1, int(most * alone_ms / 2 / copy_ms)))
        decode_ms = {pages: driver.decode_ms(direction, pages) for pages in (0, half, most)}
        found[name] = {
            "gb_per_s": most * bench.page_bytes / copy_ms / 1e6,
            "decode_ms_by_pages": decode_ms,
            "slowdown_beside_half_a_step": decode_ms[half] / decode_ms[0],
        }
    engine.close()
    return found
