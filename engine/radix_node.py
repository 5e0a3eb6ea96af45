"""One node of the radix tree, and what makes one node go before another when room is wanted."""

import heapq
from collections.abc import Callable
from typing import Final

import numpy as np

from engine.prefix_cache import Node
from engine.request import Int32Array

Key = tuple[str, bytes]  # namespace, the int32 tokens of one page


class RadixNode(Node):
    """An edge and what hangs below it. Owned by the engine thread.

    Its first pages are on the device, its last in host memory, and some may be in both:
      [0, len(pages))        on the device
      [first_slot, length)   on the host; first_slot <= len(pages), so that nothing is missing
    """

    __slots__ = (
        *("children", "created", "key", "last_use", "length", "locks", "namespace"),
        *("pages", "parent", "resident", "serial", "slots", "tokens", "uses"),
    )

    def __init__(
        self,
        namespace: str,
        tokens: Int32Array,
        pages: Int32Array,
        parent: "RadixNode | None",
        serial: int,
        now: int,
    ) -> None:
        self.namespace = namespace
        self.tokens = tokens  # [length * page_size] int32
        self.length = len(pages)  # pages of the edge, wherever they are; 0 at the root alone
        self.pages = pages  # int32, of the device
        self.slots = pages[:0]  # int32, of the host
        self.parent = parent  # None at the root, and once evicted
        self.key: Key | None = None  # its place among the parent's children
        self.children: dict[Key, RadixNode] = {}
        self.resident = 0  # children with pages on the device
        self.serial = serial  # unique: it decides between equal priorities
        self.locks = 0
        self.created = now
        self.last_use = now
        self.uses = 0  # locks ever taken

    @property
    def first_slot(self) -> int:
        """The first of its pages that is on the host; `length` where none is."""
        return self.length - len(self.slots)

    @property
    def doubled(self) -> int:
        """How many of its pages are on the device and on the host."""
        return len(self.pages) + len(self.slots) - self.length

    def give_front(self, upper: "RadixNode", page_size: int) -> None:
        """Leaves its first pages to a new node above it, which has its tokens and length."""
        at = upper.length
        behind = max(0, at - self.first_slot)  # slots of what goes
        upper.slots, self.slots = compact(self.slots[:behind]), compact(self.slots[behind:])
        upper.pages, self.pages = compact(self.pages[:at]), compact(self.pages[at:])
        self.tokens = compact(self.tokens[at * page_size :])
        self.length -= at
        upper.locks, upper.uses = self.locks, self.uses
        upper.created, upper.last_use = self.created, self.last_use
        upper.resident = len(self.pages) > 0

    def cut(self, length: int) -> None:
        """Forgets what is behind its first `length` pages, which is on the host only or nowhere.

        With nothing left it leaves the tree.
        """
        page_size = len(self.tokens) // self.length
        self.slots = compact(self.slots[: max(0, length - self.first_slot)])
        self.pages = compact(self.pages[:length])
        self.tokens = compact(self.tokens[: length * page_size])
        self.length = length
        if length == 0:
            assert self.parent is not None and self.key is not None and not self.children
            del self.parent.children[self.key]
            self.parent = None


def compact(part: Int32Array) -> Int32Array:
    """`part`, copied if it would keep an array of more than twice its size alive."""
    whole = part.base
    return part.copy() if isinstance(whole, np.ndarray) and whole.size > 2 * part.size else part


Priority = Callable[[RadixNode], tuple[int, int]]  # the lowest goes first; it must never fall


def least_recently_used(node: RadixNode) -> tuple[int, int]:
    return node.last_use, 0


def least_frequently_used(node: RadixNode) -> tuple[int, int]:
    return node.uses, node.last_use


def first_in_first_out(node: RadixNode) -> tuple[int, int]:
    return node.created, 0


EVICTION: Final[dict[str, Priority]] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
}


class NodeHeap:
    """Nodes of one kind by priority, the lowest first. Owned by the engine thread.

    Holds every node of the kind once. Entries of nodes that are no longer of the kind, and
    priorities that have risen since, are put right when they come up; so an entry costs nothing to
    leave behind, and there are never more entries than nodes that were offered.
    """

    def __init__(self, priority: Priority, is_kind: Callable[[RadixNode], bool]) -> None:
        self._priority = priority
        self._is_kind = is_kind
        self._heap: list[tuple[tuple[int, int], int, RadixNode]] = []
        self._queued: set[RadixNode] = set()

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: RadixNode) -> None:
        """Takes a node that may have become one of the kind."""
        if node not in self._queued and self._is_kind(node):
            self._queued.add(node)
            heapq.heappush(self._heap, (self._priority(node), node.serial, node))

    def try_first(self) -> RadixNode | None:
        """The node of the kind with the lowest priority. It stays, while it is of the kind."""
        while self._heap:
            priority, serial, node = self._heap[0]
            if not self._is_kind(node):
                heapq.heappop(self._heap)
                self._queued.remove(node)
            elif (now := self._priority(node)) != priority:
                heapq.heapreplace(self._heap, (now, serial, node))
            else:
                return node
        return None

    def check_integrity(self, nodes: list[RadixNode]) -> None:
        """Asserts that each of the `nodes` that is of the kind is here once."""
        here = [node for _, _, node in self._heap]
        assert len(here) == len(set(here)), "a node is on the heap twice"
        assert set(here) == self._queued, "the heap and its index differ"
        assert all(node in self._queued for node in nodes if self._is_kind(node)), "off the heap"
