"""One output's place in its grammar: which ids may come next, and what has come.

Rules
- An EOS id is allowed where the grammar is complete, and nowhere else. So is a stop id of the
  request, even where its text would fit: ending there would leave the output unfinished.
- A matcher whose grammar turns out to be too much for the library ends its own request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from engine.errors import MatchError, NothingFits
from engine.grammar.library import LibraryError, fill
from engine.grammar.native import llguidance
from engine.grammar.vocabulary import Vocabulary
from engine.request import Int32Array

_ONE: Final = np.uint32(1)


class CompiledGrammar:
    """A grammar that is ready to be followed. Safe from any thread: it is only copied."""

    def __init__(
        self,
        start: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        measured_bytes: int,
        *,
        is_json: bool = False,
    ) -> None:
        """start    at the beginning, and never moved on
        is_json  whether an output is one JSON value, each of whose names has one spelling
        """
        self._start = start
        self.vocabulary = vocabulary
        self.bytes = measured_bytes
        self.is_json = is_json
        # An error in the automata that all copies share. Only ever set, by any thread: whoever
        # reads it too late gets a matcher that fails, as those that are running already do.
        self.spoiled = False

    def matcher(self, stop_ids: Sequence[int] = ()) -> Matcher:
        """A matcher at the beginning; costs a microsecond.

        stop_ids  of the request, each below the vocabulary's width
        """
        return Matcher(self, self._start.deep_copy(), stop_ids)


class Matcher:
    """The state of one output. Owned by the thread that fills its masks: one at a time."""

    def __init__(
        self, grammar: CompiledGrammar, start: llguidance.LLMatcher, stop_ids: Sequence[int]
    ) -> None:
        eos_ids = frozenset(grammar.vocabulary.eos_ids)
        self._grammar = grammar
        self._matcher = start
        self._ending_ids = eos_ids.union(stop_ids)
        self._stop_ids = tuple(sorted(self._ending_ids - eos_ids))
        self._ended_by_id = False
        self._escapes = grammar.vocabulary.escapes if grammar.is_json else None
        self._escaping = [0]  # after each token, the last one's last

    @property
    def mask_words(self) -> int:
        """Length of a mask's row."""
        return self._grammar.vocabulary.mask_words

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return self._ended_by_id or bool(self._matcher.is_accepting())

    @property
    def is_terminated(self) -> bool:
        """Whether the output has ended: by an EOS or stop id, or because nothing can follow."""
        return self._ended_by_id or bool(self._matcher.is_stopped())

    def fill_mask(self, row: Int32Array) -> None:
        """Sets in `row` the bits of the ids that may come next, at least one.

        row  [mask_words] int32; bit i % 32 of word i // 32 stands for id i

        Takes 10 to 500 µs, without the GIL where there is one. Raises MatchError.
        """
        try:
            fill(self._matcher, row)
        except LibraryError as error:
            self._grammar.spoiled = True
            raise MatchError(f"the grammar cannot be followed further: {error}") from error
        if self._escapes is not None:
            row &= self._escapes.keep[self._escaping[-1]]
        if self._stop_ids:
            self._place_stop_ids(row)

    def accept(self, token_id: int) -> bool:
        """Goes on by one token; False, and nothing is changed, where it is not allowed here."""
        if token_id in self._ending_ids:
            if self._ended_by_id or not self.is_complete:
                return False
            self._ended_by_id = True
            return True
        if self.is_terminated or not self._is_kept(token_id):
            return False
        if self._matcher.try_consume_tokens([token_id]) == 0:
            return False
        if self._escapes is not None:
            self._escaping.append(int(self._escapes.after[self._escaping[-1], token_id]))
        return True

    def rollback(self, tokens: int) -> None:
        """Takes the last `tokens` accepted tokens back. Raises MatchError where it cannot."""
        if tokens and self._ended_by_id:
            self._ended_by_id = False
            tokens -= 1
        if tokens and not self._matcher.rollback(tokens):
            raise MatchError(f"{tokens} tokens cannot be taken back")
        if tokens and self._escapes is not None:
            del self._escaping[-tokens:]

    def _is_kept(self, token_id: int) -> bool:
        if self._escapes is None:
            return True
        word, bit = divmod(token_id, 32)
        return bool(int(self._escapes.keep[self._escaping[-1], word]) >> bit & 1)

    def _place_stop_ids(self, row: Int32Array) -> None:
        allowed = self.is_complete
        bits = row.view(np.uint32)
        for token_id in self._stop_ids:
            word, bit = divmod(token_id, 32)
            if allowed:
                bits[word] |= _ONE << np.uint32(bit)
            else:
                bits[word] &= ~(_ONE << np.uint32(bit))
        if not allowed and not bits.any():
            raise NothingFits(
                "The grammar needs a token here that 'stop_token_ids' says is to end the output."
            )
