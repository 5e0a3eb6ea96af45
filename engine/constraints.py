"""Rows whose tokens are restricted, by a grammar, a budget for reasoning or bad words: their masks.

A mask depends on the token before it, which the host knows only once its step is committed: such a
row sits out the step that is planned meanwhile, and all others go on. Masks are made when a step is
committed, while the device computes the next one. Knows no grammars: those are engine.grammar's.

Bad words and allowed ids hold for reasoning and answer alike. Where they and a grammar leave no
token, the request ends alone, and is told so. What always holds is a rule besides (engine.rules):
a row with such rules alone draws under no masks, and sits out nothing.

A grammar is the answer's: it begins where reasoning ends. Phases of a row
  MAY_THINK  its first token: one that opens reasoning, or the answer's first
  THINKING   anything; once the budget is spent, only what closes reasoning
  ANSWER     as the grammar says
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.bad_words import BadWords
from engine.errors import MatchError, NothingFits
from engine.request import Finish, Int32Array, Matcher, Request, Thinking
from engine.rows import Rows
from engine.waiting import Waiting

RowArray = NDArray[np.intp]
_NO_MASKS = np.empty(0, np.int32), np.empty((0, 0), np.int32)
_NOTHING_FITS: Final = (
    "No token can come next: each is ruled out by 'allowed_token_ids', by 'bad_words' or by the "
    "form that is asked for."
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ends that its restrictions end."""

    finish: Finish  # one of the FAILURES
    message: str


NOT_IN_GRAMMAR: Final = Failure(Finish.ERROR, "The output left the grammar that was asked for.")


class _Phase(enum.Enum):
    MAY_THINK = enum.auto()
    THINKING = enum.auto()
    ANSWER = enum.auto()


def single_bad_ids(request: Request) -> list[int]:
    """Ids that the request's output never has, whatever is before them."""
    return [ids[0] for ids in request.bad_sequences if len(ids) == 1]


def may_be_masked(request: Request) -> bool:
    """Whether the request's tokens may be drawn under masks."""
    return (
        request.grammar is not None
        or request.thinking is not None
        or any(len(ids) > 1 for ids in request.bad_sequences)
    )


def failure_at_once(request: Request, vocab_size: int) -> Failure | None:
    """What would end the request before its first token; None where that is not known yet.

    vocab_size  the logits' width
    """
    params = request.params
    if params.allowed_token_ids is None and not (params.stop_token_ids or request.bad_sequences):
        return None  # whoever compiled the grammar has seen that it begins
    return _Restricted(request, params.stop_token_ids, vocab_size).go_on([])


class Constraints:
    """The restrictions of running rows. Owned by the engine thread."""

    def __init__(self, rows: Rows, vocab_size: int) -> None:
        """vocab_size  the logits' width"""
        self._rows = rows
        self._vocab_size = vocab_size
        self._is_restricted = np.zeros(rows.count, np.bool_)
        self._restricted: dict[int, _Restricted] = {}

    def begin(self, row: int, waiting: Waiting, stop_ids: Sequence[int]) -> Failure | None:
        """Restricts the row as its request asks; returns what is wrong where that cannot be."""
        request = waiting.request
        if not may_be_masked(request):
            return None
        restricted = self._restricted[row] = _Restricted(request, stop_ids, self._vocab_size)
        self._is_restricted[row] = True
        made = waiting.token_ids[len(request.prompt_ids) :]  # before a retraction
        return restricted.go_on(made.tolist())

    def end(self, row: int) -> None:
        self._restricted.pop(row, None)
        self._is_restricted[row] = False

    def ready(self, decode: RowArray, completed_step: int) -> RowArray:
        """Those rows of `decode` whose mask is made; the very array where that is all."""
        if not self._restricted:
            return decode
        waits = self._is_restricted[decode] & (self._rows.last_step[decode] > completed_step)
        return decode[~waits] if waits.any() else decode

    def masks(self, prefilled: RowArray, decode: RowArray) -> tuple[Int32Array, Int32Array]:
        """Rows among those that are sampled in a step, [n] int32, and their masks, [n, words]."""
        if not self._restricted:
            return _NO_MASKS
        sampled = np.concatenate([prefilled, decode])
        rows = sampled[self._is_restricted[sampled]].tolist()
        masks = [(row, mask) for row in rows if (mask := self._restricted[row].mask) is not None]
        if not masks:
            return _NO_MASKS
        return np.array([row for row, _ in masks], np.int32), np.stack([mask for _, mask in masks])

    def commit(
        self, sampled: RowArray, token_ids: Int32Array, ended: NDArray[np.bool_]
    ) -> list[tuple[int, Failure]]:
        """Takes a step's tokens; the index of each that ends its request, and what is wrong.

        ended  [n] which of them end their request anyway
        """
        if not self._restricted:
            return []
        failures = []
        for index in np.nonzero(self._is_restricted[sampled] & ~ended)[0].tolist():
            row = int(sampled[index])
            failure = self._restricted[row].go_on([int(token_ids[index])])
            if failure is not None:
                failures.append((index, failure))
            elif self._restricted[row].is_free:
                self.end(row)
        return failures


class _Restricted:
    """One row's phase and next mask. Owned by the engine thread."""

    def __init__(self, request: Request, stop_ids: Sequence[int], vocab_size: int) -> None:
        self._thinking: Thinking | None = request.thinking
        self._matcher: Matcher | None = None
        if request.grammar is not None:
            self._matcher = request.grammar.matcher(stop_ids)
        self._phase = _Phase.ANSWER
        if request.thinking is not None:
            opened = request.begins_reasoning
            self._phase = _Phase.THINKING if opened else _Phase.MAY_THINK
        self._spent = 0  # tokens of reasoning
        follows = any(len(ids) > 1 for ids in request.bad_sequences)
        self._bad_words = BadWords(request.bad_sequences) if follows else None
        self._words = np.zeros(-(-vocab_size // 32), np.int32)
        self._standing = _standing(request, vocab_size)
        self.mask: Int32Array | None = None  # of the next token; None: anything may come

    @property
    def is_free(self) -> bool:
        """Nothing is restricted any more."""
        is_answering = self._phase is _Phase.ANSWER and self._matcher is None
        return is_answering and self._bad_words is None

    def go_on(self, token_ids: list[int]) -> Failure | None:
        """Takes the tokens and makes the next mask; returns what is wrong, if anything."""
        if not all(self._takes(token_id) for token_id in token_ids):
            return NOT_IN_GRAMMAR
        try:
            self.mask = self._next_mask()
        except NothingFits as error:
            return Failure(Finish.UNSATISFIABLE, str(error))
        except MatchError as error:
            return Failure(Finish.ERROR, str(error))
        return None

    def _takes(self, token_id: int) -> bool:
        if self._bad_words is not None:
            self._bad_words.take(token_id)
        thinking = self._thinking
        if self._phase is _Phase.MAY_THINK:
            assert thinking is not None
            thinks = token_id == thinking.opening_id
            self._phase = _Phase.THINKING if thinks else _Phase.ANSWER
            if thinks:
                return True
        elif self._phase is _Phase.THINKING:
            assert thinking is not None
            if token_id == thinking.closing_id:
                self._phase = _Phase.ANSWER
            self._spent += 1
            return True
        return self._matcher is None or self._matcher.accept(token_id)

    def _next_mask(self) -> Int32Array | None:
        """What may come next; None: anything that the row's rules leave."""
        words, standing = self._mask_of_phase(), self._standing
        if standing is None:
            return words
        bad_ids = () if self._bad_words is None else self._bad_words.next_ids()
        if words is None and not bad_ids and standing.any():
            return None
        words = standing.copy() if words is None else words & standing
        _forbid(words, bad_ids)
        if not words.any():
            raise NothingFits(_NOTHING_FITS)
        return words

    def _mask_of_phase(self) -> Int32Array | None:
        thinking, matcher = self._thinking, self._matcher
        if self._phase is _Phase.THINKING:
            assert thinking is not None
            if thinking.budget is None or self._spent < thinking.budget:
                return None
            self._words[:] = 0
            _allow(self._words, thinking.closing_id)
            return self._words
        if matcher is None:
            return None
        matcher.fill_mask(self._words)
        if self._phase is _Phase.MAY_THINK:
            assert thinking is not None
            _allow(self._words, thinking.opening_id)
        return self._words


def _standing(request: Request, vocab_size: int) -> Int32Array | None:
    """[words] int32: a bit for each id that the request's rules leave; None: they leave all."""
    allowed = request.params.allowed_token_ids
    if allowed is None and not request.bad_sequences:
        return None
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    if allowed is None:
        bits[:vocab_size] = True
    else:
        bits[list(allowed)] = True
    bits[single_bad_ids(request)] = False
    return np.packbits(bits, bitorder="little").view(np.int32)


def _forbid(words: Int32Array, token_ids: Iterable[int]) -> None:
    bits = words.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def _allow(words: Int32Array, token_id: int) -> None:
    words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
