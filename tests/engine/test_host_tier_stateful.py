"""Random operations on a cache with a host tier, over memories that remember what lies in them.

A page and a slot hold the prefix that was computed into it. After each step everything the tree
says is there must be there, wherever it says. Copies are made as late as a step allows. With room
for everything on the host, nothing is ever computed twice.
"""

from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from engine.cache_factory import HostMemory, build_prefix_cache
from engine.descriptor import PAGE_OUT
from engine.pages import PagePool
from engine.prefix_cache import Node
from engine.radix import RadixCache
from engine.radix_node import RadixNode
from tests.stateful import CountedMachine, run_a_few

PAGES, MOST_SLOTS = 24, 400
Prefix = tuple[str, tuple[int, ...]]  # a namespace, and tokens that end with a page


class TierMachine(CountedMachine):
    """Requests that are computed at once: match, lock, evict, load, compute, insert."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16, 64]),
        eviction=st.sampled_from(["lru", "lfu", "fifo"]),
        write=st.sampled_from(["through", "back"]),
        slots=st.sampled_from([2, 3, 10, 30, MOST_SLOTS]),
        copies_a_step=st.sampled_from([1, 2, 5, 100]),
    )
    def build(
        self,
        page_size: int,
        eviction: Literal["lru", "lfu", "fifo"],
        write: Literal["through", "back"],
        slots: int,
        copies_a_step: int,
    ) -> None:
        host = HostMemory(slots, write, copies_a_step)
        cache = build_prefix_cache("radix", page_size, eviction, host)
        assert isinstance(cache, RadixCache)
        self.cache, self.size, self.slots = cache, page_size, slots
        self.pool = PagePool(PAGES)
        self.device: dict[int, Prefix | None] = dict.fromkeys(range(PAGES))
        self.host: dict[int, Prefix | None] = dict.fromkeys(range(slots))
        self.known: set[Prefix] = set()  # all that was ever computed since the cache was cleared
        self.locked: list[Node] = []

    def prefixes(self, namespace: str, tokens: list[int]) -> list[Prefix]:
        ends = range(self.size, len(tokens) + 1, self.size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    @rule(
        namespace=st.sampled_from(["", "a"]),
        blocks=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        keep_locked=st.integers(0, 5).map(lambda draw: draw == 5),
        loads_all=st.booleans(),
    )
    def serve(self, namespace: str, blocks: list[int], keep_locked: bool, loads_all: bool) -> None:
        # Two blocks differ in the last token of their page alone.
        tokens = sum([[min(block, 1)] * (self.size - 1) + [block] for block in blocks], [])
        ids, prefixes = np.array(tokens, np.int32), self.prefixes(namespace, tokens)
        match = self.cache.match(namespace, ids)
        found, on_host = len(match.pages), match.host_tokens // self.size
        assert [self.device[page] for page in match.pages.tolist()] == prefixes[:found]
        if self.slots == MOST_SLOTS:
            known = sum(prefix in self.known for prefix in prefixes)
            assert found + on_host == known, "something was forgotten"
        self.cache.lock(match.node)
        missing = len(prefixes) - found
        if missing > self.pool.free_pages + self.cache.evictable_pages:
            self.cache.unlock(match.node)
            return
        self.pool.give(self.cache.evict(max(0, missing - self.pool.free_pages)))
        own = self.pool.try_take(missing)
        assert own is not None
        loaded = 0
        while loads_all and loaded < on_host:
            more = self.cache.load(namespace, ids, found + loaded, own[loaded:on_host])
            if not more:
                break  # it was dropped for what was evicted
            loaded += more
            # What follows is in a later step.
            self.step({page: None for page in own[loaded:].tolist()})
        computed = zip(own[loaded:].tolist(), prefixes[found + loaded :], strict=True)
        self.step(dict(computed))
        self.step({})  # only now is it committed
        assert [self.device[page] for page in own.tolist()] == prefixes[found:], "a wrong load"
        pages = np.concatenate([match.pages, own])
        inserted = self.cache.insert(namespace, ids, pages)
        assert inserted.existing_pages == found and inserted.pages.tolist() == pages.tolist()
        self.known.update(prefixes)
        self.cache.lock(inserted.node)
        self.cache.unlock(match.node)
        if keep_locked:
            self.locked.append(inserted.node)
        else:
            self.cache.unlock(inserted.node)

    def step(self, computed: dict[int, Prefix | None]) -> None:
        """A step that copies what was decided, and computes these pages."""
        copies = self.cache.take_copies()
        if copies.first:
            self.copy(copies.words.tolist())
        self.device.update(computed)
        if not copies.first:
            self.copy(copies.words.tolist())

    def copy(self, copies: list[Any]) -> None:
        for direction, page, slot in copies:
            assert page > 0 and slot > 0
            if direction == PAGE_OUT:
                self.host[slot] = self.device[page]
            else:
                self.device[page] = self.host[slot]

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        pages = self.cache.evict(count)
        self.pool.give(pages)
        self.step(dict.fromkeys(pages.tolist()))  # somebody writes them at once

    @rule(steps=st.integers(1, 4))
    def idle(self, steps: int) -> None:
        for _ in range(steps):
            self.step({})

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.locked) - 1))
        self.cache.unlock(self.locked.pop(index))

    @rule(rarely=st.integers(0, 4))
    def clear(self, rarely: int) -> None:
        if rarely:
            return
        self.pool.give(self.cache.clear())
        assert self.cache.host_counts.cached == 0 and self.cache.evictable_pages == 0
        self.known = {prefix for prefix, _ in self.everything()}

    def everything(self) -> list[tuple[Prefix, RadixNode]]:
        """Every page that the tree knows, with its node, in the nodes' order."""
        found: list[tuple[Prefix, RadixNode]] = []
        for node in self.cache._nodes():
            above: list[int] = []
            each: RadixNode | None = node
            while each is not None:
                above = each.tokens.tolist() + above
                each = each.parent
            skipped = len(above) // self.size - node.length
            prefixes = self.prefixes(node.namespace, above)[skipped:]
            found += [(prefix, node) for prefix in prefixes]
        return found

    @invariant()
    def all_is_where_it_is_said_to_be(self) -> None:
        self.cache.check_integrity()
        self.pool.check_integrity()
        assert self.pool.free_pages + self.cache.cached_pages == self.pool.capacity
        at: dict[int, int] = {}
        for prefix, node in self.everything():
            index = at.get(id(node), 0)
            at[id(node)] = index + 1
            if index < len(node.pages):
                assert self.device[int(node.pages[index])] == prefix
            if index >= node.first_slot:
                assert self.host[int(node.slots[index - node.first_slot])] == prefix


def test_random_operations() -> None:
    run_a_few(TierMachine)
