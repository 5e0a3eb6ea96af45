"""Random operations on pool and cache, against a model that is too simple to be wrong.

The model knows single pages: (namespace, the tokens up to the page's end) → page. It has no edges,
so it predicts exactly which pages an eviction returns: again and again that of lowest priority
among the unlocked pages that have none after them. Tokens are 0 and 1, so prefixes meet often.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from engine.cache_factory import build_prefix_cache
from engine.pages import PagePool
from engine.prefix_cache import Node
from engine.request import Int32Array
from tests.stateful import CountedMachine, run_a_few

Prefix = tuple[str, tuple[int, ...]]  # a namespace, and tokens that end with a page


@dataclass(slots=True)
class ModelPage:
    page: int
    created: int
    last_use: int
    locks: int = 0
    uses: int = 0

    def priority(self, eviction: str) -> tuple[int, int]:
        if eviction == "lru":
            return self.last_use, 0
        return (self.uses, self.last_use) if eviction == "lfu" else (self.created, 0)


class CacheMachine(CountedMachine):
    """Single operations of a cache, and whole requests' sequences of them."""

    namespaces = st.sampled_from(["", "a"])
    # Blocks of a page each, all equal but for one token, and the tokens of a partial page.
    prompts = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(0, 3))
    seldom = st.integers(0, 3).map(lambda draw: draw == 3)  # else all is locked and none evicted

    def tokens_of(self, prompt: tuple[list[int], int]) -> tuple[int, ...]:
        blocks, rest = prompt
        size = self.page_size
        # 2 differs from 1 in the page's last token alone, 0 from both in its first.
        whole = [[min(block, 1)] * (size - 1) + [block] for block in blocks]
        return tuple(sum(whole, [])) + (1,) * (rest % size)

    def prefixes(self, namespace: str, tokens: tuple[int, ...]) -> list[Prefix]:
        """Every whole-page prefix, the shortest first."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tokens[:end]) for end in ends]

    def use(self, namespace: str, tokens: tuple[int, ...]) -> list[Prefix]:
        """The cached prefixes of `tokens`, marked as used."""
        self.clock += 1
        found = []
        for prefix in self.prefixes(namespace, tokens):
            if prefix not in self.model:
                break
            self.model[prefix].last_use = self.clock
            found.append(prefix)
        return found

    def remember(self, node: Node, prefixes: list[Prefix]) -> None:
        """The machine locks all that it is to hold: unlocked handles do not last."""
        self.cache.lock(node)
        for prefix in prefixes:
            self.model[prefix].locks += 1
            self.model[prefix].uses += 1
        self.locks.append((node, prefixes[-1] if prefixes else ("", ())))

    def evicted_from_model(self, count: int) -> list[int]:
        pages: list[int] = []
        while len(pages) < count:
            inner = {(namespace, tokens[: -self.page_size]) for namespace, tokens in self.model}
            leaves = [
                (each.priority(self.eviction), prefix)
                for prefix, each in self.model.items()
                if not each.locks and prefix not in inner
            ]
            if not leaves:
                break
            pages.append(self.model.pop(min(leaves)[1]).page)
        return pages

    @rule(namespace=namespaces, prompt=prompts, lock=seldom)
    def match(self, namespace: str, prompt: tuple[list[int], int], lock: bool) -> None:
        tokens = self.tokens_of(prompt)
        found = self.use(namespace, tokens)
        match = self.cache.match(namespace, np.array(tokens, np.int32))
        assert match.pages.tolist() == [self.model[prefix].page for prefix in found]
        assert match.tokens == len(found) * self.page_size
        if lock:
            self.remember(match.node, found)

    @initialize(
        kind=st.sampled_from(["radix", "radix", "radix", "naive"]),
        page_size=st.sampled_from([1, 2, 4, 16, 64]),
        eviction=st.sampled_from(["lru", "lfu", "fifo"]),
        prompts=st.lists(st.tuples(namespaces, prompts, st.booleans()), max_size=8),
    )
    def build(
        self,
        kind: Literal["radix", "naive"],
        page_size: int,
        eviction: Literal["lru", "lfu", "fifo"],
        prompts: list[tuple[str, tuple[list[int], int], bool]],
    ) -> None:
        """Some prefixes of which some were locked: evictions have something to choose from."""
        self.kind, self.page_size, self.eviction = kind, page_size, eviction
        self.pool = PagePool(40)
        self.cache = build_prefix_cache(kind, page_size, eviction)
        self.model: dict[Prefix, ModelPage] = {}
        self.locks: list[tuple[Node, Prefix]] = []
        self.clock = 0
        for namespace, prompt, locked in prompts:
            held = len(self.locks)
            self.insert(namespace, prompt, locked)
            if len(self.locks) > held:
                self.unlock_at(held)

    @rule(namespace=namespaces, prompt=prompts, lock=seldom)
    def insert(self, namespace: str, prompt: tuple[list[int], int], lock: bool) -> None:
        """A prompt that was computed without looking into the cache."""
        tokens = self.tokens_of(prompt)
        own = self.pool.try_take(-(-len(tokens) // self.page_size))
        if own is not None:
            self.insert_pages(namespace, tokens, own, 0, lock)

    @rule(namespace=namespaces, prompt=prompts, known=st.integers(0, 7), count=st.integers(0, 5))
    def serve(self, namespace: str, prompt: tuple[list[int], int], known: int, count: int) -> None:
        """A request's life: match, lock, evict for room, insert, lock that instead."""
        tokens = self.tokens_of(prompt)
        self.match(namespace, ([*prompt[0][:known]], 0), lock=True)
        matched = len(self.locks[-1][1][1]) // self.page_size
        shared = self.cache.match(namespace, np.array(tokens, np.int32)).pages[:matched]
        self.use(namespace, tokens)
        self.evict(count)
        own = self.pool.try_take(-(-len(tokens) // self.page_size) - matched)
        if own is not None:
            self.insert_pages(namespace, tokens, np.concatenate([shared, own]), matched, True)
            self.unlock_at(len(self.locks) - 2)

    def insert_pages(
        self, namespace: str, tokens: tuple[int, ...], pages: Int32Array, shared: int, lock: bool
    ) -> None:
        """pages[:shared] are the cache's already, the rest the machine's own."""
        inserted = self.cache.insert(namespace, np.array(tokens, np.int32), pages)
        found = self.use(namespace, tokens)
        prefixes = self.prefixes(namespace, tokens) if self.kind == "radix" else []
        assert inserted.existing_pages == len(found) >= shared
        for prefix, page in list(zip(prefixes, pages.tolist(), strict=False))[len(found) :]:
            self.model[prefix] = ModelPage(page, self.clock, self.clock)
        assert inserted.pages.tolist() == [self.model[prefix].page for prefix in prefixes]
        self.pool.give(pages[shared : inserted.existing_pages])
        self.pool.give(pages[len(inserted.pages) :])
        if lock:
            self.remember(inserted.node, prefixes)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def lock_again(self, data: st.DataObject) -> None:
        node, (namespace, tokens) = data.draw(st.sampled_from(self.locks))
        self.remember(node, self.prefixes(namespace, tokens))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self.unlock_at(data.draw(st.integers(0, len(self.locks) - 1)))

    def unlock_at(self, index: int) -> None:
        node, (namespace, tokens) = self.locks.pop(index)
        self.cache.unlock(node)
        for prefix in self.prefixes(namespace, tokens):
            self.model[prefix].locks -= 1

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        self.returned(self.cache.evict(count), self.evicted_from_model(count))

    @rule()
    def clear(self) -> None:
        self.returned(self.cache.clear(), self.evicted_from_model(len(self.model)))

    def returned(self, pages: Int32Array, expected: list[int]) -> None:
        assert sorted(pages.tolist()) == sorted(expected)
        self.pool.give(pages)

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        self.cache.check_integrity()
        self.pool.check_integrity()
        cached = self.cache.all_pages().tolist()
        assert sorted(cached) == sorted(each.page for each in self.model.values())
        assert self.cache.cached_pages == len(cached)
        assert self.cache.locked_pages == sum(each.locks > 0 for each in self.model.values())
        assert self.cache.evictable_pages + self.cache.locked_pages == len(cached)
        assert self.pool.free_pages + len(cached) == self.pool.capacity


def test_random_operations() -> None:
    run_a_few(CacheMachine)
