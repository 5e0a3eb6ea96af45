"""The scheduler's decisions, one at a time, over an executor whose tokens can be checked."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest

from engine.cache_factory import build_prefix_cache
from engine.constraints import NOT_IN_GRAMMAR
from engine.errors import MatchError
from engine.forecast import OutputForecast
from engine.pages import PagePool
from engine.request import Finish, Int32Array, Request, SamplingParams, StepOutput
from engine.rows import STOP_IDS, Rows, RowState
from engine.scheduler import Scheduler
from tests.fakes_executor import (
    VOCAB,
    FakeExecutor,
    FakeGrammar,
    FakeMatcher,
    expected_output,
    fake_engine,
)

PAGE = 4


class Rig:
    """An engine over a fake executor, and what came out of it."""

    def __init__(
        self,
        *,
        pages: int = 65,
        max_running: int = 4,
        budget: int | None = None,
        overlap: bool = False,
        max_model_len: int = 64,
        cache: Literal["radix", "naive"] = "radix",
    ) -> None:
        self.executor = FakeExecutor(pages, PAGE, max_running, -(-max_model_len // PAGE))
        self.scheduler = Scheduler(
            pool=PagePool(pages),
            cache=build_prefix_cache(cache, PAGE),
            max_running=max_running,
            max_model_len=max_model_len,
            prefill_budget=budget,
            eos_ids=(),
            vocab_size=VOCAB,
        )
        self.engine = fake_engine(self.scheduler, self.executor, overlap=overlap)
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.errors: dict[int, str] = {}
        self.cached: dict[int, int] = {}

    def submit(
        self,
        number: int,
        prompt: Int32Array,
        new: int,
        *,
        grammar: FakeGrammar | None = None,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        params = SamplingParams(max_new_tokens=new, stop_token_ids=stop_token_ids)
        self.engine.submit(Request(number, prompt, params, seed=0, grammar=grammar))
        self.tokens[number] = []

    def step(self) -> bool:
        """One engine step; False where it had nothing to say."""
        output = self.engine.step()
        self.scheduler.check_integrity()
        if output is None:
            return False
        self.take(output)
        return True

    def take(self, output: StepOutput) -> None:
        self.errors.update(output.errors)
        for started in output.started:
            self.cached[started.request.id] = started.cached_tokens
        for number, token, finish in zip(
            output.request_ids.tolist(), output.token_ids.tolist(), output.finishes.tolist(),
            strict=True,
        ):  # fmt: skip
            if token >= 0:
                self.tokens[number].append(token)
            if finish:
                self.finishes[number] = Finish(finish)

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
        self.step()


def prompt_of(length: int, seed: int = 0) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 90, length).astype(np.int32)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lone_request_ends_by_length(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.submit(1, prompt_of(10), 7)
    rig.drain()
    assert rig.tokens[1] == expected_output(prompt_of(10), 7)
    assert rig.finishes == {1: Finish.LENGTH}
    assert rig.executor.steps == 7, "an end by length wastes no step"


def test_an_end_by_token_wastes_one_step_with_overlap() -> None:
    wanted = expected_output(prompt_of(10), 20)
    rig = Rig(overlap=True)
    rig.submit(1, prompt_of(10), 20, stop_token_ids=(wanted[4],))
    rig.drain()
    end = wanted.index(wanted[4]) + 1
    assert rig.tokens[1] == wanted[:end]
    assert rig.finishes == {1: Finish.STOP}
    assert rig.executor.steps == end + 1


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    rig = Rig(budget=4)
    rig.submit(1, prompt_of(3), 30)
    rig.step()
    rig.submit(2, prompt_of(33, seed=1), 4)
    before = len(rig.tokens[1])
    for _ in range(8):
        rig.step()
    assert len(rig.tokens[1]) == before + 8, "a long prompt starves nobody"
    assert not rig.tokens[2], "a chunk's token is never told"
    rig.drain()
    assert rig.tokens[2] == expected_output(prompt_of(33, seed=1), 4)


def test_an_equal_prompt_is_a_cache_hit_up_to_its_last_whole_page() -> None:
    rig = Rig()
    rig.submit(1, prompt_of(17), 3)
    rig.drain()
    rig.submit(2, prompt_of(17), 3)
    rig.submit(3, prompt_of(16), 3)
    rig.drain()
    # The last prompt token is always computed, so 16 tokens hit three pages and not four.
    assert rig.cached == {1: 0, 2: 16, 3: 12}
    assert rig.tokens[2] == rig.tokens[1]


def test_two_prompts_of_one_step_end_up_on_the_same_pages_where_they_begin_alike() -> None:
    rig = Rig(overlap=True)
    prompts = [np.concatenate([prompt_of(8), prompt_of(16, seed=seed)]) for seed in (1, 2)]
    for number, prompt in enumerate(prompts):
        rig.submit(number, prompt, 12)
    for _ in range(3):
        rig.step()
    tables = [rig.scheduler.holdings.rows.page_table[row, :6].tolist() for row in (0, 1)]
    assert tables[0][:2] == tables[1][:2] and tables[0][2:] != tables[1][2:]
    rig.step()
    assert rig.executor.page_table[0, :2].tolist() == rig.executor.page_table[1, :2].tolist()
    rig.drain()
    for number, prompt in enumerate(prompts):
        assert rig.tokens[number] == expected_output(prompt, 12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [None, 5])
def test_equal_prompts_that_come_at_once_are_computed_once(
    overlap: bool, budget: int | None
) -> None:
    rig = Rig(overlap=overlap, budget=budget)
    for number in range(4):
        rig.submit(number, prompt_of(18), 5)
    rig.submit(4, prompt_of(6, seed=9), 2)  # behind them in the queue, but nobody's sibling
    rig.step()
    assert [each.request.id for each in rig.scheduler.waiting] == [1, 2, 3, 4][: 4 if budget else 3]
    rig.drain()
    assert rig.cached == {0: 0, 1: 16, 2: 16, 3: 16, 4: 0}
    for number in range(4):
        assert rig.tokens[number] == expected_output(prompt_of(18), 5)
    assert len(rig.scheduler.holdings.producers) == 0


def test_siblings_go_on_when_the_one_they_wait_for_leaves() -> None:
    rig = Rig(budget=4)
    rig.submit(1, prompt_of(18), 5)
    rig.submit(2, prompt_of(18), 5)
    rig.step()
    rig.engine.abort(1)
    rig.drain()
    assert rig.tokens[2] == expected_output(prompt_of(18), 5)


def test_nobody_waits_for_a_sibling_where_nothing_is_kept() -> None:
    rig = Rig(cache="naive")
    rig.submit(1, prompt_of(18), 5)
    rig.submit(2, prompt_of(18), 5)
    rig.step()
    assert rig.engine.stats().running == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_pressure_retracts_the_youngest_and_everyone_still_ends_right(overlap: bool) -> None:
    rig = Rig(pages=17, max_running=4, overlap=overlap, max_model_len=60)
    rig.scheduler.admission.forecast = OutputForecast(share=0.0)  # admit without much thought
    for number in range(4):
        rig.submit(number, prompt_of(9, seed=number), 40)
    rig.drain()
    assert rig.scheduler.retractions > 0
    for number in range(4):
        assert rig.tokens[number] == expected_output(prompt_of(9, seed=number), 40)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", range(9))
def test_an_abort_in_any_phase_gives_everything_back(steps: int, overlap: bool) -> None:
    rig = Rig(budget=4, overlap=overlap, max_running=1)
    rig.submit(1, prompt_of(16), 4)
    rig.submit(2, prompt_of(8, seed=2), 3)  # waits for the row
    for _ in range(steps):
        rig.step()
    rig.engine.abort(1)
    rig.engine.abort(1)
    rig.drain()
    assert rig.finishes[1] in (Finish.ABORT, Finish.LENGTH)
    assert rig.tokens[2] == expected_output(prompt_of(8, seed=2), 3)
    assert rig.engine.stats().running == 0 and rig.scheduler.holdings.rows.free == 1


def test_a_matched_stop_string_ends_the_request() -> None:
    rig = Rig(overlap=True)
    rig.submit(1, prompt_of(5), 30)
    for _ in range(4):
        rig.step()
    rig.engine.stop_matched(1)
    rig.drain()
    assert rig.finishes == {1: Finish.STOP}
    assert len(rig.tokens[1]) < 30


@pytest.mark.parametrize(
    ("length", "new", "reason"),
    [(0, 1, "at least one"), (5, -1, "at least one"), (60, 5, "more than the context of 64")],
)
def test_what_can_never_fit_is_refused(length: int, new: int, reason: str) -> None:
    rig = Rig()
    with pytest.raises(ValueError, match=reason):
        rig.submit(1, prompt_of(length), new)
    assert not rig.engine.has_work


def test_an_id_that_waits_or_runs_is_refused() -> None:
    rig = Rig()
    rig.submit(1, prompt_of(3), 4)
    for _ in range(2):  # waiting, then running
        with pytest.raises(ValueError, match="request id 1 is in use"):
            rig.submit(1, prompt_of(3), 4)
        rig.step()


def test_a_context_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="the KV pool holds 12"):
        Rig(pages=4, max_model_len=13)


def test_seeds_and_parameters_reach_the_descriptor_bit_for_bit() -> None:
    rig = Rig()
    params = SamplingParams(max_new_tokens=2, temperature=0.7, top_k=40, top_p=0.9, min_p=0.05)
    seed = 2**63 + 12345678901
    rig.engine.submit(Request(1, prompt_of(3), params, seed=seed))
    plan = rig.scheduler.plan()
    assert plan is not None
    words = plan.descriptor.joined[0]
    floats = words.view(np.float32)
    assert floats[[1, 3, 4]].tolist() == np.array([0.7, 0.9, 0.05], np.float32).tolist()
    assert words[2] == 40
    assert int(words[5:7].view(np.uint64)[0]) == seed


def test_a_request_that_fails_fails_alone_and_says_why() -> None:
    rig = Rig(overlap=True)
    rig.submit(1, prompt_of(5), 6)
    rig.submit(2, prompt_of(6, seed=2), 6)
    rig.step()
    rig.scheduler.end(1, Finish.ERROR, "its grammar has no way on")
    output = rig.engine.step()
    assert output is not None and output.errors == ((1, "its grammar has no way on"),)
    assert output.finishes[output.request_ids == 1].tolist() == [Finish.ERROR]
    rig.take(output)
    rig.drain()
    assert rig.tokens[2] == expected_output(prompt_of(6, seed=2), 6)


def test_what_was_not_admitted_is_not_looked_at_again_before_something_came_back() -> None:
    rig = Rig(pages=17, max_model_len=60)
    rig.submit(1, prompt_of(40), 20)
    rig.submit(2, prompt_of(41, seed=2), 4)
    matches = []
    match = rig.scheduler.holdings.cache.match
    rig.scheduler.holdings.cache.match = lambda *asked: matches.append(asked) or match(*asked)  # type: ignore
    for _ in range(10):
        rig.step()
    assert rig.engine.stats().waiting == 1
    assert len(matches) <= 3  # each once, and again when the first one's prompt was cached
    rig.drain()
    assert rig.tokens[2] == expected_output(prompt_of(41, seed=2), 4)


def test_a_request_with_many_stop_ids_slows_nobody_who_comes_after_it() -> None:
    rows = Rows(2, max_model_len=16, page_size=4)
    first, second = rows.take(), rows.take()
    rows.set_stop_ids(first, tuple(range(100, 200)))
    rows.set_stop_ids(second, (7,))
    sampled = np.array([first, second, second])
    ids = np.array([199, 7, 8], np.int32)
    assert rows.is_stop_id(sampled, ids).tolist() == [True, True, False]
    assert rows.most_stop_ids == 100
    rows.state[first] = RowState.ENDED
    rows.give(first)
    assert rows.most_stop_ids == STOP_IDS
    assert rows.is_stop_id(np.array([second]), ids[1:2]).tolist() == [True]


def test_a_prompt_as_long_as_the_context_can_be_scored() -> None:
    rig = Rig()
    rig.submit(1, prompt_of(64), 0)
    rig.drain()
    assert rig.finishes[1] == Finish.LENGTH
    assert len(rig.tokens[1]) == 1  # drawn, as by every step; the detokenizer drops it


def test_a_row_with_a_grammar_waits_for_its_token_and_nobody_else_does() -> None:
    rig = Rig(overlap=True)
    rig.submit(1, prompt_of(5), 12)
    rig.submit(2, prompt_of(6, seed=2), 12, grammar=FakeGrammar(7))
    rig.submit(3, prompt_of(4, seed=3), 12)
    rig.step()
    for _ in range(8):
        before = {number: len(tokens) for number, tokens in rig.tokens.items()}
        rig.step()
        after = {number: len(tokens) for number, tokens in rig.tokens.items()}
        assert after[1] - before[1] == after[3] - before[3] == 1
    assert len(rig.tokens[2]) == 4 or len(rig.tokens[2]) == 5  # every second step
    rig.drain()
    assert rig.tokens[2] == expected_output(prompt_of(6, seed=2), 12, grammar=FakeGrammar(7))
    assert rig.tokens[1] == expected_output(prompt_of(5), 12)


@pytest.mark.parametrize("fails_at", [0, 1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(
    overlap: bool, fails_at: int
) -> None:
    class Failing(FakeMatcher):
        masks = 0

        def fill_mask(self, row: Int32Array) -> None:
            super().fill_mask(row)
            self.masks += 1
            if self.masks > fails_at:
                raise MatchError("too much")

    class Grammar(FakeGrammar):
        def matcher(self, stop_ids: Sequence[int]) -> FakeMatcher:
            return Failing(self)

    rig = Rig(overlap=overlap)
    rig.submit(1, prompt_of(5), 12, grammar=Grammar(3))
    rig.submit(2, prompt_of(6, seed=2), 12)
    rig.drain()
    assert rig.finishes == {1: Finish.ERROR, 2: Finish.LENGTH}
    assert rig.errors == {1: "too much"}
    assert len(rig.tokens[1]) == fails_at
    assert rig.tokens[2] == expected_output(prompt_of(6, seed=2), 12)


def test_an_output_that_left_its_grammar_ends_with_an_error() -> None:
    class Forgetful(FakeMatcher):
        def accept(self, token_id: int) -> bool:
            return False

    class Grammar(FakeGrammar):
        def matcher(self, stop_ids: Sequence[int]) -> FakeMatcher:
            return Forgetful(self)

    rig = Rig()
    rig.submit(1, prompt_of(5), 12, grammar=Grammar(3))
    rig.drain()
    assert rig.finishes == {1: Finish.ERROR}
    assert rig.errors == {1: NOT_IN_GRAMMAR.message}
