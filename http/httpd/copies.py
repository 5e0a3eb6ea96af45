"""Copies of what another thread goes on adding to."""

from collections import deque
from typing import TypeVar

Item = TypeVar("Item")


def copy_of(changing: deque[Item]) -> list[Item]:
    """The items at some moment during the call. Safe from any thread.

    Lists and dictionaries copy themselves whole (library/threadsafety); a deque raises RuntimeError
    where it changes meanwhile. Each try takes microseconds, a step of an engine milliseconds.
    """
    while True:
        try:
            return list(changing)
        except RuntimeError:
            continue
