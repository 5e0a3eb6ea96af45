"""The streams and events of a CUDA device, as the executor uses them.

A test puts a host in its place (tests/fakes_streams.py), where everything is done at once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_ops.cuda_launch import copy_no_sync, copy_rows_no_sync, pin_memory, unpin_memory
from gpu_ops.rows_copy import RowsCopy


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: "Stream") -> None: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Work that runs in order."""

    @property
    def cuda_stream(self) -> int:
        """The driver's handle."""
        ...

    def wait_event(self, event: Event) -> None: ...


class Streams(Protocol):
    """Where a step's parts run. Owned by the engine thread."""

    copy_in: Stream  # descriptors to the device
    forward: Stream  # everything that computes
    copy_out: Stream  # sampled ids to the host
    pages: Stream  # KV pages to host memory and back

    def enter_thread(self) -> None:
        """Once, where a thread begins to launch."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """What is launched inside goes to `stream`."""
        ...

    def event(self) -> Event: ...

    def copy(self, to: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Copies between two addresses, of the device or of pinned memory."""
        ...

    def copy_rows(self, copy: RowsCopy, stream: Stream) -> None:
        """Between the device and pinned memory."""
        ...

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """The device reads and writes it from now on while the host goes on; `unpin` it before it
        is given back. Touches all of it."""
        ...

    def unpin(self, memory: NDArray[np.uint8]) -> None: ...

    def pinned(self, words: int) -> torch.Tensor:
        """[words] int32 on the host, which the device reads and writes while the host goes on."""
        ...


class CudaStreams:
    """Streams of one CUDA device. Owned by the engine thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with its index
        cuda: Any = torch.cuda  # its classes are not typed
        self._event: Callable[[], Event] = cuda.Event
        self.copy_in: Stream = cuda.Stream(device)
        self.copy_out: Stream = cuda.Stream(device)
        self.pages: Stream = cuda.Stream(device)
        # First where the device must choose.
        self.forward: Stream = cuda.Stream(device, priority=-1)

    def enter_thread(self) -> None:
        # The driver's own calls need a context, which a thread gets with its first runtime call.
        torch.cuda.set_device(self._device)
        torch.cuda.mem_get_info(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream)
        context: AbstractContextManager[object] = torch.cuda.stream(stream)
        return context

    def event(self) -> Event:
        return self._event()

    def copy(self, to: int, source: int, size_bytes: int, stream: Stream) -> None:
        copy_no_sync(to, source, size_bytes, stream.cuda_stream)

    def copy_rows(self, copy: RowsCopy, stream: Stream) -> None:
        copy_rows_no_sync(copy, stream.cuda_stream)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        pin_memory(memory.ctypes.data, memory.nbytes)

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        unpin_memory(memory.ctypes.data)

    def pinned(self, words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int32, pin_memory=True)
