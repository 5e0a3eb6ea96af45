"""What may wait, what is turned away, and when it is told to come again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from httpd.service import Rejected
from runtime.queue_limit import Place, QueueCounts, QueueLimit


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def refusal(limit: QueueLimit, tokens: int, requests: int = 1) -> Rejected:
    with pytest.raises(Rejected) as caught:
        limit.admit(tokens, requests)
    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    return caught.value


def test_requests_are_limited_whether_they_wait_or_run() -> None:
    limit = QueueLimit(3, 1000, QueueCounts(1))
    two, one = limit.admit(1, 2), limit.admit(1)
    two.begin()
    told = refusal(limit, 1)
    assert "has 3 requests; the limit is 3" in told.message and told.retry_after_s == 1
    two.end()
    refusal(limit, 1, 2)
    limit.admit(1)
    one.end()
    two.end()
    assert limit.requests == 1


def test_tokens_are_limited_while_they_wait() -> None:
    limit = QueueLimit(100, 10, QueueCounts(1))
    first = limit.admit(6)
    second = limit.admit(4)
    assert "with this one's 1 they would be over the limit of 10" in refusal(limit, 1).message
    first.begin()
    limit.admit(6)
    refusal(limit, 1)
    second.end()
    limit.admit(4)


def test_a_prompt_above_the_limit_may_wait_alone() -> None:
    limit = QueueLimit(100, 10, QueueCounts(1))
    large = limit.admit(50)
    refusal(limit, 1)
    large.begin()
    limit.admit(1)
    refusal(limit, 50)
    assert (limit.requests, limit.tokens) == (2, 1)


def test_what_was_guessed_is_put_right() -> None:
    limit = QueueLimit(100, 10, QueueCounts(1))
    place = limit.admit(10)
    place.settle(3)
    assert limit.tokens == 3
    limit.admit(7)
    place.begin()
    place.settle(99)
    assert limit.tokens == 7


@pytest.mark.parametrize(
    ("tokens", "every_s", "wanted", "seconds"),
    [
        (100, 1.0, 100, 1),
        (100, 1.0, 250, 3),
        (100, 10.0, 100, 10),
        (1, 60.0, 100, 60),
        (0, 1, 1, 1),
    ],
)
def test_the_time_to_come_again_is_by_what_has_left_lately(
    tokens: int, every_s: float, wanted: int, seconds: int
) -> None:
    clock = Clock()
    limit = QueueLimit(10_000, 1000, QueueCounts(1), clock=clock)
    for _ in range(100):
        place = limit.admit(tokens)
        clock.now_s += every_s
        place.begin()
        place.end()
    limit.admit(1000)
    assert refusal(limit, wanted).retry_after_s == seconds


def test_what_left_long_ago_says_nothing_of_the_rate() -> None:
    """Ten prompts left in ten seconds, then nobody came for an hour."""
    clock = Clock()
    limit = QueueLimit(100, 100, QueueCounts(1), clock=clock)
    for _ in range(10):
        limit.admit(10).begin()
        clock.now_s += 1
    clock.now_s += 3600
    limit.admit(100)
    assert refusal(limit, 10).retry_after_s == 1, "not known any more"


def test_without_a_rate_it_is_a_second() -> None:
    limit = QueueLimit(10, 10, QueueCounts(1))
    limit.admit(10)
    assert refusal(limit, 10).retry_after_s == 1


@given(st.lists(st.tuples(st.sampled_from("asbe"), st.integers(0, 12), st.integers(1, 3))))
def test_nothing_is_counted_twice_or_for_ever(steps: list[tuple[str, int, int]]) -> None:
    limit = QueueLimit(8, 20, QueueCounts(1))
    alive: list[tuple[Place, int]] = []
    for act, number, requests in steps:
        if act == "a":
            try:
                alive.append((limit.admit(number, requests), requests))
            except Rejected:
                assert limit.requests + requests > 8 or limit.tokens + number > 20
        elif alive:
            place, left = alive.pop(number % len(alive))
            if act == "s":
                place.settle(number)
            elif act == "b":
                place.begin()
            else:
                place.end()
                left -= 1
            if left:
                alive.append((place, left))
        assert limit.requests == sum(left for _, left in alive) <= 8
        assert limit.tokens >= 0
    for place, left in alive:
        for _ in range(left):
            place.end()
    assert (limit.requests, limit.tokens) == (0, 0)


def test_when_a_request_would_start() -> None:
    clock = Clock()
    limit = QueueLimit(100, 100_000, QueueCounts(1), clock=clock)
    assert limit.start_estimate_s(rows_are_free=True) == 0
    assert limit.start_estimate_s(rows_are_free=False) is None, "nothing has started yet"
    for _ in range(5):  # 100 tokens every 2 seconds
        limit.admit(100).begin()
        clock.now_s += 2
    assert limit.start_estimate_s(rows_are_free=True) == 0
    assert limit.start_estimate_s(rows_are_free=False) == pytest.approx(10 / 4)
    limit.admit(300)
    assert limit.start_estimate_s(rows_are_free=True) == pytest.approx(300 * 10 / 400)
    clock.now_s += 3600
    assert limit.start_estimate_s(rows_are_free=True) is None, "what was an hour ago tells nothing"
