"""Rows whose tokens a grammar restricts: the mask of each step, and what the grammar has seen.

A mask depends on the token before it, which the host knows only once its step is committed: such a
row sits out the step that is planned meanwhile, and all others go on. Masks are made when a step is
committed, while the device computes the next one. Knows no grammars: those are engine.grammar's.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.errors import MatchError
from engine.request import Int32Array, Matcher
from engine.rows import Rows
from engine.waiting import Waiting

RowArray = NDArray[np.intp]
_NO_MASKS = np.empty(0, np.int32), np.empty((0, 0), np.int32)
NOT_IN_GRAMMAR: Final = "The output left the grammar that was asked for."


class Constraints:
    """The matchers of running rows, each with its next mask. Owned by the engine thread."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._is_constrained = np.zeros(rows.count, np.bool_)
        self._matchers: dict[int, tuple[Matcher, Int32Array]] = {}

    def begin(self, row: int, waiting: Waiting, stop_ids: Sequence[int]) -> str | None:
        """Restricts the row as its request asks; returns what is wrong where that cannot be."""
        request = waiting.request
        if request.grammar is None:
            return None
        matcher = request.grammar.matcher(stop_ids)
        self._matchers[row] = matcher, np.zeros(matcher.mask_words, np.int32)
        self._is_constrained[row] = True
        made = waiting.token_ids[len(request.prompt_ids) :]  # before a retraction
        return self._go_on(row, made.tolist())

    def end(self, row: int) -> None:
        self._matchers.pop(row, None)
        self._is_constrained[row] = False

    def ready(self, decode: RowArray, completed_step: int) -> RowArray:
        """Those rows of `decode` whose mask is made; the very array where that is all."""
        if not self._matchers:
            return decode
        waits = self._is_constrained[decode] & (self._rows.last_step[decode] > completed_step)
        return decode[~waits] if waits.any() else decode

    def masks(self, prefilled: RowArray, decode: RowArray) -> tuple[Int32Array, Int32Array]:
        """Rows among those that are sampled in a step, [n] int32, and their masks, [n, words]."""
        if not self._matchers:
            return _NO_MASKS
        sampled = np.concatenate([prefilled, decode])
        rows = sampled[self._is_constrained[sampled]]
        if not len(rows):
            return _NO_MASKS
        return rows.astype(np.int32), np.stack([self._matchers[row][1] for row in rows.tolist()])

    def commit(
        self, sampled: RowArray, token_ids: Int32Array, ended: NDArray[np.bool_]
    ) -> list[tuple[int, str]]:
        """Takes a step's tokens; the index of each that ends its request, and what is wrong.

        ended  [n] which of them end their request anyway
        """
        if not self._matchers:
            return []
        taken = np.nonzero(self._is_constrained[sampled] & ~ended)[0].tolist()
        told = (
            (index, self._go_on(int(sampled[index]), [int(token_ids[index])])) for index in taken
        )
        return [(index, error) for index, error in told if error is not None]

    def _go_on(self, row: int, token_ids: list[int]) -> str | None:
        """Takes the tokens and makes the next mask; returns what is wrong, if anything."""
        matcher, mask = self._matchers[row]
        if not all(matcher.accept(token_id) for token_id in token_ids):
            return NOT_IN_GRAMMAR
        try:
            matcher.fill_mask(mask)
        except MatchError as error:
            return str(error)
        return None
