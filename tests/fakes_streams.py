"""A host in the place of a device's streams: everything is done when it is launched."""

import ctypes
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from engine.host_pages import copy_rows_at_once
from engine.streams import Event, Stream
from gpu_ops.rows_copy import RowsCopy


class HostEvent:
    """Remembers whether it was recorded; waiting for one that was not is a mistake in the rings."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        """Everything recorded is done."""


class HostStream:
    """Counts the waits."""

    cuda_stream = 0

    def __init__(self) -> None:
        self.waits = 0

    def wait_event(self, event: Event) -> None:
        self.waits += 1


class HostStreams:
    """As `CudaStreams`, on the host. `copies_in` counts descriptors' copies."""

    def __init__(self) -> None:
        self.copy_in, self.forward, self.copy_out = HostStream(), HostStream(), HostStream()
        self.pages = HostStream()

    @property
    def copies_in(self) -> int:
        return self.copy_in.waits

    def enter_thread(self) -> None:
        """Threads of a host need nothing."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> Event:
        return HostEvent()

    def copy(self, to: int, source: int, size_bytes: int, stream: Stream) -> None:
        ctypes.memmove(to, source, size_bytes)

    def copy_rows(self, copy: RowsCopy, stream: Stream) -> None:
        copy_rows_at_once(copy)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Nothing of a host's memory moves."""

    def unpin(self, memory: NDArray[np.uint8]) -> None: ...

    def pinned(self, words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int32)
