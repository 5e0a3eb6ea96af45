"""The rows that run: which of them compute their prompts, and which decode.

Knows neither who starts nor what tokens come: the scheduler says who, `engine/commit.py` takes the
tokens.
"""

from bisect import insort
from typing import Final

import numpy as np

from engine.constraints import Constraints
from engine.holdings import Holdings, RowArray
from engine.request import Int32Array
from engine.rows import RowState

NO_ROWS: Final[RowArray] = np.empty(0, np.intp)


class Batch:
    """Running rows by what they do in the next step. Owned by the engine thread."""

    def __init__(self, holdings: Holdings, constraints: Constraints) -> None:
        self.prefilling: list[int] = []  # by their turns; of equal ones, who started first
        self._holdings = holdings
        self._rows = holdings.rows
        self._constraints = constraints
        self._decoding: RowArray = NO_ROWS  # rows in state DECODE once refreshed
        self._decoding_is_stale = False
        self._joining: list[int] = []  # rows that decode from the next plan on
        self._previous_decode: RowArray = NO_ROWS  # what the last descriptor said

    def start(self, row: int, turn: int) -> None:
        """The row computes its prompt, before those whose turns are higher numbers."""
        self._rows.turn[row] = turn
        insort(self.prefilling, row, key=lambda each: int(self._rows.turn[each]))

    def take_chunk(self, row: int, budget: int) -> tuple[int, int]:
        """The next [start, end) of the row's prompt, at most `budget` tokens; it moves on."""
        rows = self._rows
        start, prefill_end = int(rows.cached[row]), int(rows.prefill_end[row])
        end = min(start + budget, prefill_end)
        rows.cached[row] = end
        if end == prefill_end:
            self.prefilling.remove(row)
            if end + 1 < rows.limit[row]:
                rows.state[row] = RowState.DECODE
                self._joining.append(row)
            else:
                rows.state[row] = RowState.TAIL
        return start, end

    def ready_to_decode(self) -> RowArray:
        """Rows that can decode now; the very array of the last plan where nothing has changed."""
        if self._decoding_is_stale or self._joining:
            both = np.concatenate([self._decoding, np.asarray(self._joining, np.intp)])
            self._decoding = both[self._rows.state[both] == RowState.DECODE]
            self._joining = []
            self._decoding_is_stale = False
        return self._constraints.ready(self._decoding, self._holdings.fence.completed_step)

    def advance(self, decode: RowArray, step: int) -> Int32Array:
        """Moves decode rows one token on; returns the positions of their sampled tokens."""
        rows = self._rows
        positions: Int32Array = rows.cached[decode] + 1
        rows.cached[decode] = positions
        rows.last_step[decode] = step
        last = (positions + 1 >= rows.limit[decode]).nonzero()[0]
        if len(last):
            rows.state[decode[last]] = RowState.TAIL
            self._decoding_is_stale = True
        return positions

    def is_same_decode(self, decode: RowArray) -> bool:
        """Whether the last step decoded the same rows; asked once a step."""
        same = decode is self._previous_decode and len(decode) > 0
        self._previous_decode = decode
        return same

    def end(self, row: int) -> None:
        """The row leaves, in any state: finished, aborted or retracted."""
        if self._rows.state[row] == RowState.PREFILL:
            self.prefilling.remove(row)
        self._decoding_is_stale = True
        self._constraints.end(row)
        self._holdings.end(row)
