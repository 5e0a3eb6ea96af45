"""Rows whose tokens a grammar restricts: the mask of each step, and what the grammar has seen.

A mask depends on the token before it, which the host knows only once its step is committed: such a
row sits out the step that is planned meanwhile, and all others go on. Knows no grammars: those are
engine.grammar's.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.request import Int32Array
from engine.rows import Rows
from engine.waiting import Waiting

RowArray = NDArray[np.intp]
_NO_MASKS = np.empty(0, np.int32), np.empty((0, 0), np.int32)


class Matcher(Protocol):
    """Where one response stands in its grammar. Owned by the engine thread."""

    @property
    def mask_words(self) -> int:
        """ceil(vocabulary / 32)."""
        ...

    def fill_mask(self, words: Int32Array) -> None:
        """Sets bit i % 32 of words[i // 32] for each id i that may come next, clears the others.

        At least one is set: an end-of-sequence id, where the grammar is complete.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Takes the next token; False where the grammar has no place for it."""
        ...


class Constraints:
    """The matchers of running rows. Owned by the engine thread."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._is_constrained = np.zeros(rows.count, np.bool_)
        self._matchers: dict[int, Matcher] = {}

    def begin(self, row: int, waiting: Waiting) -> None:
        """Restricts the row as its request asks."""
        request = waiting.request
        if request.grammar is None:
            return
        matcher = self._matchers[row] = request.grammar.matcher()
        self._is_constrained[row] = True
        for token_id in waiting.token_ids[len(request.prompt_ids) :].tolist():
            fits = matcher.accept(token_id)  # made under the same grammar, before a retraction
            assert fits

    def end(self, row: int) -> None:
        self._matchers.pop(row, None)
        self._is_constrained[row] = False

    def ready(self, decode: RowArray, completed_step: int) -> RowArray:
        """Those rows of `decode` whose mask can be made; the very array where that is all."""
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
        matchers = [self._matchers[row] for row in rows.tolist()]
        masks = np.zeros((len(rows), matchers[0].mask_words), np.int32)
        for matcher, words in zip(matchers, masks, strict=True):
            matcher.fill_mask(words)
        return rows.astype(np.int32), masks

    def refused(
        self, sampled: RowArray, token_ids: Int32Array, stopped: NDArray[np.bool_]
    ) -> list[int]:
        """Takes the tokens of a step; indices of those that a grammar has no place for.

        stopped  [n] which of them end their request: they are no part of its text
        """
        if not self._matchers:
            return []
        taken = np.nonzero(self._is_constrained[sampled] & ~stopped)[0].tolist()
        return [
            index
            for index in taken
            if not self._matchers[int(sampled[index])].accept(int(token_ids[index]))
        ]
