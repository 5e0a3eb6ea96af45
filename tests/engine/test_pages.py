"""The page pool: every page is in one place, and giving one back twice is noticed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pages import PagePool
from engine.request import Int32Array


def ids(*pages: int) -> Int32Array:
    return np.array(pages, np.int32)


def take(pool: PagePool, count: int) -> Int32Array:
    pages = pool.try_take(count)
    assert pages is not None
    return pages


def test_hands_out_every_page_but_the_dummy() -> None:
    pool = PagePool(5)
    assert (pool.capacity, pool.free_pages) == (4, 4)
    pages = take(pool, 4)
    assert pages.tolist() == [1, 2, 3, 4] and pages.dtype == np.int32
    assert pool.free_pages == 0
    assert pool.try_take(1) is None
    assert take(pool, 0).tolist() == []
    pool.check_integrity()


def test_takes_nothing_when_fewer_are_free() -> None:
    pool = PagePool(4)
    assert pool.try_take(4) is None
    assert pool.free_pages == 3
    assert take(pool, 3).tolist() == [1, 2, 3]


def test_the_array_taken_is_the_callers_own() -> None:
    pool = PagePool(4)
    pages = take(pool, 2)
    pool.give(pages)
    pages[:] = 0
    assert take(pool, 2).min() > 0
    pool.check_integrity()


@pytest.mark.parametrize("pages", [1, 0, -3])
def test_refuses_a_pool_without_pages(pages: int) -> None:
    with pytest.raises(ValueError, match=str(pages)):
        PagePool(pages)


@pytest.mark.parametrize(
    ("given_back", "complaint"),
    [
        (ids(0), "no such"),  # the dummy
        (ids(1, 0), "no such"),
        (ids(-1), "no such"),
        (ids(6), "no such"),
        (ids(4), "free already"),  # never taken
        (ids(1, 5), "free already"),
        (ids(2, 2), "twice"),
        (ids(3, 1, 2, 3), "twice"),
    ],
)
def test_a_page_given_back_wrongly_is_a_bug(given_back: Int32Array, complaint: str) -> None:
    pool = PagePool(6)
    take(pool, 3)
    with pytest.raises(AssertionError, match=complaint):
        pool.give(given_back)


def test_a_page_given_back_twice_is_a_bug() -> None:
    pool = PagePool(6)
    pages = take(pool, 3)
    pool.give(pages[1:])
    pool.give(pages[:0])
    with pytest.raises(AssertionError, match="free already"):
        pool.give(pages)


@given(st.integers(2, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_a_page_is_free_or_taken_never_both(size: int, steps: list[tuple[bool, int]]) -> None:
    pool = PagePool(size)
    held: list[int] = []
    for takes, count in steps:
        if takes:
            pages = pool.try_take(count)
            assert (pages is None) == (count > size - 1 - len(held))
            held += [] if pages is None else pages.tolist()
        else:
            back = held[::2][:count]
            pool.give(ids(*back))
            held = [page for page in held if page not in back]
        assert len(set(held)) == len(held) and 0 not in held
        assert pool.free_pages + len(held) == pool.capacity
        pool.check_integrity()


def test_integrity_check_notices_a_page_that_is_free_twice() -> None:
    pool = PagePool(6)
    pool._stack[0] = pool._stack[1]
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_integrity()
