"""The radix cache, case by case. Random sequences are in test_prefix_cache_stateful.py."""

import gc

import numpy as np
import pytest

from engine.cache_factory import build_prefix_cache
from engine.naive_cache import NaiveCache
from engine.prefix_cache import Inserted
from engine.radix import RadixCache
from engine.radix_node import EVICTION, RadixNode
from engine.request import Int32Array

PAGE = 2


def tokens(text: str) -> Int32Array:
    """One token for each character."""
    return np.array([ord(character) for character in text], np.int32)


def pages(first: int, count: int) -> Int32Array:
    return np.arange(first, first + count, dtype=np.int32)


def insert(cache: RadixCache, text: str, first: int, namespace: str = "") -> Inserted:
    """Inserts `text` with the pages `first`, `first` + 1, …"""
    inserted = cache.insert(namespace, tokens(text), pages(first, len(text) // cache.page_size))
    cache.check_integrity()
    return inserted


def matched(cache: RadixCache, text: str, namespace: str = "") -> list[int]:
    match = cache.match(namespace, tokens(text))
    cache.check_integrity()
    assert match.tokens == len(match.pages) * cache.page_size
    return [int(page) for page in match.pages]


def test_an_empty_cache_matches_nothing() -> None:
    cache = RadixCache(PAGE)
    assert matched(cache, "abcd") == []
    assert matched(cache, "") == []
    assert cache.all_pages().tolist() == []
    assert cache.evict(3).tolist() == []


def test_matches_whole_pages_only() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "abcdef", 10)
    assert matched(cache, "abcdef") == [10, 11, 12]
    assert matched(cache, "abcdefgh") == [10, 11, 12]
    assert matched(cache, "abcde") == [10, 11]
    assert matched(cache, "abcX") == [10]
    assert matched(cache, "a") == []
    assert matched(cache, "aXcdef") == []


def test_a_partial_last_page_is_not_inserted() -> None:
    cache = RadixCache(PAGE)
    inserted = cache.insert("", tokens("abcde"), pages(10, 3))
    assert inserted.pages.tolist() == [10, 11] and inserted.existing_pages == 0
    assert cache.cached_pages == 2
    short = cache.insert("", tokens("x"), pages(20, 1))
    assert short.pages.tolist() == [] and short.existing_pages == 0
    cache.lock(short.node)  # the root: nothing to protect
    assert (cache.evictable_pages, cache.locked_pages) == (2, 0)
    cache.unlock(short.node)
    cache.check_integrity()


def test_what_was_there_is_canonical() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "abcd", 10)
    inserted = insert(cache, "abcdef", 20)
    assert inserted.pages.tolist() == [10, 11, 22] and inserted.existing_pages == 2
    again = insert(cache, "abcdef", 30)
    assert again.pages.tolist() == [10, 11, 22] and again.existing_pages == 3
    assert sorted(cache.all_pages().tolist()) == [10, 11, 22]


def test_an_insertion_that_leaves_an_edge_splits_it() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "aabbcc", 10)
    inserted = insert(cache, "aabbXX", 20)
    assert inserted.pages.tolist() == [10, 11, 22] and inserted.existing_pages == 2
    assert matched(cache, "aabbcc") == [10, 11, 12]
    assert matched(cache, "aabbXX") == [10, 11, 22]


def test_pages_that_differ_in_their_last_token_are_siblings() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "ab", 10)
    insert(cache, "ac", 20)
    assert matched(cache, "ab") == [10] and matched(cache, "ac") == [20]


def test_namespaces_share_nothing() -> None:
    """Tokens are compared, and no digest of them: CVE-2025-25183."""
    cache = RadixCache(PAGE)
    insert(cache, "abcd", 10, "one")
    assert matched(cache, "abcd") == [] and matched(cache, "abcd", "two") == []
    assert insert(cache, "abcd", 20, "\ud800").existing_pages == 0  # not even valid Unicode
    assert matched(cache, "abcd", "one") == [10, 11]
    assert matched(cache, "abcd", "\ud800") == [20, 21]


def test_an_evicted_namespace_leaves_nothing_behind() -> None:
    cache = RadixCache(PAGE)
    for number in range(5):
        insert(cache, "abcd", 10 * (number + 1), f"tenant {number}")
    cache.clear()
    assert cache._root.children == {} and cache._leaves.try_first() is None


def test_a_locked_prefix_is_not_evicted() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "aabbcc", 10)
    node = cache.match("", tokens("aabb")).node
    cache.lock(node)
    assert (cache.evictable_pages, cache.locked_pages) == (1, 2)
    assert cache.evict(9).tolist() == [12]
    assert cache.clear().tolist() == []
    assert matched(cache, "aabbcc") == [10, 11]
    cache.unlock(node)
    assert (cache.evictable_pages, cache.locked_pages) == (2, 0)
    assert cache.clear().tolist() == [10, 11]
    cache.check_integrity()


def test_a_lock_outlives_a_split_of_its_edge() -> None:
    cache = RadixCache(PAGE)
    node = insert(cache, "aabbcc", 10).node
    cache.lock(node)
    cache.lock(node)
    assert matched(cache, "aa") == [10]
    insert(cache, "aabbXX", 20)
    assert (cache.evictable_pages, cache.locked_pages) == (1, 3)
    cache.unlock(node)
    assert cache.clear().tolist() == [22]
    assert (cache.evictable_pages, cache.locked_pages) == (0, 3)
    cache.unlock(node)
    cache.check_integrity()
    assert sorted(cache.clear().tolist()) == [10, 11, 12]


def test_unlocking_more_often_than_locking_is_a_bug() -> None:
    cache = RadixCache(PAGE)
    node = insert(cache, "aabb", 10).node
    cache.lock(node)
    cache.unlock(node)
    with pytest.raises(AssertionError, match="more often"):
        cache.unlock(node)


def test_locking_what_was_evicted_is_a_bug() -> None:
    cache = RadixCache(PAGE)
    node = insert(cache, "aabb", 10).node
    cache.clear()
    with pytest.raises(AssertionError, match="evicted"):
        cache.lock(node)


def test_evicts_from_the_end_and_never_more_than_asked() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "aabbccdd", 10)
    assert cache.evict(0).tolist() == []
    assert cache.evict(1).tolist() == [13]
    assert cache.evict(2).tolist() == [11, 12]
    cache.check_integrity()
    assert matched(cache, "aabbccdd") == [10]
    assert cache.cached_pages == 1


def test_evicts_the_least_recently_used_leaf_first() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "aabb", 10)
    insert(cache, "aacc", 20)
    insert(cache, "dddd", 30)
    matched(cache, "aabb")
    assert cache.evict(1).tolist() == [21]
    assert cache.evict(2).tolist() == [30, 31]
    assert cache.evict(1).tolist() == [11]
    assert cache.evict(1).tolist() == [10]  # a leaf once its last child was gone


def test_evicts_the_least_frequently_locked_leaf_first() -> None:
    cache = RadixCache(PAGE, EVICTION["lfu"])
    for text, first, locks in (("aa", 10, 2), ("bb", 20, 1), ("cc", 30, 3)):
        node = insert(cache, text, first).node
        for _ in range(locks):
            cache.lock(node)
            cache.unlock(node)
    assert cache.evict(3).tolist() == [20, 10, 30]


def test_evicts_the_oldest_leaf_first() -> None:
    cache = RadixCache(PAGE, EVICTION["fifo"])
    insert(cache, "aa", 10)
    insert(cache, "bb", 20)
    matched(cache, "aa")
    assert cache.evict(2).tolist() == [10, 20]


def test_a_split_hands_its_uses_on() -> None:
    cache = RadixCache(PAGE, EVICTION["lfu"])
    for text, first in (("aabb", 10), ("cc", 20)):
        node = insert(cache, text, first).node
        cache.lock(node)
        cache.unlock(node)
    matched(cache, "aa")  # split, and used after cc
    assert cache.evict(3).tolist() == [11, 20, 10]


def test_a_split_hands_its_age_on() -> None:
    cache = RadixCache(PAGE, EVICTION["fifo"])
    insert(cache, "aabb", 10)
    insert(cache, "cc", 20)
    matched(cache, "aa")
    assert cache.evict(3).tolist() == [11, 10, 20]


def test_keeps_no_array_of_its_caller() -> None:
    cache = RadixCache(PAGE)
    ids, own = tokens("aabb"), pages(10, 2)
    cache.insert("", ids, own).pages[:] = 0
    ids[:], own[:] = 0, 0
    cache.match("", tokens("aabb")).pages[:] = 0
    assert matched(cache, "aabb") == [10, 11]


def test_takes_arrays_that_are_not_contiguous() -> None:
    cache = RadixCache(PAGE)
    cache.insert("", np.repeat(tokens("aabb"), 3)[::3], np.repeat(pages(10, 2), 2)[::2])
    cache.check_integrity()
    assert matched(cache, "aabbcc") == [10, 11]


def test_a_shortened_edge_does_not_keep_its_old_arrays() -> None:
    cache = RadixCache(1)
    insert(cache, "a" * 4096, 1)
    cache.evict(4090)
    (leaf,) = cache._root.children.values()
    for array in (leaf.tokens, leaf.pages):
        assert len(array) == 6
        assert array.base is None


def test_the_heap_holds_no_more_than_the_nodes() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "aabb", 10)
    insert(cache, "aacc", 20)
    for text in ("aabb", "aacc") * 50:
        match = cache.match("", tokens(text))
        cache.lock(match.node)
        cache.unlock(match.node)
    assert len(cache._leaves) <= 3


def test_evicted_nodes_are_freed_without_the_garbage_collector() -> None:
    def nodes() -> int:
        return sum(type(each) is RadixNode for each in gc.get_objects())  # some are dead proxies

    gc.collect()
    gc.disable()
    try:
        before = nodes()
        cache = RadixCache(1)
        deep = tokens("a" * 5000)
        cache.insert("", deep, pages(1, len(deep)))
        for end in range(len(deep) - 1, 0, -1):  # splits off one node for each page
            cache.match("", deep[:end])
        assert nodes() == before + 1 + len(deep)
        assert len(cache.clear()) == len(deep)
        assert cache._leaves.try_first() is None  # forgets the last of them
        assert nodes() == before + 1  # the root
    finally:
        gc.enable()


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64, 256])
def test_every_page_size(page_size: int) -> None:
    cache = RadixCache(page_size)
    prompt = np.random.default_rng(page_size).integers(0, 50_000, 1000).astype(np.int32)
    full = len(prompt) // page_size
    cache.insert("", prompt, pages(1, full + 1))
    for length in (0, 1, page_size - 1, page_size, page_size + 1, 999, 1000):
        assert cache.match("", prompt[:length]).tokens == length // page_size * page_size
        cache.check_integrity()
    other = prompt.copy()
    other[500] += 1
    assert cache.match("", other).tokens == 500 // page_size * page_size
    cache.check_integrity()


def broken_lock_count(cache: RadixCache, leaf: RadixNode) -> None:
    leaf.locks += 1


def broken_counter(cache: RadixCache, leaf: RadixNode) -> None:
    cache.evictable_pages += 1


def broken_pages(cache: RadixCache, leaf: RadixNode) -> None:
    leaf.pages = leaf.pages * 0 + 10


def broken_key(cache: RadixCache, leaf: RadixNode) -> None:
    leaf.tokens = leaf.tokens + 1


def broken_edge(cache: RadixCache, leaf: RadixNode) -> None:
    leaf.tokens = leaf.tokens[:-1]


def broken_heap(cache: RadixCache, leaf: RadixNode) -> None:
    cache._leaves._heap.clear()


@pytest.mark.parametrize(
    "damage",
    [
        broken_lock_count,
        broken_counter,
        broken_pages,
        broken_key,
        broken_edge,
        broken_heap,
    ],
)
def test_integrity_check_notices(damage: object) -> None:
    cache = RadixCache(PAGE)
    insert(cache, "aabb", 10)
    leaf = insert(cache, "aacccc", 20).node
    assert isinstance(leaf, RadixNode) and callable(damage)
    damage(cache, leaf)
    with pytest.raises(AssertionError):
        cache.check_integrity()


def test_the_naive_cache_takes_nothing_over() -> None:
    cache = NaiveCache(PAGE)
    inserted = cache.insert("", tokens("abcd"), pages(10, 2))
    assert inserted.pages.tolist() == [] and inserted.existing_pages == 0
    match = cache.match("", tokens("abcd"))
    assert match.pages.tolist() == [] and match.tokens == 0
    cache.lock(match.node)
    cache.unlock(match.node)
    assert cache.evict(4).tolist() == cache.clear().tolist() == cache.all_pages().tolist() == []
    assert cache.cached_pages == cache.evictable_pages == cache.locked_pages == 0
    cache.check_integrity()


def test_the_factory_builds_what_was_asked_for() -> None:
    radix = build_prefix_cache("radix", 16, "lfu")
    naive = build_prefix_cache("naive", 16)
    assert isinstance(radix, RadixCache) and isinstance(naive, NaiveCache)
    assert radix.page_size == naive.page_size == 16
    assert radix._leaves._priority is EVICTION["lfu"]
