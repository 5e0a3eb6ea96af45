"""Between host and device: descriptors in, sampled ids out, each through a ring of buffers.

Decode steps that need no copies pass by the former, and `ResultRing` only follows them.

Rules
- One copy a step at most, in either direction, each on a stream of its own.
- A pinned buffer is written again only after the copy that read it; a device buffer only after the
  step that read it; a result's buffer only after its step was collected.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from engine.descriptor import StepDescriptor
from engine.logprobs import StepLogprobs
from engine.request import Int32Array
from engine.scoring import StepScores
from engine.streams import Event, Streams
from gpu_ops.device_rows import Changes, DeviceRows
from gpu_ops.host_ring import PLACES, HostRing

RING: Final = PLACES  # steps: two in flight, one being written, one to spare


class Slot:
    """A pinned buffer and its place on the device. Owned by the engine thread.

    changes  applies the descriptor that the device's part holds
    """

    def __init__(self, streams: Streams, words: int, rows: DeviceRows) -> None:
        host = streams.pinned(words)
        self._pinned = host  # kept alive
        self.host: Int32Array = host.numpy()
        self.device = torch.empty(words, dtype=torch.int32, device=rows.decode_rows.device)
        self.addresses = self.device.data_ptr(), host.data_ptr()
        self.changes = Changes(self.device, rows)
        self.arrived, self.read = streams.event(), streams.event()


class StagingRing:
    """Takes a step's arrays to the device. Owned by the engine thread."""

    def __init__(self, streams: Streams, rows: DeviceRows, words: int) -> None:
        self._streams, self._rows = streams, rows
        self._slots = [Slot(streams, words, rows) for _ in range(RING)]
        self._next = 0

    def send(self, parts: Sequence[Int32Array]) -> Slot:
        """The arrays, one after another in the slot's device tensor; the forward stream waits.

        The caller records `read` when all that reads them is launched.
        """
        slot, streams = self._take(sum(part.size for part in parts)), self._streams
        words = 0
        for part in parts:
            slot.host[words : words + part.size] = part
            words += part.size
        streams.copy_in.wait_event(slot.read)
        streams.copy(*slot.addresses, 4 * words, streams.copy_in)
        slot.arrived.record(streams.copy_in)
        streams.forward.wait_event(slot.arrived)
        return slot

    def _take(self, words: int) -> Slot:
        index = self._next
        self._next = (index + 1) % RING
        slot = self._slots[index]
        slot.arrived.synchronize()
        if words > slot.host.size:
            # Rare: the buffers are made for the largest step there usually is.
            slot.read.synchronize()
            slot = self._slots[index] = Slot(self._streams, 2 * words, self._rows)
        return slot


class CollectedStep:
    """A step whose ids are on their way to the host, or there. Owned by the engine thread.

    read  gives the ids, [sampled] int32, the caller's own, once `event` is done
    """

    def __init__(self, read: Callable[[], Int32Array], event: Event, scores: StepScores) -> None:
        self._read: Callable[[], Int32Array] | None = read
        self._event = event
        self._scores = scores
        self._ids = np.empty(0, np.int32)

    def wait_tokens_sync(self) -> Int32Array:
        """[sampled] int32, the caller's own. May be asked for again."""
        if self._read is not None:
            self._event.synchronize()
            self._ids = self._read()
            self._read = None
        return self._ids

    def wait_logprobs_sync(self) -> StepLogprobs | None:
        """None where no row of the step asked for any."""
        return self._scores.to_host_sync()


class ResultRing:
    """Takes sampled ids to the host. Owned by the engine thread."""

    def __init__(self, streams: Streams, device: torch.device, most_sampled: int) -> None:
        self._streams = streams
        ids = torch.zeros((RING, most_sampled), dtype=torch.int32, device=device)
        self._ids = ids.unbind(0)
        pinned = [streams.pinned(most_sampled) for _ in range(RING)]
        self._host: list[Int32Array] = [host.numpy() for host in pinned]  # which keep the memory
        self._addresses = [
            (host.data_ptr(), ids.data_ptr()) for host, ids in zip(pinned, self._ids, strict=True)
        ]
        self._events = [(streams.event(), streams.event()) for _ in range(RING)]
        self._steps: list[CollectedStep | None] = [None] * RING
        self._next = 0

    def take(self) -> torch.Tensor:
        """[most sampled] int32 on the device: where the next step's ids go."""
        step = self._steps[self._next]
        if step is not None:
            step.wait_tokens_sync()
        return self._ids[self._next]

    def send(self, sampled: int, scores: StepScores) -> CollectedStep:
        """The first `sampled` of the ids taken last, once the forward stream has them."""
        index, streams = self._next, self._streams
        self._next = (index + 1) % RING
        computed, copied = self._events[index]
        computed.record(streams.forward)
        streams.copy_out.wait_event(computed)
        if sampled:
            streams.copy(*self._addresses[index], 4 * sampled, streams.copy_out)
        copied.record(streams.copy_out)
        read = self._host[index][:sampled].copy
        step = self._steps[index] = CollectedStep(read, copied, scores)
        return step

    def follow(self, read: Callable[[], Int32Array]) -> CollectedStep:
        """As `send`, for ids that come by themselves: `read` gives them once the step is over."""
        index = self._next
        self._next = (index + 1) % RING
        computed, _ = self._events[index]
        computed.record(self._streams.forward)
        step = self._steps[index] = CollectedStep(read, computed, StepScores((), ()))
        return step


def host_ring(streams: Streams, device: torch.device, most_rows: int) -> HostRing:
    """For decode steps of up to so many rows."""
    nothing = StepDescriptor(step=0, decode_rows=np.empty(0, np.int32), same_decode_rows=True)
    return HostRing(streams.pinned, most_rows, device, nothing.encode())
