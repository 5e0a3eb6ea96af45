"""The times of each request and the counts of steps, as the engine tells them."""

import itertools

import numpy as np
import pytest

from engine import core
from engine.core import Engine
from engine.naive_cache import NaiveCache
from engine.pages import PagePool
from engine.request import Finish, Request, SamplingParams, StepOutput
from engine.scheduler import Scheduler
from tests.fakes_executor import FakeExecutor, fake_engine

ROWS, PAGES = 2, 40


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Two rows, four prompt tokens a step, and a clock that moves on whenever it is looked at."""
    ticks = itertools.count(1)
    monkeypatch.setattr(core.time, "monotonic", lambda: float(next(ticks)))
    scheduler = Scheduler(
        pool=PagePool(PAGES), cache=NaiveCache(1), max_running=ROWS, max_model_len=16,
        prefill_budget=4, eos_ids=(), vocab_size=10_000,
    )  # fmt: skip
    return fake_engine(scheduler, FakeExecutor(PAGES, 1, ROWS, 16), overlap=False)


def request(request_id: int, prompt: int, new: int) -> Request:
    return Request(
        request_id, np.arange(1, prompt + 1, dtype=np.int32), SamplingParams(new), seed=0
    )  # fmt: skip


def run(engine: Engine) -> list[StepOutput]:
    outputs = []
    while engine.has_work:
        output = engine.step()
        if output is not None:
            outputs.append(output)
    return outputs


def test_times_follow_one_another(engine: Engine) -> None:
    for number in range(5):
        engine.submit(request(number, 6, 3))
    outputs = run(engine)
    started = {each.request.id: (each, out) for out in outputs for each in out.started}
    assert set(started) == set(range(5))
    for each, output in started.values():
        assert 0 < each.queued_s < each.begun_s < output.made_s
    queued = [started[number][0].begun_s for number in range(5)]
    assert queued == sorted(queued), "first come, first served"
    made = [output.made_s for output in outputs]
    assert made == sorted(made) and len(set(made)) == len(made)
    assert len(engine._times) == 0


def test_steps_are_counted(engine: Engine) -> None:
    for number in range(4):
        engine.submit(request(number, 6, 3))
    outputs = run(engine)
    stats = engine.stats()
    counts = stats.counts
    assert sum(counts.by_duration) == stats.steps == len(outputs)
    assert counts.prefill_tokens == 4 * 6
    assert counts.sampled_tokens == sum(len(output.token_ids) for output in outputs) == 4 * 3
    assert 0 < counts.busy_s


def test_whose_prompts_are_computed(engine: Engine) -> None:
    engine.submit(request(7, 9, 1))
    engine.step()
    assert engine.stats().prefilling == (7,)
    run(engine)
    assert engine.stats().prefilling == ()


def test_who_ends_without_a_token_leaves_nothing(engine: Engine) -> None:
    engine.submit(request(1, 9, 1))
    engine.submit(request(2, 9, 1))
    engine.step()
    engine.abort(1)
    engine.abort(2)
    outputs = run(engine)
    ends = [Finish(finish) for output in outputs for finish in output.finishes]
    assert ends.count(Finish.ABORT) == 2
    assert all(output.made_s > 0 for output in outputs)
    assert len(engine._times) == 0
