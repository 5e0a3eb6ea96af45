"""Host memory for KV pages, and the copies between it and the device. Decides nothing.

One strided copy a page: on the device a page is one piece in each layer's keys and values; in host
memory these pieces lie side by side.
"""

import ctypes
from collections.abc import Callable

import numpy as np

from engine.descriptor import PAGE_OUT
from engine.kv_cache import KvCache
from engine.request import Int32Array
from gpu_ops.rows_copy import RowsCopy


class HostPages:
    """Slots of host memory, each as large as a page. Owned by the engine thread.

    slots      slot 0 is never used
    copy_rows  how a page is copied; it may return before it is done
    """

    def __init__(self, cache: KvCache, slots: int, copy_rows: Callable[[RowsCopy], None]) -> None:
        pages, *_ = cache.keys[0].shape
        self._width = cache.keys[0][0].nbytes
        self._rows = 2 * len(cache.keys)
        self._pitch = pages * self._width
        self._cache = cache  # kept alive
        first = cache.keys[0].data_ptr()
        pieces = [part.data_ptr() for part in (*cache.keys, *cache.values)]
        assert pieces == [first + row * self._pitch for row in range(self._rows)], "not one block"
        self._device = first
        # Taken from the system only as slots are first written, unless it is pinned.
        self.memory = np.zeros((slots, self._rows * self._width), np.uint8)
        self._host = self.memory.ctypes.data
        self._copy_rows = copy_rows

    def copy(self, copies: Int32Array) -> None:
        """Starts the copies, in order. [n, 3] int32, as in a descriptor."""
        width, rows, pitch, slot_bytes = self._width, self._rows, self._pitch, self.memory.shape[1]
        for direction, page, slot in copies.tolist():
            device, host = self._device + page * width, self._host + slot * slot_bytes
            if direction == PAGE_OUT:
                self._copy_rows(RowsCopy(host, width, device, pitch, width, rows))
            else:
                self._copy_rows(RowsCopy(device, pitch, host, width, width, rows))


def copy_rows_at_once(copy: RowsCopy) -> None:
    """Within host memory: done on return."""
    for to, source in copy.addresses():
        ctypes.memmove(to, source, copy.width)
