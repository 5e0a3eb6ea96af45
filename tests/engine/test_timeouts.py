"""Requests that wait or run for too long end, with a message, and nobody else does."""

import numpy as np
import pytest

from engine.cache_factory import build_prefix_cache
from engine.config import EngineConfig
from engine.core import Engine
from engine.pages import PagePool
from engine.request import Finish, Request, SamplingParams
from engine.scheduler import Scheduler
from engine.timeouts import Timeouts
from tests.fakes_executor import VOCAB, FakeExecutor, fake_engine


def engine_with(timeouts: Timeouts) -> Engine:
    scheduler = Scheduler(
        pool=PagePool(33), cache=build_prefix_cache("radix", 4), max_running=1, max_model_len=64,
        prefill_budget=None, eos_ids=(), vocab_size=VOCAB, timeouts=timeouts,
    )  # fmt: skip
    engine = fake_engine(scheduler, FakeExecutor(33, 4, 1, 16), overlap=True)
    for number in range(3):  # the first runs, the others wait
        prompt = np.array([number, 7, 8], np.int32)
        engine.submit(Request(number, prompt, SamplingParams(50), 0, arrived_s=100.0 + number))
    engine.step()
    return engine


def ended(engine: Engine) -> dict[int, tuple[Finish, str]]:
    """Of each request that the next output says has ended without a token."""
    output = engine.step()
    engine.check_integrity()
    assert output is not None
    errors = dict(output.errors)
    return {
        int(number): (Finish(finish), errors[int(number)])
        for number, finish in zip(output.request_ids, output.finishes, strict=True)
        if finish
    }


def test_a_request_that_waits_too_long_is_told_that_the_server_is_busy() -> None:
    engine = engine_with(Timeouts(queue_s=10))
    engine.expire(111.0)
    message = "The server is busy: the request did not start within 10 s. Try again later."
    assert ended(engine) == {1: (Finish.TIMEOUT, message)}
    assert engine.stats().running == 1 and engine.stats().waiting == 1


def test_a_request_that_runs_too_long_ends_and_the_next_starts() -> None:
    engine = engine_with(Timeouts(running_s=10))
    engine.expire(110.5)
    message = "The request took longer than 10 s, which is the server's limit."
    assert ended(engine) == {0: (Finish.TIMEOUT, message)}
    while engine.stats().running == 0:
        engine.step()
    assert engine.stats().waiting == 1


@pytest.mark.parametrize("timeouts", [Timeouts(), Timeouts(queue_s=10, running_s=10)])
def test_nobody_ends_before_the_time(timeouts: Timeouts) -> None:
    engine = engine_with(timeouts)
    engine.expire(109.9)
    assert ended(engine) == {}


@pytest.mark.parametrize("name", ["queue_timeout_s", "running_timeout_s"])
def test_a_timeout_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be between 0.1"):
        EngineConfig(model=None, **{name: 0})  # type: ignore[arg-type]
