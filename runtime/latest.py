"""The latest value of something that one thread knows and others want to look at.

Assumes that an attribute is read and replaced whole (library/threadsafety). What must not be missed
goes through a channel instead.
"""

from typing import Generic, TypeVar

Value = TypeVar("Value")


class Latest(Generic[Value]):
    """A frozen value that is replaced whole. Owned by the thread that sets it; any may read it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Value | None = None  # None before the first
