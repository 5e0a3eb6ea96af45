"""Fixtures of the tests that run models."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.checkpoints import VOCAB, build_checkpoint, reference_model

PROMPT_LENGTHS = (1, 7, 40, 23)
NEW_TOKENS = 14


@dataclass(frozen=True)
class Expected:
    """What transformers computes for a checkpoint, prompt by prompt."""

    folder: Path
    prompts: list[list[int]]
    logits: list[torch.Tensor]  # [tokens of the prompt, vocab]
    greedy: list[list[int]]  # NEW_TOKENS ids each


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Small products only lose by being shared, and on a busy machine they lose a lot."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family name → folder with a small random checkpoint, built once a session."""

    @cache
    def build(family: str) -> Path:
        return build_checkpoint(tmp_path_factory.mktemp(family), family)

    return build


@pytest.fixture(scope="session")
def expected(checkpoint: Callable[[str], Path]) -> Callable[[str], Expected]:
    """Family name → what transformers makes of its checkpoint."""

    @cache
    def compute(family: str) -> Expected:
        return compute_expected(checkpoint(family))

    return compute


@torch.inference_mode()
def compute_expected(folder: Path) -> Expected:
    """What transformers makes of the checkpoint, prompts of PROMPT_LENGTHS."""
    model = reference_model(folder)
    generator = torch.Generator().manual_seed(3)
    prompts, logits, greedy = [], [], []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(VOCAB, (length,), generator=generator).tolist()
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        prompts.append(prompt)
        logits.append(model(torch.tensor([prompt])).logits[0])
        greedy.append(ids[length:])
    return Expected(folder, prompts, logits, greedy)
