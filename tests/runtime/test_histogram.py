"""Buckets, quantiles and rates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.live import WINDOW_S
from runtime.metrics.histogram import (
    Histogram,
    PerSecond,
    Recent,
    bucket_quantiles,
    quantiles_of,
)


def test_a_value_at_a_bound_is_below_it() -> None:
    """As Prometheus' `le` says."""
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    histogram.observe(9.0, times=3)
    assert histogram.counts == [2, 2, 4] and histogram.total == 7.5 + 27


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1))
def test_quantiles_are_those_of_all_values(values: list[tuple[float, int]]) -> None:
    told = quantiles_of(values)
    every = np.repeat([value for value, _ in values], [times for _, times in values])
    expected = np.quantile(every, [0.5, 0.9, 0.99, 1.0], method="inverted_cdf")
    assert told.count == len(every)
    assert [told.p50, told.p90, told.p99, told.max] == pytest.approx(expected)


def test_only_the_window_counts() -> None:
    recent = Recent()
    recent.add(100.0, 50.0)
    recent.add(105.0, 1.0, times=2)
    assert recent.quantiles(106.0).max == 50.0
    told = recent.quantiles(101.0 + WINDOW_S)
    assert (told.count, told.max) == (2, 1.0)
    assert recent.quantiles(1000.0).p50 is None


def test_buckets_tell_about_where_their_values_are() -> None:
    told = bucket_quantiles((1.0, 2.0), (5, 4, 1))
    assert (told.count, told.p50, told.p90, told.p99, told.max) == (10, 1.0, 2.0, 2.0, 2.0)
    told = bucket_quantiles((1.0, 3.0), (0, 10, 0))
    assert (told.p50, told.p90, told.max) == pytest.approx((2.0, 2.8, 3.0))
    assert bucket_quantiles((1.0,), (0, 0)).p50 is None


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_quantiles_of_buckets_are_in_order(counts: list[int]) -> None:
    told = bucket_quantiles((1.0, 2.0, 4.0), counts)
    assert told.count == sum(counts)
    if told.count:
        found = [told.p50, told.p90, told.p99, told.max]
        assert found == sorted(found) and all(0 <= each <= 4 for each in found)


def test_rates_are_of_whole_seconds() -> None:
    rates = PerSecond(2)
    assert rates.rates(5.0) == (0.0, 0.0)
    for tenth in range(35):  # 10 and 20 a second, from 100.0 to 103.4
        rates.add(100.0 + tenth / 10, 1, 2)
    assert rates.rates(103.45) == (10.0, 20.0)
    assert rates.rates(100.0 + WINDOW_S) == (3.5, 7.0)
    assert rates.rates(100.0 + 3 * WINDOW_S) == (0.0, 0.0)
