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

from engine.request import Int32Array
from engine.streams import Event, Stream, Streams

RING: Final = 4  # steps: two in flight, one being written, one to spare
_ALIGN_WORDS: Final = 4  # sections begin at 16 bytes: kernels read them as vectors


class _Slot:
    """A pinned buffer and its place on the device."""

    def __init__(self, streams: Streams, words: int, device: torch.device) -> None:
        self.host = streams.pinned(words)
        self.words: Int32Array = self.host.numpy()
        self.device = torch.empty(words, dtype=torch.int32, device=device)
        self.arrived, self.read = streams.event(), streams.event()


class Staged:
    """Sections of one step on the device. Owned by the engine thread; lives for one launch."""

    def __init__(self, slot: _Slot, sections: list[torch.Tensor]) -> None:
        self._slot = slot
        self.sections = sections

    def release(self, forward: Stream) -> None:
        """What was launched on `forward` up to now has read the sections; nothing else will."""
        self._slot.read.record(forward)


class StagingRing:
    """Takes a step's arrays to the device. Owned by the engine thread."""

    def __init__(self, streams: Streams, device: torch.device, words: int) -> None:
        self._streams, self._device = streams, device
        self._slots = [_Slot(streams, words, device) for _ in range(RING)]
        self._next = 0

    def send(self, parts: Sequence[Int32Array]) -> Staged:
        """The arrays, a tensor each of the same shape; the forward stream waits for them."""
        starts, words = [], 0
        for part in parts:
            starts.append(words)
            words += -(-part.size // _ALIGN_WORDS) * _ALIGN_WORDS
        slot = self._take(words)
        for start, part in zip(starts, parts, strict=True):
            slot.words[start : start + part.size] = part.reshape(-1)
        streams = self._streams
        streams.copy_in.wait_event(slot.read)
        with streams.on(streams.copy_in):
            slot.device[:words].copy_(slot.host[:words], non_blocking=True)
        slot.arrived.record(streams.copy_in)
        streams.forward.wait_event(slot.arrived)
        sections = [
            slot.device[start : start + part.size].view(part.shape)
            for start, part in zip(starts, parts, strict=True)
        ]
        return Staged(slot, sections)

    def _take(self, words: int) -> _Slot:
        index = self._next
        self._next = (index + 1) % RING
        slot = self._slots[index]
        slot.arrived.synchronize()
        if words > len(slot.words):
            # Rare: the buffers are made for the largest step there usually is.
            slot.read.synchronize()
            slot = self._slots[index] = _Slot(self._streams, 2 * words, self._device)
        return slot


class CollectedStep:
    """A step whose ids are on their way to the host, or there. Owned by the engine thread."""

    def __init__(self, host: torch.Tensor, event: Event) -> None:
        self._host: torch.Tensor | None = host
        self._event = event
        self._ids = np.empty(0, np.int32)

    def is_done_no_sync(self) -> bool:
        return self._host is None or self._event.query()

    def wait_tokens_sync(self) -> Int32Array:
        """[sampled] int32, the caller's own. May be asked for again."""
        if self._host is not None:
            self._event.synchronize()
            self._ids = self._host.numpy().copy()
            self._host = None
        return self._ids


class ResultRing:
    """Takes sampled ids to the host. Owned by the engine thread."""

    def __init__(self, streams: Streams, device: torch.device, most_sampled: int) -> None:
        self._streams = streams
        self._ids = torch.zeros((RING, most_sampled), dtype=torch.int32, device=device)
        self._host = [streams.pinned(most_sampled) for _ in range(RING)]
        self._events = [(streams.event(), streams.event()) for _ in range(RING)]
        self._steps: list[CollectedStep | None] = [None] * RING
        self._next = 0

    def take(self) -> torch.Tensor:
        """[most sampled] int32 on the device: where the next step's ids go."""
        step = self._steps[self._next]
        if step is not None:
            step.wait_tokens_sync()
        return self._ids[self._next]

    def send(self, sampled: int) -> CollectedStep:
        """The first `sampled` of the ids taken last, once the forward stream has them."""
        index, streams = self._next, self._streams
        self._next = (index + 1) % RING
        computed, copied = self._events[index]
        computed.record(streams.forward)
        streams.copy_out.wait_event(computed)
        host = self._host[index][:sampled]
        if sampled:
            with streams.on(streams.copy_out):
                host.copy_(self._ids[index, :sampled], non_blocking=True)
        copied.record(streams.copy_out)
        step = self._steps[index] = CollectedStep(host, copied)
        return step
