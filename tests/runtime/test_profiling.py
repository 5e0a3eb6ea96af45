"""A trace of the first steps, and an engine that goes on without one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.request import Request, SamplingParams
from runtime.profiling import profiled
from tests.fakes_engine import FakeEngine


def engine_with_work(tokens: int) -> FakeEngine:
    engine = FakeEngine(before_step=lambda: torch.ones(4).cumsum(0))
    prompt = np.frombuffer(b"hello", np.uint8).astype(np.int32)
    engine.submit(Request(1, prompt, SamplingParams(tokens), seed=0))
    return engine


def test_so_many_steps_are_traced(tmp_path: Path) -> None:
    inner = engine_with_work(9)
    engine = profiled(inner, 3, tmp_path)
    while engine.has_work:
        engine.step()
    engine.close()
    assert inner.closed
    (file,) = tmp_path.glob("plait-*.trace.json")
    events = json.loads(file.read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::cumsum" for event in events) == 3


def test_what_is_left_is_written_at_the_end(tmp_path: Path) -> None:
    engine = profiled(engine_with_work(2), 100, tmp_path)
    while engine.has_work:
        engine.step()
    engine.step()
    engine.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_trace_that_cannot_be_written_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = profiled(engine_with_work(4), 1, tmp_path / "none")
    while engine.has_work:
        assert engine.step() is not None
    engine.close()
    assert "cannot be written" in caplog.text
