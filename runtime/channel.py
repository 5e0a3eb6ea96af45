"""The one way from thread to thread: a bounded ring with one sender and one receiver.

Knows nothing of what is sent. How a receiver sleeps and is woken is in inbox.py.

Rules
- One thread calls the sender's methods, one thread the receiver's. Each end keeps its own monotonic
  counter and never reads the other's; all they share is the list `cells`.
- Items are never None: None in a cell means that it is free.
- The last cell is not a slot: it is True while the receiver sleeps. The receiver alone writes it.

Guarantees
- Items arrive once each and in order. On a full ring `try_push` returns False; nothing is dropped.
- Whoever receives an item sees all that its sender wrote before sending it.
- A receiver that marked itself asleep and then found the ring empty is woken by the next push.
- A push makes a system call only while the receiver is asleep.

Assumes, of a free-threaded CPython (library/threadsafety, "Thread safety for list objects"; the GIL
of other builds gives more than this)
- Reading `cells[i]` is atomic and takes no lock. The object read was published whole, with what its
  writer did before: readers could not safely touch it otherwise.
- Writing `cells[i] = x` holds the list's own lock.

Why no wake-up is lost: the sender writes its item, then reads the sleep mark; the receiver writes
its sleep mark, then reads the slot. Both writes hold the same lock, so one comes first, and the
other side's read, which follows its own write, sees it: either the receiver finds the item or the
sender finds the mark. With two objects instead of
one list this would need a fence, and Python has none.
"""

import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from runtime.inbox import Wakeup

T = TypeVar("T")

_WAIT_FIRST_S: Final = 20e-6  # a receiver that is running frees a slot within microseconds
_WAIT_MOST_S: Final = 1e-3


class Sender(Generic[T]):
    """The end that puts items in. Owned by the sending thread."""

    __slots__ = ("_cells", "_mask", "_tail", "_wakeup", "sleep")

    def __init__(self, cells: list[Any], wakeup: Wakeup) -> None:
        self._cells = cells
        self._mask = len(cells) - 2
        self._tail = 0
        self._wakeup = wakeup
        self.sleep: Callable[[float], None] = time.sleep  # tests put a fake in its place

    def try_push(self, item: T) -> bool:
        """True once the item is in the ring; False where the ring is full."""
        cells, tail = self._cells, self._tail
        at = tail & self._mask
        if cells[at] is not None:
            return False
        cells[at] = item
        self._tail = tail + 1
        if cells[-1]:
            self._wakeup.signal()
        return True

    def push_wait(self, item: T, timeout_s: float) -> bool:
        """Like `try_push`, but waits for room; False where there was none in time."""
        if self.try_push(item):
            return True
        deadline = time.monotonic() + timeout_s
        pause_s = _WAIT_FIRST_S
        while time.monotonic() < deadline:
            self.sleep(pause_s)
            if self.try_push(item):
                return True
            pause_s = min(2 * pause_s, _WAIT_MOST_S)
        return False

    @property
    def pushed(self) -> int:
        """Items sent so far."""
        return self._tail


class Receiver(Generic[T]):
    """The end that takes items out. Owned by the receiving thread."""

    __slots__ = ("_cells", "_head", "_mask")

    def __init__(self, cells: list[Any]) -> None:
        self._cells = cells
        self._mask = len(cells) - 2
        self._head = 0

    def try_pop(self) -> T | None:
        """The oldest item, or None where the ring is empty."""
        cells, head = self._cells, self._head
        at = head & self._mask
        item: T | None = cells[at]
        if item is not None:
            cells[at] = None
            self._head = head + 1
        return item

    def pop_all(self) -> list[T]:
        """The items that are there now, oldest first; at most one round of the ring."""
        cells, mask, head = self._cells, self._mask, self._head
        items: list[T] = []
        end = head + mask + 1  # a fast sender must not keep us here
        while head < end and (item := cells[head & mask]) is not None:
            cells[head & mask] = None
            items.append(item)
            head += 1
        self._head = head
        return items

    @property
    def popped(self) -> int:
        """Items taken so far."""
        return self._head

    @property
    def is_empty(self) -> bool:
        return self._cells[self._head & self._mask] is None

    def mark_asleep(self, asleep: bool) -> None:
        """Says whether a push must wake the receiver, who asks `is_empty` after saying True."""
        self._cells[-1] = asleep


class Channel(Generic[T]):
    """Both ends of one ring. Read only: safe from any thread."""

    __slots__ = ("capacity", "receiver", "sender")

    def __init__(self, capacity: int, wakeup: Wakeup) -> None:
        """
        capacity  slots, rounded up to a power of two
        wakeup    of the receiver, whose other rings may share it
        """
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1")
        slots = 1 << (capacity - 1).bit_length()
        cells: list[Any] = [None] * slots + [False]
        self.capacity: Final = slots
        self.sender: Final[Sender[T]] = Sender(cells, wakeup)
        self.receiver: Final[Receiver[T]] = Receiver(cells)

    @property
    def depth(self) -> int:
        """About how many items are in it, as a third thread sees it."""
        popped = self.receiver.popped  # before `pushed`, or there might seem to be fewer than none
        return self.sender.pushed - popped
