"""A prefix cache as a radix tree whose edges are whole pages, on the device and in host memory.

Knows neither rows nor requests nor the page pool; engine/prefix_cache.py says what it promises.
What the second tier does with host memory is engine/host_tier.py's.

Rules
- An edge's arrays are replaced, never written: they may be views of one another.
- A node is found by (namespace, the tokens of its edge's first page) in its parent's dict, the rest
  of its edge by comparing tokens. A hash alone never decides.
- A node's lock count is the locks on itself and on everything below it, so all that is below an
  unlocked node is unlocked, and every evictable page can be reached by evicting leaves.
- What is on the device has all that is before it on the device: host memory holds the ends of
  prefixes. So a leaf, here, is a node with pages below which no node has any; locks are on nodes
  that are wholly on the device. Without a host tier every page of every node is.

Parent links make cycles; eviction breaks them, so that nodes are freed by their reference count.
"""

from collections.abc import Iterator

import numpy as np

from engine.descriptor import NO_COPIES, PageCopies
from engine.host_tier import HostTier
from engine.prefix_cache import HostCounts, Inserted, Match, Node
from engine.radix_node import Key, NodeHeap, Priority, RadixNode, compact, least_recently_used
from engine.request import Int32Array


class RadixCache:
    """Keeps every prefix until its pages are wanted back. Owned by the engine thread."""

    keeps = True

    def __init__(
        self,
        page_size: int,
        priority: Priority = least_recently_used,
        host: HostTier | None = None,
    ) -> None:
        """
        host  where evicted pages go, of the same priority; None: they are forgotten
        """
        assert page_size >= 1
        self.page_size = page_size
        self.host = host
        self._clock = 0  # uses so far: no wall time, so that a run can be repeated
        self._serials = 0
        nothing = np.empty(0, np.int32)
        self._root = RadixNode("", nothing, nothing, None, 0, 0)
        self._leaves = NodeHeap(priority, _is_leaf)
        self._nodes_kept = 0  # without the root, and without those the host tier has removed
        # As PrefixCache; written here alone. Attributes, since every step asks, and a property
        # takes twice as long.
        self.evictable_pages = 0
        self.locked_pages = 0

    @property
    def root(self) -> RadixNode:
        """The node of the empty prefix: for whoever draws the tree, and changes nothing."""
        return self._root

    @property
    def node_count(self) -> int:
        """Edges in the tree. O(1)."""
        return self._nodes_kept - (0 if self.host is None else self.host.nodes_removed)

    @property
    def host_counts(self) -> HostCounts:
        return HostCounts() if self.host is None else self.host.counts

    @property
    def copies_left(self) -> int:
        return 0 if self.host is None else self.host.copies_left

    @property
    def cached_pages(self) -> int:
        return self.evictable_pages + self.locked_pages

    def match(self, namespace: str, token_ids: Int32Array) -> Match:
        """As PrefixCache; O(tokens matched), a dict look-up and one comparison for each edge."""
        node, pages, on_host = self._root, [self._root.pages], 0
        for each in self._walk(namespace, token_ids):
            found = len(each.pages)
            if 0 < found < each.length:
                on_host += each.length - found
                each = self._split(each, found)
            elif found == 0:
                on_host += each.length
                continue
            node = each
            pages.append(node.pages)
        matched = np.concatenate(pages)
        return Match(node, matched, len(matched) * self.page_size, on_host * self.page_size)

    def load(self, namespace: str, token_ids: Int32Array, first: int, pages: Int32Array) -> int:
        """As PrefixCache; O(tokens)."""
        if self.host is None:
            return 0
        slots = self._slots(namespace, token_ids, first)[: min(len(pages), self.copies_left)]
        self.host.load(slots, pages[: len(slots)])
        return len(slots)

    def take_copies(self) -> PageCopies:
        return NO_COPIES if self.host is None else self.host.take_copies()

    def _slots(self, namespace: str, token_ids: Int32Array, first: int) -> Int32Array:
        """Where the prefix's pages from `first` on are in host memory, up to one that is not."""
        found, at = [self._root.slots], 0
        for node in self._walk(namespace, token_ids):
            skipped = max(0, first - at)
            at += node.length
            if skipped < node.length:
                if skipped < node.first_slot:
                    break
                found.append(node.slots[skipped - node.first_slot :])
        return np.concatenate(found)

    def insert(self, namespace: str, token_ids: Int32Array, pages: Int32Array) -> Inserted:
        """As PrefixCache; what is not there yet becomes one new leaf."""
        path = self._walk(namespace, token_ids)
        existing = sum(len(node.pages) for node in path)
        full = len(token_ids) // self.page_size
        assert len(pages) >= full
        node, at = self._root, 0
        for node in path:
            if len(node.pages) < node.length:
                self._bring_back(node, pages[at : at + node.length])
            at += node.length
        if at < full:
            edge = token_ids[at * self.page_size : full * self.page_size].copy()
            node.resident += 1
            node = self._add(namespace, edge, pages[at:full].copy(), node)
            path.append(node)
            self.evictable_pages += node.length
            self._offer(node)
            if self.host is not None:
                self.host.computed(node)
        canonical = [self._root.pages, *(node.pages for node in path)]
        return Inserted(node, np.concatenate(canonical), existing)

    def _bring_back(self, node: RadixNode, pages: Int32Array) -> None:
        """What was on the host alone is on the device, too: in the last of these `pages`."""
        assert node.locks == 0 and node.parent is not None
        found = len(node.pages)
        node.parent.resident += found == 0
        node.pages = np.concatenate([node.pages, pages[found:]])
        self.evictable_pages += node.length - found
        self._offer(node)

    def lock(self, node: Node) -> None:
        """As PrefixCache; O(depth)."""
        for each in self._upwards(node):
            if each.locks == 0:
                assert len(each.pages) == each.length, "it is not on the device"
                self.evictable_pages -= len(each.pages)
                self.locked_pages += len(each.pages)
            each.locks += 1
            each.uses += 1

    def unlock(self, node: Node) -> None:
        """As PrefixCache; O(depth)."""
        for each in self._upwards(node):
            assert each.locks > 0, "unlocked more often than locked"
            each.locks -= 1
            if each.locks == 0:
                self.evictable_pages += len(each.pages)
                self.locked_pages -= len(each.pages)
                self._offer(each)

    def evict(self, count: int) -> Int32Array:
        """As PrefixCache; whole leaves by priority, the last of them shortened from its end."""
        left = min(count, self.evictable_pages)
        freed = [self._root.pages]
        while left > 0:
            leaf = self._leaves.try_first()
            assert leaf is not None, "evictable pages are miscounted"
            most = left if self.host is None else min(left, self.host.capacity)
            first = max(0, len(leaf.pages) - most)
            freed.append(leaf.pages[first:])
            self._take_off(leaf, first)
            left -= len(freed[-1])
        return np.concatenate(freed)

    def clear(self) -> Int32Array:
        """As PrefixCache; from the host, too, where nothing is locked."""
        host, self.host = self.host, None
        if host is not None:
            host.clear()
        pages = self.evict(self.evictable_pages)
        self.host = host
        return pages

    def all_pages(self) -> Int32Array:
        return np.concatenate([node.pages for node in self._nodes()])

    def _take_off(self, leaf: RadixNode, first: int) -> None:
        """Takes the leaf's pages from `first` on off the device; its parent may be a leaf now."""
        parent = leaf.parent
        assert parent is not None
        self.evictable_pages -= len(leaf.pages) - first
        if self.host is None:
            leaf.cut(first)
            self._nodes_kept -= first == 0
        else:
            self.host.save(leaf, first)
            leaf.pages = compact(leaf.pages[:first])
            self.host.offer(leaf)
        if first == 0:
            parent.resident -= 1
            self._offer(parent)

    def _walk(self, namespace: str, token_ids: Int32Array) -> list[RadixNode]:
        """The nodes of the longest cached prefix, wherever their pages are, without the root.

        Marks all of them used; where the prefix ends inside an edge, the edge is split there.
        """
        assert token_ids.dtype == np.int32, "keys are the bytes of int32 tokens"
        self._clock += 1
        size = self.page_size
        node, path = self._root, []
        at, end = 0, len(token_ids) // size * size
        while at < end:
            child = node.children.get((namespace, token_ids[at : at + size].tobytes()))
            if child is None:
                break
            common = 1  # the key was equal, so the first page is
            if child.length > 1 and at + size < end:
                common = _common_length(child.tokens, token_ids[at:end]) // size
            node = child if common == child.length else self._split(child, common)
            node.last_use = self._clock
            path.append(node)
            at += common * size
        return path

    def _add(
        self, namespace: str, tokens: Int32Array, pages: Int32Array, parent: RadixNode
    ) -> RadixNode:
        """A new node in its place below `parent`, which a split may take over from another."""
        self._serials += 1
        self._nodes_kept += 1
        node = RadixNode(namespace, tokens, pages, parent, self._serials, self._clock)
        self._place(node, parent)
        return node

    def _place(self, node: RadixNode, parent: RadixNode) -> None:
        node.parent, node.key = parent, self._key(node)
        parent.children[node.key] = node

    def _split(self, lower: RadixNode, pages: int) -> RadixNode:
        """A new node for the first `pages` pages of an edge; `lower` keeps the rest.

        Whoever locked `lower` keeps its handle, and unlocks through the new node.
        """
        assert lower.parent is not None and 0 < pages < lower.length
        front = compact(lower.tokens[: pages * self.page_size])
        upper = self._add(lower.namespace, front, np.empty(pages, np.int32), lower.parent)
        lower.give_front(upper, self.page_size)
        self._place(lower, upper)
        self._offer(upper)
        if self.host is not None:
            self.host.was_split(upper, lower)
        return upper

    def _offer(self, node: RadixNode) -> None:
        """Something of the node has changed: it may be a leaf now."""
        self._leaves.offer(node)
        if self.host is not None:
            self.host.offer(node)

    def _key(self, node: RadixNode) -> Key:
        return node.namespace, node.tokens[: self.page_size].tobytes()

    def _upwards(self, node: Node) -> Iterator[RadixNode]:
        """The node and its ancestors without the root."""
        assert isinstance(node, RadixNode)
        while node is not self._root:
            assert node.parent is not None, "the node was evicted: it had not been locked"
            yield node
            node = node.parent

    def _nodes(self) -> Iterator[RadixNode]:
        """Every node, the root first."""
        found = [self._root]
        while found:
            node = found.pop()
            yield node
            found.extend(node.children.values())

    def check_integrity(self) -> None:
        """As PrefixCache; O(pages)."""
        nodes = list(self._nodes())
        assert len(nodes) == self.node_count + 1, "nodes are miscounted"
        for node in nodes:
            self._check_node(node)
        locked = sum(len(node.pages) for node in nodes if node.locks)
        assert locked == self.locked_pages, "locked pages are miscounted"
        pages = self.all_pages()
        assert len(pages) == self.cached_pages, "evictable pages are miscounted"
        assert np.bincount(pages, minlength=1).max() <= 1, "a page is cached twice"
        self._leaves.check_integrity(nodes)
        if self.host is None:
            assert not any(len(node.slots) for node in nodes), "there is no host tier"
        else:
            self.host.check_integrity(nodes)

    def _check_node(self, node: RadixNode) -> None:
        below = sum(child.locks for child in node.children.values())
        for key, child in node.children.items():
            assert child.parent is node
            assert key == child.key == self._key(child), "a child is found by another's tokens"
            assert node is self._root or child.namespace == node.namespace
        resident = [child for child in node.children.values() if len(child.pages)]
        assert node.resident == len(resident), "children on the device are miscounted"
        on_device = len(node.pages) == node.length
        assert on_device or not resident, "a page's prefix is not on the device"
        if node is not self._root:
            assert node.length > 0 and len(node.tokens) == node.length * self.page_size
            assert 0 <= node.first_slot <= len(node.pages) <= node.length, "a page is nowhere"
            assert node.locks >= below, "a lock below does not reach up"
            assert on_device or not node.locks, "a locked page is not on the device"


def _is_leaf(node: RadixNode) -> bool:
    """Its pages may be evicted, the last of them first."""
    return len(node.pages) > 0 and not node.locks and not node.resident


def _common_length(one: Int32Array, other: Int32Array) -> int:
    """How many leading elements are equal; both have at least one."""
    length = min(len(one), len(other))
    equal = one[:length] == other[:length]
    first = int(equal.argmin())  # the first False, or 0 where there is none
    return length if equal[first] else first
