"""What is told of a prefix cache: sizes and locks, in a bounded number of nodes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache_outline import CacheOutline, outline_of
from engine.naive_cache import NaiveCache
from engine.radix import RadixCache

PAGE = 2


def filled(prompts: list[list[int]]) -> RadixCache:
    cache, page = RadixCache(PAGE), 0
    for prompt in prompts:
        pages = len(prompt) // PAGE
        cache.insert(
            "a secret", np.array(prompt, np.int32), np.arange(page, page + pages, dtype=np.int32)
        )
        page += pages
    return cache


def depth_first(outline: CacheOutline) -> list[tuple[int, int]]:
    return [(node.parent, node.tokens) for node in outline.nodes]


def test_prompts_that_part() -> None:
    cache = filled([[1, 2, 3, 4, 5, 6], [1, 2, 7, 8]])
    cache.lock(cache.match("a secret", np.array([1, 2, 7, 8], np.int32)).node)
    outline = outline_of(cache)
    assert (outline.page_size, outline.cached_tokens, outline.locked_tokens) == (PAGE, 8, 4)
    assert outline.total_nodes == 3 and depth_first(outline) == [(-1, 2), (0, 2), (0, 4)]
    assert [(n.locks, n.uses, n.hidden) for n in outline.nodes] == [(1, 1, 0), (1, 1, 0), (0, 0, 0)]
    assert "secret" not in repr(outline)


def test_what_was_used_last_is_drawn() -> None:
    cache = filled([[first, first] for first in range(50)])
    cache.match("a secret", np.array([7, 7], np.int32))
    outline = outline_of(cache, most=5)
    assert len(outline.nodes) == 5 and outline.total_nodes == 50
    assert outline_of(cache, most=1).nodes[0].tokens == PAGE
    cache.clear()
    assert outline_of(cache).nodes == () and outline_of(cache).total_nodes == 0


def test_what_is_not_drawn_is_counted() -> None:
    cache = filled([[1, 2, n, n] for n in range(10, 20)])
    outline = outline_of(cache, most=4)
    assert [node.hidden for node in outline.nodes] == [7, 0, 0, 0]


def test_a_cache_that_keeps_nothing() -> None:
    assert outline_of(NaiveCache(PAGE)) == CacheOutline(PAGE, 0, 0, 0, ())


@given(
    st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=12), max_size=20), st.integers(1, 9)
)
def test_any_tree(prompts: list[list[int]], most: int) -> None:
    cache = filled(prompts)
    cache.check_integrity()
    outline, whole = outline_of(cache, most), outline_of(cache)
    assert (
        len(outline.nodes) == min(most, whole.total_nodes) and len(whole.nodes) == whole.total_nodes
    )
    assert sum(node.tokens for node in whole.nodes) == whole.cached_tokens
    for each in (outline, whole):
        assert all(node.parent < index for index, node in enumerate(each.nodes))
    assert {node.hidden for node in whole.nodes} <= {0}


@pytest.mark.parametrize("most", [1, 400])
def test_it_is_made_in_bounded_time(most: int) -> None:
    """The children that are looked at are few, however many there are."""
    cache = filled([[n, n] for n in range(20_000)])
    outline = outline_of(cache, most)
    assert len(outline.nodes) == most and outline.total_nodes == 20_000
