"""Copies KV pages between a CUDA device and pinned memory, on a stream of their own.

Rules
- A step computes after the copies of all steps before it. Its own run beside it, unless it says
  that they come first.
- The copies wait for nothing: engine/descriptor.py says why they need not. They are one after the
  other, so one that reads what another has written comes behind it.
- All is ordered on the device, never by the host; a graph's launch waits like any other.
"""

from functools import partial

from engine.descriptor import PageCopies
from engine.host_pages import HostPages
from engine.kv_cache import KvCache
from engine.streams import Streams


class Pager:
    """The prefix cache's host memory, and the stream that fills it. Owned by the engine thread.

    slots  pages of pinned memory
    """

    def __init__(self, streams: Streams, cache: KvCache, slots: int) -> None:
        self._streams = streams
        self._host = HostPages(cache, slots, partial(streams.copy_rows, stream=streams.pages))
        streams.pin(self._host.memory)
        self._copied = streams.event()
        self._is_awaited = True  # the forward stream waits for what was last recorded

    def copy_no_sync(self, copies: PageCopies) -> None:
        """Starts a step's copies; whatever is launched on the forward stream next is the step."""
        streams = self._streams
        if not self._is_awaited:
            streams.forward.wait_event(self._copied)
            self._is_awaited = True
        if not len(copies.words):
            return
        self._host.copy(copies.words)
        self._copied.record(streams.pages)
        self._is_awaited = False
        if copies.first:
            streams.forward.wait_event(self._copied)
            self._is_awaited = True

    def close(self) -> None:
        """The memory may go: nothing is being copied."""
        self._streams.unpin(self._host.memory)
