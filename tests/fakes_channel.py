"""Cells that let two threads touch them in a given order only."""

import threading
from collections.abc import Sequence
from typing import Any, SupportsIndex


class ScheduledCells(list[Any]):
    """Each access waits for its thread's turn; `schedule` names threads, one name an access.

    Safe from any thread.
    """

    def __init__(self, cells: Sequence[Any]) -> None:
        super().__init__(cells)
        self.schedule: list[str] = []
        self._turn = threading.Condition()

    def _take_turn(self) -> None:
        me = threading.current_thread().name
        with self._turn:
            if not self._turn.wait_for(lambda: not self.schedule or self.schedule[0] == me, 10):
                raise TimeoutError(f"{me} never got its turn: {self.schedule}")
            if self.schedule:
                self.schedule.pop(0)
            self._turn.notify_all()

    def __getitem__(self, at: Any) -> Any:
        self._take_turn()
        return super().__getitem__(at)

    def __setitem__(self, at: SupportsIndex | slice, value: Any) -> None:
        self._take_turn()
        super().__setitem__(at, value)
