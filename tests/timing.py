"""Time that must grow with the size of the work, and no faster."""

from collections.abc import Callable

import pytest


def check_linear(seconds: Callable[[int], float], size: int) -> None:
    """Fails where four times the size takes more than 2.5 times as long for each doubling.

    seconds  runs the work for a size, and tells its time on this thread
    """
    # Twice doubled: linear is 4, quadratic 16. The best of several runs, since other work disturbs.
    short = long = float("inf")
    for _ in range(12):
        short, long = min(short, seconds(size)), min(long, seconds(4 * size))
        if long < 2.5**2 * short:
            return
    pytest.fail(f"{long / short:.1f} times as long for 4 times the size")
