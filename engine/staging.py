"""Between host and device: descriptors in, sampled ids out, each through a ring of buffers.

Rules
- One copy a step at most, in either direction, each on a stream of its own.
- A pinned buffer is written again only after the copy that read it; a device buffer only after the
  step that read it; a result's buffer only after its step was collected.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.logprobs import StepLogprobs
from engine.request import Int32Array
from engine.scoring import StepScores
from engine.streams import Event, Streams
from gpu_ops.cuda_sampling import HOST_STEPS, HostIds
from gpu_ops.device_rows import Changes, DeviceRows

RING: Final = HOST_STEPS  # steps: two in flight, one being written, one to spare


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

    host     [sampled] int32, once `event` is done
    numbers  [sampled] int32 beside them, all `number` then; None: nothing vouches for them
    """

    def __init__(
        self,
        host: Int32Array,
        event: Event,
        scores: StepScores,
        numbers: Int32Array | None = None,
        number: int = 0,
    ) -> None:
        self._host: Int32Array | None = host
        self._numbers, self._number = numbers, number
        self._event = event
        self._scores = scores
        self._ids = np.empty(0, np.int32)

    def wait_tokens_sync(self) -> Int32Array:
        """[sampled] int32, the caller's own. May be asked for again."""
        if self._host is not None:
            self._event.synchronize()
            self._ids = self._host.copy()
            if self._numbers is not None and not (self._numbers == self._number).all():
                raise RuntimeError(f"ids of launch {self._number} are of others: {self._numbers}")
            self._host = None
        return self._ids

    def wait_logprobs_sync(self) -> StepLogprobs | None:
        """None where no row of the step asked for any."""
        return self._scores.to_host_sync()


class ResultRing:
    """Takes sampled ids to the host. Owned by the engine thread.

    told  where decode steps write their ids themselves
    """

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
        host = streams.pinned(HOST_STEPS * most_sampled * 2).view(HOST_STEPS, most_sampled, 2)
        self.told = HostIds(host, torch.zeros(2, dtype=torch.int32, device=device))
        self._told: NDArray[np.int32] = host.numpy()

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
        host = self._host[index][:sampled]
        step = self._steps[index] = CollectedStep(host, copied, scores)
        return step

    def told_by(self, launch: int, sampled: int) -> CollectedStep:
        """The ids that the sampling launch just made writes to `told`; after a `take`."""
        index = self._next
        self._next = (index + 1) % RING
        computed, _ = self._events[index]
        computed.record(self._streams.forward)
        ids, numbers = self._told[launch % HOST_STEPS, :sampled].T
        step = self._steps[index] = CollectedStep(
            ids, computed, StepScores((), ()), numbers, launch
        )
        return step
