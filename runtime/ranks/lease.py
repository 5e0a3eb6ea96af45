"""A process's promise to another machine: whoever is not heard there is not left over here.

A process that a signal has stopped can do nothing, not even end; nor can another machine end it.
So the kernel does: a timer whose signal is SIGKILL, which a stopped process obeys, too. While the
process is well it puts the timer off.

Linux alone: `timer_create` of the C library, since Python has none.
"""

import ctypes
import os
import signal
from typing import Final

_CLOCK_MONOTONIC: Final = 1  # linux/time.h
_SIGEV_SIGNAL: Final = 0  # asm-generic/siginfo.h


class _SignalEvent(ctypes.Structure):
    """struct sigevent: 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p), ("number", ctypes.c_int), ("notify", ctypes.c_int),
        ("rest", ctypes.c_int * 12),
    )  # fmt: skip


class _Setting(ctypes.Structure):
    """struct itimerspec: an interval, which is none here, and the time left."""

    _fields_ = tuple(
        (name, ctypes.c_long)
        for name in ("interval_s", "interval_ns", "left_s", "left_ns")
    )  # fmt: skip


class Lease:
    """Ends this process unless it is renewed. Safe from any thread: the kernel keeps it."""

    def __init__(self) -> None:
        """It does not run before it is renewed. Raises OSError where no timer is to be had."""
        # librt is part of libc since glibc 2.34, and is still there by its name.
        self._library = ctypes.CDLL("librt.so.1", use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(None, signal.SIGKILL, _SIGEV_SIGNAL)
        self._check(
            self._library.timer_create(
                _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
            )
        )

    def renew(self, seconds: int) -> None:
        """From now on the process has so many seconds; 0: as many as it likes."""
        setting = _Setting(0, 0, seconds, 0)
        self._check(self._library.timer_settime(self._timer, 0, ctypes.byref(setting), None))

    def close(self) -> None:
        """Nothing ends the process any more."""
        self._check(self._library.timer_delete(self._timer))

    @staticmethod
    def _check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
