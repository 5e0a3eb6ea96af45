"""Restrictions of single rows, phase by phase."""

import numpy as np
import pytest

from engine.constraints import (
    NOT_IN_GRAMMAR,
    Constraints,
    Failure,
    failure_at_once,
    may_be_masked,
)
from engine.request import Finish, Int32Array, Request, SamplingParams, Thinking
from engine.rows import Rows
from engine.waiting import Waiting
from tests.fakes_executor import VOCAB, FakeGrammar

OPEN, CLOSE = 90, 91
GRAMMAR = FakeGrammar(5)
NONE_ENDED = np.zeros(1, np.bool_)


class Bench:
    """One row, and what may come next in it."""

    def __init__(
        self, *, grammar: bool = True, opened: bool = False, budget: int | None = None,
        thinks: bool = True, made: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.constraints = Constraints(Rows(4, 64, 4), VOCAB)
        request = Request(
            7, np.array([1, 2], np.int32), SamplingParams(max_new_tokens=9), seed=0,
            grammar=GRAMMAR if grammar else None,
            thinking=Thinking(OPEN, CLOSE, budget) if thinks else None,
            begins_reasoning=opened,
        )  # fmt: skip
        tokens = np.array([1, 2, *made], np.int32)
        self.error = self.constraints.begin(2, Waiting(request, tokens, 0), ())

    def allowed(self) -> set[int] | None:
        """None where anything may come."""
        rows, masks = self.constraints.masks(np.empty(0, np.intp), np.array([2]))
        if not len(rows):
            return None
        assert rows.tolist() == [2]
        bits: Int32Array = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
        return set(np.nonzero(bits)[0].tolist())

    def take(self, token_id: int) -> list[tuple[int, Failure]]:
        return self.constraints.commit(np.array([2]), np.array([token_id], np.int32), NONE_ENDED)


def test_a_grammar_alone() -> None:
    bench = Bench(thinks=False)
    assert bench.allowed() == GRAMMAR.allowed([])
    assert bench.take(5) == [] and bench.allowed() == GRAMMAR.allowed([5])
    assert bench.take(6) == [(0, NOT_IN_GRAMMAR)]


def test_a_grammar_waits_for_reasoning_to_end() -> None:
    bench = Bench()
    assert bench.allowed() == GRAMMAR.allowed([]) | {OPEN}
    for token_id in (OPEN, 13, 14, OPEN):
        assert bench.take(token_id) == []
        assert bench.allowed() is None
    assert bench.take(CLOSE) == []
    assert bench.allowed() == GRAMMAR.allowed([])
    assert bench.take(10) == [] and bench.allowed() == GRAMMAR.allowed([10])


def test_an_answer_without_reasoning_is_in_the_grammar_from_its_first_token() -> None:
    bench = Bench()
    assert bench.take(10) == [] and bench.allowed() == GRAMMAR.allowed([10])


@pytest.mark.parametrize("made", [(), (13,), (13, CLOSE), (13, CLOSE, 10)])
def test_a_prompt_that_opens_reasoning(made: tuple[int, ...]) -> None:
    """Resumed after a retraction, too: what was made counts."""
    bench = Bench(opened=True, made=made)
    assert bench.error is None
    if CLOSE in made:
        assert bench.allowed() == GRAMMAR.allowed(list(made[2:]))
    else:
        assert bench.allowed() is None


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_spent_budget_closes_reasoning(budget: int, grammar: bool) -> None:
    bench = Bench(opened=True, budget=budget, grammar=grammar)
    for _ in range(budget):
        assert bench.allowed() is None
        assert bench.take(13) == []
    assert bench.allowed() == {CLOSE}
    assert bench.take(CLOSE) == []
    assert bench.allowed() == (GRAMMAR.allowed([]) if grammar else None)


def test_nothing_is_kept_of_a_row_that_is_free_again() -> None:
    bench = Bench(opened=True, budget=5, grammar=False)
    waiting = np.array([2])
    bench.constraints._rows.last_step[2] = 9
    assert not len(bench.constraints.ready(waiting, 8)), "its token is not committed"
    bench.take(CLOSE)
    assert bench.constraints.ready(waiting, 8) is waiting


def test_a_row_that_ended_restricts_nobody() -> None:
    bench = Bench()
    bench.constraints.end(2)
    assert bench.allowed() is None and bench.take(1) == []


# Bad words, and what leaves nothing


def restricted(
    *, grammar: FakeGrammar | None = None, allowed: tuple[int, ...] | None = None,
    bad: tuple[tuple[int, ...], ...] = (),
) -> Request:  # fmt: skip
    params = SamplingParams(max_new_tokens=9, allowed_token_ids=allowed)
    return Request(
        7, np.array([1, 2], np.int32), params, seed=0, grammar=grammar, bad_sequences=bad
    )


def started(request: Request, made: tuple[int, ...] = ()) -> tuple[Bench, Failure | None]:
    bench = Bench(grammar=False, thinks=False)
    tokens = np.array([1, 2, *made], np.int32)
    return bench, bench.constraints.begin(2, Waiting(request, tokens, 0), ())


def test_a_bad_word_is_ruled_out_at_its_last_token() -> None:
    bench, failure = started(restricted(bad=((3, 4), (4, 3, 5), (8,))))
    assert failure is None and bench.allowed() is None
    assert bench.take(3) == [] and bench.allowed() == set(range(VOCAB)) - {4, 8}
    assert bench.take(5) == [] and bench.allowed() is None
    assert bench.take(4) == [] and bench.allowed() is None
    assert bench.take(3) == [] and bench.allowed() == set(range(VOCAB)) - {4, 5, 8}


def test_what_was_made_before_a_retraction_counts() -> None:
    bench, _ = started(restricted(bad=((3, 4),)), made=(9, 3))
    assert bench.allowed() == set(range(VOCAB)) - {4}


def test_bad_words_and_a_grammar_hold_together() -> None:
    bench, _ = started(restricted(grammar=GRAMMAR, bad=((5, 10), (0,))))
    assert bench.allowed() == GRAMMAR.allowed([]) - {0}
    assert bench.take(5) == [] and bench.allowed() == GRAMMAR.allowed([5]) - {0, 10}


def test_words_of_one_token_restrict_no_row() -> None:
    bench, failure = started(restricted(bad=((3,), (4,))))
    assert failure is None and bench.allowed() is None
    assert not may_be_masked(restricted(bad=((3,), (4,))))
    bench.constraints._rows.last_step[2] = 9
    decode = np.array([2])
    assert bench.constraints.ready(decode, 8) is decode, "its overlap is kept"


@pytest.mark.parametrize(
    "request_",
    [
        restricted(grammar=GRAMMAR, allowed=(1, 2)),
        restricted(allowed=(1, 2), bad=((1,), (2,))),
        restricted(grammar=GRAMMAR, allowed=(0, 1), bad=((0,),)),
    ],
)
def test_what_cannot_begin_is_known_at_once(request_: Request) -> None:
    failure = failure_at_once(request_, VOCAB)
    assert failure is not None and failure.finish is Finish.UNSATISFIABLE
    assert "allowed_token_ids" in failure.message


@pytest.mark.parametrize(
    "request_",
    [restricted(), restricted(grammar=GRAMMAR, allowed=(0, 1)), restricted(bad=((1,), (2, 3)))],
)
def test_what_can_begin_is_let_in(request_: Request) -> None:
    assert failure_at_once(request_, VOCAB) is None


def test_what_leaves_nothing_later_ends_the_request() -> None:
    bench, failure = started(restricted(allowed=(3, 4), bad=((3, 4), (3, 3))))
    assert failure is None
    ((index, failure),) = bench.take(3)
    assert index == 0 and failure.finish is Finish.UNSATISFIABLE
