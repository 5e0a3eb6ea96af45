"""The prefix cache that keeps nothing: every prompt is computed in full."""

import numpy as np

from engine.descriptor import NO_COPIES, PageCopies
from engine.prefix_cache import HostCounts, Inserted, Match, Node
from engine.request import Int32Array


class NaiveCache:
    """Never owns a page: `insert` takes none over. Owned by the engine thread."""

    keeps = False
    evictable_pages = 0
    locked_pages = 0
    cached_pages = 0
    host_counts = HostCounts()
    copies_left = 0

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._root = Node()

    def match(self, namespace: str, token_ids: Int32Array) -> Match:
        return Match(self._root, _no_pages(), 0)

    def load(self, namespace: str, token_ids: Int32Array, first: int, pages: Int32Array) -> int:
        return 0

    def take_copies(self) -> PageCopies:
        return NO_COPIES

    def lock(self, node: Node) -> None:
        assert node is self._root

    def unlock(self, node: Node) -> None:
        assert node is self._root

    def insert(self, namespace: str, token_ids: Int32Array, pages: Int32Array) -> Inserted:
        return Inserted(self._root, _no_pages(), 0)

    def evict(self, count: int) -> Int32Array:
        return _no_pages()

    def clear(self) -> Int32Array:
        return _no_pages()

    def all_pages(self) -> Int32Array:
        return _no_pages()

    def check_integrity(self) -> None:
        """Nothing to check."""


def _no_pages() -> Int32Array:
    return np.empty(0, np.int32)
