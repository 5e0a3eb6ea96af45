"""A prefix cache as a radix tree whose edges are whole pages.

Knows neither rows nor requests nor the page pool; engine/prefix_cache.py says what it promises.

Rules
- An edge's arrays are replaced, never written: they may be views of one another.
- A node is found by (namespace, the tokens of its edge's first page) in its parent's dict, the rest
  of its edge by comparing tokens. A hash alone never decides.
- A node's lock count is the locks on itself and on everything below it, so all that is below an
  unlocked node is unlocked, and every evictable page can be reached by evicting leaves.
- The heap holds every unlocked leaf once. Entries of nodes that are no longer one, and priorities
  that have risen since, are put right when they come up; so an entry costs nothing to leave behind,
  and there are never more entries than nodes.

Parent links make cycles; eviction breaks them, so that nodes are freed by their reference count.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from engine.prefix_cache import Inserted, Match, Node
from engine.radix_node import Key, Priority, RadixNode, least_recently_used
from engine.request import Int32Array


class RadixCache:
    """Keeps every prefix until its pages are wanted back. Owned by the engine thread."""

    keeps = True

    def __init__(self, page_size: int, priority: Priority = least_recently_used) -> None:
        assert page_size >= 1
        self.page_size = page_size
        self._priority = priority
        self._clock = 0  # uses so far: no wall time, so that a run can be repeated
        self._serials = 0
        nothing = np.empty(0, np.int32)
        self._root = RadixNode("", nothing, nothing, None, 0, 0)
        self._heap: list[tuple[tuple[int, int], int, RadixNode]] = []
        self._nodes_kept = 0  # without the root
        self._evictable = 0
        self._locked = 0

    @property
    def root(self) -> RadixNode:
        """The node of the empty prefix: for whoever draws the tree, and changes nothing."""
        return self._root

    @property
    def node_count(self) -> int:
        """Edges in the tree. O(1)."""
        return self._nodes_kept

    @property
    def evictable_pages(self) -> int:
        return self._evictable

    @property
    def locked_pages(self) -> int:
        return self._locked

    @property
    def cached_pages(self) -> int:
        return self._evictable + self._locked

    def match(self, namespace: str, token_ids: Int32Array) -> Match:
        """As PrefixCache; O(tokens matched), a dict look-up and one comparison for each edge."""
        node, path = self._walk(namespace, token_ids)
        pages = np.concatenate(path)
        return Match(node, pages, len(pages) * self.page_size)

    def insert(self, namespace: str, token_ids: Int32Array, pages: Int32Array) -> Inserted:
        """As PrefixCache; what is not there yet becomes one new leaf."""
        node, path = self._walk(namespace, token_ids)
        existing = sum(map(len, path))
        full = len(token_ids) // self.page_size
        assert len(pages) >= full
        if existing < full:
            edge = token_ids[existing * self.page_size : full * self.page_size].copy()
            node = self._add(namespace, edge, pages[existing:full].copy(), node)
            path.append(node.pages)
            self._evictable += len(node.pages)
            self._offer(node)
        return Inserted(node, np.concatenate(path), existing)

    def lock(self, node: Node) -> None:
        """As PrefixCache; O(depth)."""
        for each in self._upwards(node):
            if each.locks == 0:
                self._evictable -= len(each.pages)
                self._locked += len(each.pages)
            each.locks += 1
            each.uses += 1

    def unlock(self, node: Node) -> None:
        """As PrefixCache; O(depth)."""
        for each in self._upwards(node):
            assert each.locks > 0, "unlocked more often than locked"
            each.locks -= 1
            if each.locks == 0:
                self._evictable += len(each.pages)
                self._locked -= len(each.pages)
                self._offer(each)

    def evict(self, count: int) -> Int32Array:
        """As PrefixCache; whole leaves by priority, the last of them shortened from its end."""
        left = min(count, self._evictable)
        freed = [self._root.pages]
        while left > 0:
            leaf = self._first_leaf()
            if len(leaf.pages) <= left:
                freed.append(leaf.pages)
                self._remove_first(leaf)
            else:
                freed.append(leaf.pages[-left:])
                self._shorten(leaf, len(leaf.pages) - left)
            left -= len(freed[-1])
            self._evictable -= len(freed[-1])
        return np.concatenate(freed)

    def clear(self) -> Int32Array:
        return self.evict(self._evictable)

    def all_pages(self) -> Int32Array:
        return np.concatenate([node.pages for node in self._nodes()])

    def _walk(self, namespace: str, token_ids: Int32Array) -> tuple[RadixNode, list[Int32Array]]:
        """The node of the longest cached prefix, and the pages of each edge down to it.

        Marks all of them used; where the prefix ends inside an edge, the edge is split there.
        """
        assert token_ids.dtype == np.int32, "keys are the bytes of int32 tokens"
        self._clock += 1
        size = self.page_size
        node, path = self._root, [self._root.pages]
        at, end = 0, len(token_ids) // size * size
        while at < end:
            child = node.children.get((namespace, token_ids[at : at + size].tobytes()))
            if child is None:
                break
            common = 1  # the key was equal, so the first page is
            if len(child.pages) > 1 and at + size < end:
                common = _common_length(child.tokens, token_ids[at:end]) // size
            node = child if common == len(child.pages) else self._split(child, common)
            node.last_use = self._clock
            path.append(node.pages)
            at += common * size
        return node, path

    def _add(
        self, namespace: str, tokens: Int32Array, pages: Int32Array, parent: RadixNode
    ) -> RadixNode:
        """A new node in its place below `parent`, which a split may take over from another."""
        self._serials += 1
        self._nodes_kept += 1
        node = RadixNode(namespace, tokens, pages, parent, self._serials, self._clock)
        parent.children[self._key(node)] = node
        return node

    def _split(self, lower: RadixNode, pages: int) -> RadixNode:
        """A new node for the first `pages` pages of an edge; `lower` keeps the rest.

        Whoever locked `lower` keeps its handle, and unlocks through the new node.
        """
        assert lower.parent is not None and 0 < pages < len(lower.pages)
        tokens = pages * self.page_size
        front, front_pages = _compact(lower.tokens[:tokens]), _compact(lower.pages[:pages])
        upper = self._add(lower.namespace, front, front_pages, lower.parent)
        upper.locks, upper.uses = lower.locks, lower.uses
        upper.created, upper.last_use = lower.created, lower.last_use
        lower.tokens, lower.pages = _compact(lower.tokens[tokens:]), _compact(lower.pages[pages:])
        lower.parent = upper
        upper.children[self._key(lower)] = lower
        return upper

    def _shorten(self, leaf: RadixNode, pages: int) -> None:
        leaf.tokens = _compact(leaf.tokens[: pages * self.page_size])
        leaf.pages = _compact(leaf.pages[:pages])

    def _first_leaf(self) -> RadixNode:
        """The unlocked leaf of lowest priority, now at the front of the heap. One must exist."""
        while True:
            priority, serial, node = self._heap[0]
            if node.locks or node.children:
                heapq.heappop(self._heap)
                node.queued = False
            elif (now := self._priority(node)) != priority:
                heapq.heapreplace(self._heap, (now, serial, node))
            else:
                return node

    def _remove_first(self, leaf: RadixNode) -> None:
        """Takes the leaf at the heap's front out of the tree; its parent may be a leaf now."""
        _, _, first = heapq.heappop(self._heap)
        parent = leaf.parent
        assert first is leaf and parent is not None
        del parent.children[self._key(leaf)]
        leaf.parent = None
        leaf.queued = False
        self._nodes_kept -= 1
        self._offer(parent)

    def _offer(self, node: RadixNode) -> None:
        """Puts an unlocked leaf on the heap, unless it is there already."""
        if node.queued or node.locks or node.children or node is self._root:
            return
        node.queued = True
        heapq.heappush(self._heap, (self._priority(node), node.serial, node))

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
        assert len(nodes) == self._nodes_kept + 1, "nodes are miscounted"
        for node in nodes:
            self._check_node(node)
        locked = sum(len(node.pages) for node in nodes if node.locks)
        assert locked == self._locked, "locked pages are miscounted"
        pages = self.all_pages()
        assert len(pages) == self.cached_pages, "evictable pages are miscounted"
        assert np.bincount(pages, minlength=1).max() <= 1, "a page is cached twice"
        queued = {id(node) for node in nodes if node.queued}
        assert len(self._heap) == len(queued), "a node is on the heap twice, or was evicted"
        assert {id(node) for _, _, node in self._heap} == queued

    def _check_node(self, node: RadixNode) -> None:
        below = sum(child.locks for child in node.children.values())
        for key, child in node.children.items():
            assert child.parent is node
            assert key == self._key(child), "a child is found by another's tokens"
            assert node is self._root or child.namespace == node.namespace
        if node is not self._root:
            assert len(node.pages) > 0 and len(node.tokens) == len(node.pages) * self.page_size
            assert node.locks >= below, "a lock below does not reach up"
            assert node.queued or node.locks or node.children, "an unlocked leaf is off the heap"


def _common_length(one: Int32Array, other: Int32Array) -> int:
    """How many leading elements are equal; both have at least one."""
    length = min(len(one), len(other))
    equal = one[:length] == other[:length]
    first = int(equal.argmin())  # the first False, or 0 where there is none
    return length if equal[first] else first


def _compact(part: Int32Array) -> Int32Array:
    """`part`, copied if it would keep an array of more than twice its size alive."""
    whole = part.base
    return part.copy() if isinstance(whole, np.ndarray) and whole.size > 2 * part.size else part
