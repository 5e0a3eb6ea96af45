"""Values counted by size, for Prometheus, and the last few seconds of them, for people."""

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from httpd.copies import copy_of
from runtime.live import WINDOW_S, Quantiles

_MOST_RECENT: Final = 16_384  # entries; one stands for all tokens of a step


class Histogram:
    """How many values there were up to each bound. Owned by one thread; any may read it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last: above every bound
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add_all(self, other: "Histogram") -> None:
        """Takes in another of the same bounds, in which its owner may be counting."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts.copy(), strict=True)]
        self.total += other.total


class Recent:
    """The values of the last `WINDOW_S` seconds. Owned by one thread; any may copy it."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: deque[tuple[float, float, int]] = deque(maxlen=_MOST_RECENT)

    def add(self, now_s: float, value: float, times: int = 1) -> None:
        self._entries.append((now_s, value, times))

    def add_all(self, other: "Recent") -> None:
        """Takes in another's values, to which its owner may be adding."""
        self._entries = deque(heapq.merge(self._entries, copy_of(other._entries)))

    def quantiles(self, now_s: float) -> Quantiles:
        entries = self._entries
        while entries and entries[0][0] < now_s - WINDOW_S:
            entries.popleft()
        return quantiles_of((value, times) for _, value, times in entries)


def quantiles_of(values: Iterable[tuple[float, int]]) -> Quantiles:
    """Of (value, how many times): the smallest value that a share of all is not above."""
    ordered = sorted(values)
    count = sum(times for _, times in ordered)
    if not count:
        return Quantiles(0, None, None, None, None)
    ends = [*accumulate(times for _, times in ordered)]
    p50, p90, p99 = (ordered[bisect_left(ends, share * count)][0] for share in (0.5, 0.9, 0.99))
    return Quantiles(count, p50, p90, p99, ordered[-1][0])


def bucket_quantiles(bounds: Sequence[float], counts: Sequence[int]) -> Quantiles:
    """As far as buckets tell: values are taken to lie evenly in theirs, as Prometheus' own
    `histogram_quantile` takes them, or at the largest bound where they are above them all."""
    ends = [*accumulate(counts)]
    total = ends[-1] if ends else 0
    if not total:
        return Quantiles(0, None, None, None, None)
    uppers = [*bounds, bounds[-1]]
    lowers = [0.0, *bounds]

    def at(share: float) -> float:
        rank = share * total
        bucket = bisect_left(ends, rank)
        inside = 1 - (ends[bucket] - rank) / counts[bucket]
        return lowers[bucket] + (uppers[bucket] - lowers[bucket]) * inside

    p50, p90, p99 = (at(share) for share in (0.5, 0.9, 0.99))
    return Quantiles(total, p50, p90, p99, at(1.0))


class PerSecond:
    """Amounts of each of the last seconds. Owned by one thread; any may copy it."""

    __slots__ = ("_first", "_kinds", "_seconds")

    def __init__(self, kinds: int) -> None:
        """kinds  how many amounts are kept apart"""
        self._kinds = kinds
        self._first: int | None = None  # the second in which counting began
        self._seconds: deque[tuple[int, list[float]]] = deque(maxlen=int(WINDOW_S) + 2)

    def add(self, now_s: float, *amounts: float) -> None:
        second = int(now_s)
        if self._first is None:
            self._first = second
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, [0.0] * self._kinds))
        sums = self._seconds[-1][1]
        for kind, amount in enumerate(amounts):
            sums[kind] += amount

    def add_all(self, other: "PerSecond") -> None:
        """Takes in another's amounts, to which its owner may be adding."""
        if other._first is None:
            return
        self._first = other._first if self._first is None else min(self._first, other._first)
        sums = {second: [*amounts] for second, amounts in self._seconds}
        for second, amounts in copy_of(other._seconds):
            before = sums.setdefault(second, [0.0] * self._kinds)
            sums[second] = [a + b for a, b in zip(before, amounts.copy(), strict=True)]
        self._seconds = deque(sorted(sums.items()))

    def rates(self, now_s: float) -> tuple[float, ...]:
        """A second, over the last whole seconds: as many as the window has, or as there were."""
        if self._first is None:
            return (0.0,) * self._kinds
        end = int(now_s)
        start = max(end - int(WINDOW_S), self._first)
        inside = [sums for second, sums in self._seconds if start <= second < end]
        seconds = max(1, end - start)
        return tuple(sum(each[kind] for each in inside) / seconds for kind in range(self._kinds))
