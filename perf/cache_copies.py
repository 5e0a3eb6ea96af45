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

_NO_ROWS: Final = np.empty(0, np.int32)


class CopyDriver:
    """Steps made by hand: copies, decode rows, or both. Owned by the caller."""

    def __init__(self, executor: Executor, rows: int, pages: int, steps: int) -> None:
        """
        rows   that decode
        pages  that a step copies
        steps  of each measurement
        """
        self._executor, self._rows, self._copied, self._steps = executor, rows, pages, steps
        self._step = 0
        self._first_free = 1
        self._launched: list[LaunchedStep] = []

    def begin_decoding(self) -> None:
        """The rows get a token, and pages for all measurements."""
        size, rows = self._executor.page_size, np.arange(self._rows, dtype=np.int32)
        each = -(-(2 + 4 * (self._steps + 2)) // size)
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

    def copy_gb_per_s(self, direction: int, page_bytes: int) -> float:
        """Of copies alone."""
        wall_s = self._timed(lambda: self._launch(copies=self._copies(direction)))
        return self._steps * self._copied * page_bytes / wall_s / 1e9

    def decode_ms(self, direction: int | None) -> float:
        """Of a step, beside copies in this direction."""
        rows = np.arange(self._rows, dtype=np.int32)
        copies = NO_COPIES if direction is None else self._copies(direction)
        return 1e3 * self._timed(lambda: self._launch(rows, copies=copies)) / self._steps

    def _copies(self, direction: int) -> PageCopies:
        slots = np.arange(1, 1 + self._copied, dtype=np.int32)
        pages = slots - 1 + self._first_free
        return PageCopies(np.stack([np.full_like(slots, direction), pages, slots], axis=1))

    def _timed(self, launch: Callable[[], None]) -> float:
        """Seconds for all steps, their copies included."""
        launch()
        self._finish()
        begun = time.perf_counter()
        for _ in range(self._steps):
            launch()
            if len(self._launched) > 1:
                self._launched.pop(0).wait_tokens_sync()
        self._finish()
        return time.perf_counter() - begun

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
    """Pages out and in: alone, and beside decode steps."""
    size = bench.size
    pages = max(1, min(COPIED_BYTES_A_STEP // bench.page_bytes, size.most_copied))
    each = -(-(2 + 4 * (size.copy_steps + 2)) // size.page_size)
    engine = bench.engine(
        max_kv_tokens=(1 + size.clients * each + pages) * size.page_size,
        max_model_len=each * size.page_size,
        max_running=size.clients,
        host_cache_gib=(pages + 2) * bench.page_bytes / 2**30,
    )
    driver = CopyDriver(engine._executor, size.clients, pages, size.copy_steps)
    driver.begin_decoding()
    decode_ms = {name: driver.decode_ms(direction) for name, direction in _BESIDE.items()}
    found = {
        "rows": size.clients,
        "pages_a_step": pages,
        "mb_a_step": pages * bench.page_bytes / 1e6,
        "out_gb_per_s": driver.copy_gb_per_s(PAGE_OUT, bench.page_bytes),
        "in_gb_per_s": driver.copy_gb_per_s(PAGE_IN, bench.page_bytes),
        "decode_ms": decode_ms,
        "slowdown_beside_out": decode_ms["beside out"] / decode_ms["alone"],
        "slowdown_beside_in": decode_ms["beside in"] / decode_ms["alone"],
    }
    engine.close()
    return found


_BESIDE: Final = {"alone": None, "beside out": PAGE_OUT, "beside in": PAGE_IN}
