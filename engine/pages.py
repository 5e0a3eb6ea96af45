"""Which KV pages are free. Knows nothing of what a page holds, nor of who holds the others."""

import numpy as np

from engine.request import Int32Array


class PagePool:
    """Hands out page ids and takes them back. Owned by the engine thread.

    Page 0 is the dummy page that padding rows write to: it is never handed out.
    The page given back last is handed out first, while it may still be in a device's cache.
    """

    def __init__(self, pages: int) -> None:
        """`pages` counts the whole KV pool, the dummy page included. Raises ValueError below 2."""
        if pages < 2:
            raise ValueError(f"a pool of {pages} pages has none to hand out; it needs at least 2")
        self._stack = np.arange(pages - 1, -1, -1, dtype=np.int32)[: pages - 1]
        self.free_pages = pages - 1  # which are _stack[:free_pages]; written here alone
        self._slots = np.full(pages, -1, np.int32)  # a free page's place on the stack, else -1
        self._slots[self._stack] = np.arange(pages - 1, dtype=np.int32)

    @property
    def capacity(self) -> int:
        """Pages that can be handed out."""
        return len(self._stack)

    def try_take(self, count: int) -> Int32Array | None:
        """[count] page ids, the caller's own array; None, and nothing taken, if fewer are free."""
        assert count >= 0
        if count > self.free_pages:
            return None
        low = self.free_pages - count
        taken = self._stack[low : self.free_pages][::-1].copy()
        self._slots[taken] = -1
        self.free_pages = low
        return taken

    def give(self, pages: Int32Array) -> None:
        """Takes pages back. A page that is free already, the dummy or no page at all is a bug."""
        count = len(pages)
        if count == 0:
            return
        assert pages.min() > 0 and pages.max() < len(self._slots), f"no such pages: {pages}"
        assert (self._slots[pages] == -1).all(), f"free already: {pages[self._slots[pages] != -1]}"
        places = np.arange(self.free_pages, self.free_pages + count, dtype=np.int32)
        self._slots[pages] = places
        assert (self._slots[pages] == places).all(), f"the same page twice: {pages}"
        self._stack[self.free_pages : self.free_pages + count] = pages
        self.free_pages += count

    def check_integrity(self) -> None:
        """Asserts that the free pages are distinct, without the dummy, and indexed right."""
        free = self._stack[: self.free_pages]
        assert 0 <= self.free_pages <= self.capacity
        assert self._slots[0] == -1, "the dummy page is free"
        assert (self._slots[free] == np.arange(self.free_pages)).all(), "a page is free twice"
        assert np.count_nonzero(self._slots != -1) == self.free_pages, "a taken page has a place"
