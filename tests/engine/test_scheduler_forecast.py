"""What admission expects of running requests: their share, and when they need the most memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.forecast import FLOOR, START, OutputForecast, peak_tokens


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=8))
def test_the_peak_is_that_of_rows_that_go_on_side_by_side(rows: list[tuple[int, int]]) -> None:
    to_come = np.array([tokens for tokens, _ in rows], np.float64)
    held = np.array([tokens for _, tokens in rows])

    def needed(made: int) -> int:
        """When each has made so many tokens, or has made all of its own and just ended."""
        return sum(made if made <= tokens else -has for tokens, has in rows)

    assert peak_tokens(to_come, held) == max(needed(made) for made in range(301))


def test_the_peak_is_below_the_sum_where_short_ones_end_first() -> None:
    assert peak_tokens(np.array([100.0, 1000.0]), np.array([500, 0])) == 500
    assert peak_tokens(np.array([1000.0, 1000.0]), np.array([500, 0])) == 2000


def test_the_share_follows_what_is_made_and_rises_with_a_retraction() -> None:
    forecast = OutputForecast()
    assert forecast.share == pytest.approx(START)
    for _ in range(200):
        forecast.finished(10, 1000)
    assert forecast.share == pytest.approx(FLOOR)
    forecast.retracted()
    assert forecast.share == pytest.approx(0.31, abs=0.01)
