"""Why steps were as they were, told by who decided."""

import numpy as np
import pytest

from engine.admission import Refusal
from engine.cache_factory import build_prefix_cache
from engine.core import Engine
from engine.forecast import OutputForecast
from engine.pages import PagePool
from engine.request import Request, SamplingParams
from engine.retraction import Retraction
from engine.scheduler import Scheduler
from engine.step_trace import Chunk, Refused, StepRecord, StepTrace
from tests.fakes_executor import VOCAB, FakeExecutor, fake_engine

PAGE = 4


def build(
    *, pages: int = 65, max_running: int = 4, trace_steps: int = 1000, **settings: object
) -> tuple[Scheduler, Engine]:
    scheduler = Scheduler(
        pool=PagePool(pages),
        cache=build_prefix_cache("radix", PAGE),
        max_running=max_running,
        max_model_len=64,
        eos_ids=(),
        vocab_size=VOCAB,
        trace_steps=trace_steps,
        **{"prefill_budget": None, **settings},  # type: ignore[arg-type]
    )
    executor = FakeExecutor(pages, PAGE, max_running, 16)
    return scheduler, fake_engine(scheduler, executor, overlap=True)


def request(
    number: int, tokens: int, new: int, priority: int = 0, seed: int | None = None
) -> Request:
    dice = np.random.default_rng(number if seed is None else seed)
    prompt = dice.integers(0, 90, tokens).astype(np.int32)
    return Request(number, prompt, SamplingParams(new, priority=priority), seed=0)


def drain(engine: Engine) -> tuple[StepRecord, ...]:
    """All that is told from the second step on."""
    while engine.has_work:
        engine.step()
    return engine.last_steps(1000)


def refusals(records: tuple[StepRecord, ...]) -> set[Refused | None]:
    return {record.refused for record in records}


def first(engine: Engine) -> None:
    """A step before those that a test looks at: the oldest one kept is not told."""
    engine.submit(request(1000, 2, 1))
    drain(engine)


def test_steps_are_told_in_order_with_what_they_carried() -> None:
    _, engine = build(prefill_budget=10)
    first(engine)
    engine.submit(request(0, 25, 5))
    told = drain(engine)
    assert [record.step for record in told] == list(range(2, 2 + len(told)))
    chunks = [chunk for record in told for chunk in record.chunks]
    assert chunks == [Chunk(0, 0, 10), Chunk(0, 10, 10), Chunk(0, 20, 5)]
    assert [(record.decode_rows, record.decode_kv_tokens) for record in told[3:]] == [
        (1, 26), (1, 27), (1, 28), (1, 29),
    ]  # fmt: skip
    assert [record.admitted for record in told[:2]] == [((0, 25, 0),), ()]
    assert all(record.prefill_budget == 10 and record.took_s >= 0 for record in told)
    assert (np.diff([record.done_s for record in told]) >= 0).all()


def test_no_more_are_kept_than_asked_for() -> None:
    _, engine = build(trace_steps=4)
    engine.submit(request(0, 5, 20))
    assert [record.step for record in drain(engine)] == [18, 19, 20]
    assert [record.step for record in engine.last_steps(2)] == [19, 20]
    assert engine.last_steps(0) == ()


def test_without_a_trace_nothing_is_told() -> None:
    scheduler, engine = build(trace_steps=0)
    engine.submit(request(0, 5, 20))
    assert scheduler.trace is None
    assert drain(engine) == ()


def test_prompt_tokens_are_the_budget() -> None:
    _, engine = build(prefill_budget=8)
    first(engine)
    for number in range(2):
        engine.submit(request(number, 20, 3))
    assert drain(engine)[0].refused == (1, Refusal.PREFILL.value)


def test_rows_are_the_budget() -> None:
    _, engine = build(max_running=1)
    first(engine)
    for number in range(2):
        engine.submit(request(number, 5, 3))
    assert drain(engine)[0].refused == (1, Refusal.ROWS.value)


def test_pages_are_the_budget() -> None:
    _, engine = build(pages=17)
    first(engine)
    for number in range(2):
        engine.submit(request(number, 40, 9))
    assert refusals(drain(engine)) == {None, Refused(1, Refusal.PAGES.value)}


def test_pages_of_answers_to_come_are_the_budget() -> None:
    _, engine = build(pages=17)
    first(engine)
    for number in range(2):
        engine.submit(request(number, 20, 40))
    assert Refused(1, Refusal.PAGES_LATER.value) in refusals(drain(engine))


def test_a_sibling_is_waited_for_while_others_start() -> None:
    _, engine = build()
    first(engine)
    engine.submit(request(0, 40, 3))
    engine.submit(request(1, 40, 3, seed=0))
    engine.submit(request(2, 40, 3))
    told = drain(engine)[0]
    assert told.refused == (1, Refusal.SIBLING.value)
    assert [each.request_id for each in told.admitted] == [0, 2]


def test_who_is_retracted_for_pages_and_what_it_loses() -> None:
    scheduler, engine = build(pages=17)
    scheduler.admission.forecast = OutputForecast(share=0.0)
    first(engine)
    for number in range(3):
        engine.submit(request(number, 9, 40))
    told = drain(engine)
    retracted = [each for record in told for each in record.retracted]
    assert len(retracted) == scheduler.retractions > 0
    assert {each.reason for each in retracted} == {Retraction.PAGES.value}
    assert all(each.lost_tokens > 0 and each.for_request_id is None for each in retracted)
    evicted = sum(record.evicted_pages for record in told)
    assert evicted == scheduler.holdings.evicted_pages > 0


def test_who_is_retracted_for_whom() -> None:
    scheduler, engine = build(max_running=1, policy="priority", preemption_threshold=2)
    first(engine)
    engine.submit(request(0, 5, 20))
    engine.step()
    engine.submit(request(1, 5, 3, priority=3))
    told = drain(engine)
    (retracted,) = [each for record in told for each in record.retracted]
    assert (retracted.request_id, retracted.for_request_id) == (0, 1)
    assert retracted.reason == Retraction.PREEMPTION.value
    starts = [each for record in told for each in record.admitted if each.request_id == 0]
    assert starts[1].prompt_tokens > 5 and starts[1].cached_tokens > 0


def test_predictions_are_what_was_learnt_before() -> None:
    scheduler, engine = build(target_itl_s=0.05)
    first(engine)
    engine.submit(request(0, 9, 8))
    told = drain(engine)
    assert [record.predicted_s is None for record in told[:2]] == [False, True]
    assert told[2].predicted_s == told[1].took_s  # the only step like it
    assert all(record.predicted_s for record in told[2:])


def test_lines_are_read_as_they_were_written() -> None:
    scheduler, engine = build(max_running=1, policy="priority", preemption_threshold=2)
    for number, priority in enumerate([0, 3, 1]):
        engine.submit(request(number, 5, 20, priority))
        engine.step()
    told = drain(engine)
    assert any(record.retracted and record.refused for record in told)
    assert tuple(StepRecord.of_json(record.as_json()) for record in told) == told


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"step": 1}', "null"])
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError):
        StepRecord.of_json(line)


def test_a_trace_of_nothing_has_nothing() -> None:
    scheduler, _ = build()
    assert StepTrace(scheduler.holdings, 5).last(5) == ()
