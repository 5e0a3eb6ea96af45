"""The same tokens as transformers in fp32, whatever the engine's settings.

The whole matrix is page size × chunk × cache × overlap × batch, each with every prompt twice, for
every family and for SmolLM2. It takes an hour: `--slow` runs it all. Without it, a set of cells
runs in which every two settings meet at least once.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.build import assemble_engine
from engine.config import EngineConfig
from engine.core import Engine
from engine.load import load_model
from engine.models.decoder import Decoder
from engine.request import Int32Array, Request, SamplingParams
from runtime.setup.model import default_folder
from tests.checkpoints import FAMILIES, reference_model

PROMPTS = 20


@dataclass(frozen=True)
class Cell:
    """One set of settings. `batch` 1 runs prompts one after the other, 16 as they trickle in."""

    page_size: int
    chunk: int | None
    cache: str
    overlap: bool
    batch: int

    def __str__(self) -> str:
        overlap = "overlap" if self.overlap else "direct"
        return f"page{self.page_size}-chunk{self.chunk}-{self.cache}-{overlap}-batch{self.batch}"


ALL = [
    Cell(*values)
    for values in itertools.product(
        (1, 16, 64), (8, 64, None), ("radix", "naive"), (True, False), (1, 16)
    )
]
# Every pair of values of two settings is in one of these; a test below holds that.
PAIRS = [
    Cell(1, 8, "radix", True, 16),
    Cell(1, 64, "naive", False, 1),
    Cell(1, None, "radix", False, 16),
    Cell(16, 8, "naive", False, 16),
    Cell(16, 64, "radix", True, 1),
    Cell(16, None, "naive", True, 1),
    Cell(64, 8, "radix", False, 1),
    Cell(64, 64, "naive", True, 16),
    Cell(64, None, "radix", True, 16),
]


def cells(always: list[Cell]) -> list[object]:
    return [
        pytest.param(cell, id=str(cell), marks=() if cell in always else pytest.mark.slow)
        for cell in ALL
    ]


def test_the_short_set_covers_every_pair_of_settings() -> None:
    def pairs(cell: Cell) -> set[object]:
        values = list(vars(cell).items())
        return set(itertools.combinations(values, 2))

    assert set().union(*map(pairs, ALL)) == set().union(*map(pairs, PAIRS))


@dataclass(frozen=True)
class Subject:
    """A model, and what transformers says after each prompt."""

    folder: Path
    model: Decoder
    prompts: list[Int32Array]
    greedy: list[list[int]]


def make_prompts(vocab: int, longest: int) -> list[Int32Array]:
    """Random prompts of every length; some begin alike, across page boundaries and not."""
    rng = np.random.default_rng(5)
    shared = rng.integers(0, vocab, longest)
    prompts = []
    for index in range(PROMPTS):
        length = 1 + index * (longest - 1) // (PROMPTS - 1)
        own = rng.integers(0, vocab, length)
        if index % 3 == 0:
            own[: length // 2] = shared[: length // 2]
        prompts.append(own.astype(np.int32))
    return prompts


@torch.inference_mode()
def greedy_by_transformers(folder: Path, prompts: list[Int32Array], new: int) -> list[list[int]]:
    model = reference_model(folder)
    outputs = []
    for prompt in prompts:
        ids, past, output = torch.tensor(prompt[None], dtype=torch.long), None, []
        for _ in range(new):
            result = model(ids, past_key_values=past, use_cache=True)
            past, ids = result.past_key_values, result.logits[:, -1].argmax(-1, keepdim=True)
            output.append(int(ids))
        outputs.append(output)
    return outputs


def load_subject(folder: Path, longest: int, new: int) -> Subject:
    config, model = load_model(folder, dtype="float32")
    prompts = make_prompts(min(config.vocab_size, 1000), longest)
    return Subject(folder, model, prompts, greedy_by_transformers(folder, prompts, new))


@pytest.fixture(scope="module")
def random_subject(checkpoint: Callable[[str], Path]) -> Callable[[str], Subject]:
    return cache(lambda family: load_subject(checkpoint(family), longest=90, new=8))


@pytest.fixture(scope="module")
def smollm2() -> Subject:
    folder = default_folder()
    if not (folder / "config.json").is_file():
        pytest.skip("the default model is not prepared: ./plait test prepares it")
    return load_subject(folder, longest=70, new=6)


def run_all(engine: Engine, subject: Subject, batch: int, first_id: int) -> tuple[list, list]:
    """Every prompt once: output ids, and prompt tokens that were cache hits."""
    outputs: list[list[int]] = [[] for _ in subject.prompts]
    cached = [0] * len(subject.prompts)
    new = len(subject.greedy[0])
    params = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    coming = list(enumerate(subject.prompts))
    while coming or engine.has_work:
        # One more arrives with every step, so that prefill meets decode.
        if coming and engine.stats().running + engine.stats().waiting < batch:
            index, prompt = coming.pop(0)
            engine.submit(Request(first_id + index, prompt, params, seed=0))
        output = engine.step()
        if output is None:
            continue
        for started in output.started:
            cached[started.request.id - first_id] = started.cached_tokens
        for request_id, token in zip(output.request_ids, output.token_ids, strict=True):
            outputs[request_id - first_id].append(int(token))
    engine.check_integrity()
    return outputs, cached


def check(
    cell: Cell, subject: Subject, device: str = "cpu", cuda_graph_max_rows: int = 256
) -> None:
    config = EngineConfig(
        model=subject.folder,
        page_size=cell.page_size,
        prefill_budget=cell.chunk,
        cache=cell.cache,  # type: ignore[arg-type]
        overlap=cell.overlap,
        max_running=16,
        max_kv_tokens=16 * 128,
        max_model_len=128,
        cpu_threads=torch.get_num_threads(),
        device=device,
        cuda_graph_max_rows=cuda_graph_max_rows,
    )
    engine = assemble_engine(config, subject.model)
    outputs, _ = run_all(engine, subject, cell.batch, first_id=0)
    assert outputs == subject.greedy
    again, cached = run_all(engine, subject, cell.batch, first_id=1000)
    assert again == subject.greedy, "a cache hit changed the output"
    if cell.cache == "naive":
        assert not any(cached)
        return
    # The pool holds all prompts, so a repeated one hits all whole pages before its last token.
    wanted = [(len(p) - 1) // cell.page_size * cell.page_size for p in subject.prompts]
    assert cached == wanted


@pytest.mark.parametrize("cell", cells(PAIRS))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models(family: str, cell: Cell, random_subject: Callable[[str], Subject]) -> None:
    check(cell, random_subject(family))


@pytest.mark.model
@pytest.mark.parametrize("cell", cells([PAIRS[0], PAIRS[4]]))
def test_smollm2(cell: Cell, smollm2: Subject) -> None:
    check(cell, smollm2)
