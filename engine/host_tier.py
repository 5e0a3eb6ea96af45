"""The prefix cache's second tier: slots of host memory for pages that leave the device.

Decides which page goes to which slot and back; the copies travel to the executors in the step's
descriptor. Knows neither rows nor the tree around a node.

Rules
- Nothing holds a slot: whatever is on the host may be dropped whenever room is wanted. First goes
  what is on the device, too, and then whole prefixes from their ends, by the cache's priority.
- Write-through copies a page soon after it was computed, as many a step as `copies_a_step`;
  write-back copies it when its place on the device is wanted.
- Copies are made in the order in which they were decided, so a slot or a page may be written
  again by a later one. When they are made is the rule of engine/descriptor.py.
"""

import numpy as np

from engine.descriptor import COPY_WORDS, NO_COPIES, PAGE_IN, PAGE_OUT, PageCopies
from engine.pages import PagePool
from engine.prefix_cache import HostCounts
from engine.radix_node import NodeHeap, Priority, RadixNode
from engine.request import Int32Array


class HostTier:
    """Slots, and what is copied next. Owned by the engine thread.

    slots          of the host's memory; slot 0 is never used, as page 0 is not
    copies_a_step  pages at most that a step copies, but for those whose place is wanted at once
    """

    def __init__(
        self, slots: int, *, priority: Priority, write_through: bool, copies_a_step: int
    ) -> None:
        assert copies_a_step >= 1
        self._pool = PagePool(slots)
        self._write_through = write_through
        self._copies_a_step = copies_a_step
        self._tails = NodeHeap(priority, _is_tail)
        # Dicts as sets that keep their order: each holds exactly the nodes that its name says.
        self._doubled: dict[RadixNode, None] = {}
        self._unwritten: dict[RadixNode, None] = {}  # to be copied ahead of need
        self._copies: list[Int32Array] = []  # of the step that is being planned, [n, 3] each
        self._copied = 0  # pages of these
        self._urgent = False
        self.nodes_removed = 0  # from the tree, since the start
        self._written = 0  # pages, since the start
        self._loaded = 0

    @property
    def capacity(self) -> int:
        """Pages that fit."""
        return self._pool.capacity

    @property
    def counts(self) -> HostCounts:
        used = self._pool.capacity - self._pool.free_pages
        return HostCounts(used, self._pool.capacity, self._written, self._loaded)

    @property
    def copies_left(self) -> int:
        """Pages that this step may still copy."""
        return max(0, self._copies_a_step - self._copied)

    # What the tree tells

    def offer(self, node: RadixNode) -> None:
        """Something of the node has changed: where its pages are, or whether it has children."""
        self._tails.offer(node)
        if node.doubled > 0:
            self._doubled[node] = None
        else:
            self._doubled.pop(node, None)

    def computed(self, node: RadixNode) -> None:
        """The node's pages are new on the device."""
        if self._write_through and node.first_slot > 0:
            self._unwritten[node] = None

    def was_split(self, upper: RadixNode, lower: RadixNode) -> None:
        if lower in self._unwritten:
            self._unwritten[upper] = None
        self.offer(upper)
        self.offer(lower)

    def save(self, leaf: RadixNode, first: int) -> None:
        """Sees to it that the leaf's pages from `first` on are on the host: they leave the device.

        No more than `capacity` of them.
        """
        # Making room may take slots of the leaf's own.
        while (missing := leaf.first_slot - first) > self._pool.free_pages:
            dropped = self._drop_doubled(missing) or self._drop_tail(missing)
            assert dropped, "there is more to save than the host holds"
        if missing > 0:
            self._write(leaf, missing)
            self._urgent = True

    def clear(self) -> None:
        """Drops everything."""
        self._unwritten.clear()
        while self._drop_doubled(self.capacity) or self._drop_tail(self.capacity):
            pass

    # Copies

    def load(self, slots: Int32Array, pages: Int32Array) -> None:
        """Copies slots to pages of the device, which a later step reads."""
        self._loaded += len(slots)
        self._copy(PAGE_IN, pages, slots)

    def take_copies(self) -> PageCopies:
        """All that the step which is being planned copies; asked last, once a step."""
        self._write_ahead()
        if not self._copies:
            return NO_COPIES
        copies = PageCopies(np.concatenate(self._copies), self._urgent)
        self._copies, self._copied, self._urgent = [], 0, False
        return copies

    def _write_ahead(self) -> None:
        """Copies pages that are new, as many as this step may, and not in the place of others'."""
        while self._unwritten and self.copies_left:
            node = next(iter(self._unwritten))
            wanted = min(node.first_slot, self.copies_left)
            while wanted > self._pool.free_pages and self._drop_tail(wanted):
                pass
            count = min(wanted, self._pool.free_pages)
            if count:
                self._write(node, count)
            if node.first_slot:
                return  # for now
            del self._unwritten[node]

    def _write(self, node: RadixNode, count: int) -> None:
        """Copies the node's last `count` pages that are not on the host."""
        slots = self._pool.try_take(count)
        assert slots is not None
        end = node.first_slot
        self._copy(PAGE_OUT, node.pages[end - count : end], slots)
        self._written += count
        node.slots = np.concatenate([slots, node.slots])
        self.offer(node)

    def _copy(self, direction: int, pages: Int32Array, slots: Int32Array) -> None:
        copies = np.empty((len(pages), COPY_WORDS), np.int32)
        copies[:, 0], copies[:, 1], copies[:, 2] = direction, pages, slots
        self._copies.append(copies)
        self._copied += len(copies)

    # Making room

    def _drop_doubled(self, wanted: int) -> bool:
        """Frees up to `wanted` slots of what is on the device, too; False where there are none."""
        if not self._doubled:
            return False
        node = next(iter(self._doubled))
        count = min(wanted, node.doubled)
        self._pool.give(node.slots[:count])
        node.slots = node.slots[count:].copy()
        self.offer(node)
        return True

    def _drop_tail(self, wanted: int) -> bool:
        """Frees up to `wanted` slots at the end of a prefix; False where none end on the host."""
        node = self._tails.try_first()
        if node is None:
            return False
        count, parent = min(wanted, node.length - len(node.pages)), node.parent
        self._pool.give(node.slots[len(node.slots) - count :])
        node.cut(node.length - count)
        if node.length == 0:
            self._unwritten.pop(node, None)
            self.nodes_removed += 1
            assert parent is not None
            self.offer(parent)
        return True

    # Proof

    def check_integrity(self, nodes: list[RadixNode]) -> None:
        """Asserts that every slot has one owner among `nodes`, the whole tree's."""
        self._pool.check_integrity()
        slots = np.concatenate([node.slots for node in nodes])
        assert len(slots) == self.counts.cached, "a slot is lost"
        assert len(np.unique(slots)) == len(slots), "a slot has two owners"
        assert 0 not in slots, "the unused slot has an owner"
        assert set(self._doubled) == {node for node in nodes if node.doubled > 0}
        assert set(self._unwritten) <= set(nodes), "what is to be written has left the tree"
        self._tails.check_integrity(nodes)


def _is_tail(node: RadixNode) -> bool:
    """It has pages on the host alone, and nothing behind them."""
    return len(node.pages) < node.length and not node.children
