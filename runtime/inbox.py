"""How the receiver of one or more rings sleeps, and how it is woken.

A thread sleeps in `Inbox.wait`; an asyncio loop hands its `LoopInbox` a callback. Knows nothing of
what the rings carry. Why no wake-up is lost is argued in channel.py.
"""

import asyncio
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Protocol


class Wakeup:
    """An eventfd: a level that stays up until its owner clears it.

    Owned by the receiving thread, except `signal`, which is safe from any thread.
    """

    __slots__ = ("_fd",)

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def signal(self) -> None:
        """Wakes the receiver, now or when it next goes to sleep."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Takes back all signals so far."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass  # nobody had signalled

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """No ring may use it any more: its number may be given to another file."""
        os.close(self._fd)


class Sleeper(Protocol):
    """What an inbox asks of each of its rings' receiving ends."""

    @property
    def is_empty(self) -> bool: ...

    def mark_asleep(self, asleep: bool) -> None: ...


class Inbox:
    """Several rings of one receiving thread, and its sleep. Owned by that thread."""

    def __init__(self, wakeup: Wakeup, receivers: Sequence[Sleeper]) -> None:
        self.wakeup = wakeup
        self._receivers = tuple(receivers)
        self._poll = select.poll()
        self._poll.register(wakeup.fileno(), select.POLLIN)

    @property
    def is_empty(self) -> bool:
        return all(receiver.is_empty for receiver in self._receivers)

    def wait(self, timeout_s: float, *, spin_s: float = 0.0) -> None:
        """Returns once a ring has an item, after a signal, or after about `timeout_s`.

        spin_s  is spent looking before sleeping: a thread that sleeps is slower to wake
        """
        if spin_s > 0 and self._spin(spin_s):
            return
        if self.fall_asleep():
            self._poll.poll(timeout_s * 1e3)
            self.wake_up()

    def _spin(self, spin_s: float) -> bool:
        end = time.monotonic() + spin_s
        while self.is_empty:
            if time.monotonic() >= end:
                return False
        return True

    def fall_asleep(self) -> bool:
        """Marks the rings asleep; False, and still awake, where one has an item already."""
        self._mark(True)
        if self.is_empty:
            return True
        self._mark(False)
        return False

    def wake_up(self) -> None:
        """Ends a sleep. The caller then empties every ring, and looks at what signals stand for."""
        self._mark(False)
        self.wakeup.clear()

    def _mark(self, asleep: bool) -> None:
        for receiver in self._receivers:
            receiver.mark_asleep(asleep)


class LoopInbox:
    """An inbox whose thread runs an asyncio loop. Owned by that loop."""

    def __init__(self, inbox: Inbox, on_items: Callable[[], None]) -> None:
        """on_items  empties the rings; called once for all that has come, and after each signal"""
        self._inbox = inbox
        self._on_items = on_items
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts listening. Raises nothing that `on_items` does not raise."""
        self._loop = loop
        loop.add_reader(self._inbox.wakeup.fileno(), self._on_wakeup)
        self._empty()

    def detach(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.wakeup.fileno())
            self._loop = None

    def _on_wakeup(self) -> None:
        self._inbox.wake_up()
        self._empty()

    def _empty(self) -> None:
        if self._loop is None:
            return
        self._on_items()
        if not self._inbox.fall_asleep():
            self._loop.call_soon(self._empty)  # the loop's other work gets its turn first
