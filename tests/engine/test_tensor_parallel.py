"""Several ranks give the same tokens as one, whatever is asked and whatever happens meanwhile.

Ranks are threads here, and their sums are in float32 as one rank's are, but in another order: so
logits differ in their last bits, and a token would differ where two ids are that near. Twelve
products of at most 80 terms, each off by at most 80 * 2**-24 of its terms, are 6e-5 of logits of
about 15: that is the tolerance of log-probabilities, 1e-3. The models are random, and their margins
wide.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import Engine
from engine.forecast import OutputForecast
from engine.request import Finish, Logprobs, Request, SamplingParams
from tests.checkpoints import FAMILIES, VOCAB
from tests.fakes_ranks import engine_of_ranks

NEW = 30
GREEDY = SamplingParams(NEW, temperature=0.0, ignore_eos=True)
# What can be asked of a token: one request of each, so that rows with and without rules mix.
KINDS = (
    GREEDY,
    replace(GREEDY, temperature=0.9, seed=3),
    replace(GREEDY, temperature=1.3, top_k=40, top_p=0.9, seed=-4),
    replace(GREEDY, temperature=0.7, min_p=0.02, seed=5, frequency_penalty=1.1),
    replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, logprobs=3),
    replace(GREEDY, logit_bias=((270, 4.0), (3, -2.0)), prompt_logprobs=2),
    replace(GREEDY, temperature=1.0, seed=9, allowed_token_ids=tuple(range(60, 230)), logprobs=0),
    replace(GREEDY, stop_token_ids=tuple(range(0, VOCAB, 3)), min_tokens=6),
)


class Careless(OutputForecast):
    """Lets too many in, so that some are retracted, and does not learn."""

    def retracted(self) -> None:
        pass


@dataclass(frozen=True)
class Told:
    """What was told of one request."""

    ids: tuple[int, ...]
    finish: Finish
    cached: int
    logprobs: tuple[float, ...]


def config_of(folder: Path, **settings: object) -> EngineConfig:
    values: dict[str, object] = {
        "dtype": "float32", "device": "cpu", "page_size": 4, "max_running": 6, "max_model_len": 96,
        "max_kv_tokens": 128, "prefill_budget": 16, "cpu_threads": 1, **settings,
    }  # fmt: skip
    return EngineConfig(folder, **values)  # type: ignore[arg-type]


def requests() -> list[Request]:
    """Prompts of all lengths, some with a common beginning; every third request is cut short."""
    dice = np.random.default_rng(2)
    common = dice.integers(0, VOCAB, 24)
    made = []
    for number in range(2 * len(KINDS)):
        prompt = dice.integers(0, VOCAB, 1 + 3 * number)
        if number % 2:
            prompt = np.concatenate([common, prompt[:20]])
        params, ids = KINDS[number % len(KINDS)], prompt.astype(np.int32)
        made.append(Request(number, ids, params, seed=(params.seed or 7) % 2**64))
    return made


def run(engine: Engine) -> tuple[dict[int, Told], int]:
    """All requests, one more arriving with every step, and some aborted on their way."""
    engine._scheduler.admission.forecast = Careless(share=0.0)
    coming, everyone = requests(), requests()
    ids: dict[int, list[int]] = {one.id: [] for one in everyone}
    finishes = dict.fromkeys(ids, Finish.NONE)
    cached, scores = dict.fromkeys(ids, 0), {one.id: list[float]() for one in everyone}
    steps = 0
    while coming or engine.has_work:
        if coming:
            engine.submit(coming.pop(0))
        if steps in (5, 11, 16):
            engine.abort(steps - 3)
        output, steps = engine.step(), steps + 1
        if output is None:
            continue
        for started in output.started:
            cached[started.request.id] = started.cached_tokens
            if started.prompt_logprobs is not None:
                scores[started.request.id] += numbers(started.prompt_logprobs)
        for number, one in output.logprobs:
            scores[number] += numbers(one)
        for number, token_id, finish in zip(
            output.request_ids.tolist(), output.token_ids.tolist(), output.finishes, strict=True
        ):
            ids[number].append(token_id)
            finishes[number] = Finish(finish)
    engine.check_integrity()
    told = {
        number: Told(tuple(ids[number]), finishes[number], cached[number], tuple(scores[number]))
        for number in ids
    }
    return told, engine.stats().retractions


def numbers(logprobs: Logprobs) -> list[float]:
    return [*logprobs.chosen.tolist(), *logprobs.ranks.tolist(), *logprobs.top.flatten().tolist()]


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Path]) -> Callable[[str, bool], dict[int, Told]]:
    """What one rank tells of a family's model."""

    def compute(family: str, overlap: bool) -> dict[int, Told]:
        told, retractions = run(build_engine(config_of(checkpoint(family), overlap=overlap)))
        assert retractions >= 1, "the pool is meant to be too small"
        ends = {one.finish for one in told.values()}
        assert ends == {Finish.LENGTH, Finish.ABORT, Finish.STOP}
        assert any(one.cached for one in told.values())
        return told

    return compute


# Every family with two ranks and with four; those that differ in what is divided always run.
ALWAYS = {("llama-tied-biased", 2), ("qwen2", 2), ("mistral-window", 4), ("qwen3-moe-mixed", 4),
          ("qwen3-moe", 2)}  # fmt: skip
CELLS = [
    pytest.param(family, size, (index + size // 2) % 2 == 0, id=f"{family}-{size}",
                 marks=() if (family, size) in ALWAYS else pytest.mark.slow)
    for index, family in enumerate(FAMILIES)
    for size in (2, 4)
]  # fmt: skip


@pytest.mark.parametrize(("family", "size", "overlap"), CELLS)
def test_ranks_say_what_one_says(
    family: str,
    size: int,
    overlap: bool,
    checkpoint: Callable[[str], Path],
    alone: Callable[[str, bool], dict[int, Told]],
) -> None:
    """Mixed arrivals, aborts, chunks, cache hits and retraction; four ranks share two KV heads."""
    expected = alone(family, overlap)
    with engine_of_ranks(config_of(checkpoint(family), overlap=overlap), size) as (engine, _):
        told, retractions = run(engine)
    assert retractions >= 1
    for number, one in expected.items():
        assert told[number].ids == one.ids, number
        assert (told[number].finish, told[number].cached) == (one.finish, one.cached)
        assert told[number].logprobs == pytest.approx(one.logprobs, abs=1e-3)


def test_greedy_rows_gather_candidates_and_not_logits(checkpoint: Callable[[str], Path]) -> None:
    with engine_of_ranks(config_of(checkpoint("llama")), 2) as (engine, group):
        gathered = []
        for params in (GREEDY, replace(GREEDY, temperature=1.0)):
            before = group.gathered_bytes
            engine.submit(Request(len(gathered), np.arange(5, dtype=np.int32), params, seed=1))
            while engine.has_work:
                engine.step()
            gathered.append((group.gathered_bytes - before) // NEW)
    assert gathered == [2 * 2 * 8, 2 * 144 * 4]  # a float64 value and id; 144 float32 logits


@pytest.mark.parametrize("size", [2, 4])
def test_dummy_weights_are_the_same_however_they_are_divided(
    size: int, checkpoint: Callable[[str], Path]
) -> None:
    config = config_of(checkpoint("qwen3-moe"), load_format="dummy", max_kv_tokens=640)
    expected, _ = run(build_engine(config))
    with engine_of_ranks(config, size) as (engine, _):
        told, _ = run(engine)
    assert [one.ids for one in told.values()] == [one.ids for one in expected.values()]


def test_the_pool_is_the_smallest_ranks(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three key-value heads over two ranks: the rank with two of them has room for fewer pages."""
    monkeypatch.setattr("engine.limits.CPU_POOL_LIMIT_BYTES", 1 << 20)
    config = config_of(checkpoint("llama"), max_kv_tokens=None, max_running=4096)
    with engine_of_ranks(config, 2) as (engine, _):
        pages = engine.stats().total_pages + 1
    page_bytes = 2 * 3 * 4 * 1 * 8 * 4  # keys and values, layers, tokens, heads, head_dim, bytes
    assert pages == (1 << 20) // 2 // page_bytes
    assert torch.get_num_threads() == 1
