"""Every family's logits against transformers, and what is refused."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from engine.kv_cache import KvCache
from engine.load import load_model
from engine.models.decoder import Decoder
from gpu_ops.batch import AttentionBatch
from tests.checkpoints import FAMILIES
from tests.engine.conftest import Expected

# Both sides compute in float32 and differ in the order of sums. A sum of n products has a relative
# error near sqrt(n) * 2^-24; the longest here are of 96, and about 20 follow one another: 3e-6.
# Three times that is allowed.
RELATIVE_TOLERANCE = 1e-5

PAGE_SIZE = 4


def prompt_logits(model: Decoder, prompt: list[int]) -> torch.Tensor:
    """[tokens, vocab] of one prompt over pages in descending order."""
    pages = -(-len(prompt) // PAGE_SIZE)
    cache = KvCache.allocate(model.config, pages + 1, PAGE_SIZE, model.dtype, "cpu")
    table = torch.arange(pages, 0, -1, dtype=torch.int32)
    positions = torch.arange(len(prompt), dtype=torch.int32)
    batch = AttentionBatch(
        q_indptr=torch.tensor([0, len(prompt)], dtype=torch.int32),
        kv_lens=torch.tensor([len(prompt)], dtype=torch.int32),
        page_table=table[None],
        prefills=1,
        decodes=0,
    )
    with torch.inference_mode():
        hidden = model.hidden_states(
            torch.tensor(prompt, dtype=torch.int32),
            positions,
            table[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
            cache,
            batch,
        )
        return model.logits(hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, expected: Callable[[str], Expected]) -> None:
    case = expected(family)
    _, model = load_model(case.folder)
    worst = 0.0
    for prompt, logits in zip(case.prompts, case.logits, strict=True):
        error = (prompt_logits(model, prompt) - logits).abs().max() / logits.abs().max()
        worst = max(worst, float(error))
    print(f"{family}: relative error {worst:.1e}, allowed {RELATIVE_TOLERANCE:.0e}")
    assert worst < RELATIVE_TOLERANCE


def test_windows_change_the_logits(expected: Callable[[str], Expected]) -> None:
    """The windowed families would pass unnoticed if neither side looked at the window."""
    case = expected("mistral-window")
    _, model = load_model(case.folder)
    unbounded = dataclasses.replace(model.config, windows=(None,) * model.config.layers)
    with_window = prompt_logits(model, case.prompts[2])
    for layer, window in zip(model.layers, unbounded.windows, strict=True):
        layer.window = window
    assert (prompt_logits(model, case.prompts[2]) - with_window).abs().max() > 0.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_stay_close(dtype: str, expected: Callable[[str], Expected]) -> None:
    """Each of about 20 roundings in a row is worth 2^-9 (bfloat16) or 2^-12 of the value."""
    case = expected("qwen3")
    _, model = load_model(case.folder, dtype=dtype)
    logits = case.logits[2]
    error = (prompt_logits(model, case.prompts[2]).float() - logits).abs().max()
    allowed = 20 * (2**-9 if dtype == "bfloat16" else 2**-12)
    print(f"{dtype}: relative error {error / logits.abs().max():.1e}, allowed {allowed:.1e}")
    assert error / logits.abs().max() < allowed
