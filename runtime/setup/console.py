"""What set-up tells the person who waits for it, and how it gives up.

Everything goes to standard error, so that `plait run` leaves standard output to the command it
runs.
"""

import sys
import time


class SetupError(Exception):
    """Something outside this program is missing or failed; says what, and what to do about it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  {remedy}")
        self.problem, self.remedy = problem, remedy


def say(text: str) -> None:
    print(f"plait: {text}", file=sys.stderr, flush=True)


def size(count: float) -> str:
    """A number of bytes as people read it: 93 MB, 2.5 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            digits = 1 if unit == "GB" else 0
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count / 1e3:.0f} kB"


class Status:
    """One line that follows a long step: rewritten on a terminal, now and then a new one elsewhere.

    Owned by the main thread; used as a context manager, which ends the line.
    """

    # A log file wants proof of life, not a film.
    _QUIET_S = 20.0
    _WORTH_TELLING_S = 5.0

    def __init__(self, title: str) -> None:
        self._title = title
        self._started_s = time.monotonic()
        self._printed_s = self._started_s
        self._detail = ""
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> "Status":
        say(self._title)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        if kind is None and self.elapsed_s >= self._WORTH_TELLING_S:
            say(f"  done in {self.elapsed_s:.0f} s")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def show(self, detail: str | None = None) -> None:
        """Shows `detail`, or the last one again with a newer time."""
        self._detail = self._detail if detail is None else detail
        line = f"  {self.elapsed_s:4.0f} s  {self._detail}"
        now_s = time.monotonic()
        if self._terminal:
            print(f"\r\033[K{line[:100]}", end="", file=sys.stderr, flush=True)
        elif now_s - self._printed_s >= self._QUIET_S:
            self._printed_s = now_s
            print(line, file=sys.stderr, flush=True)
