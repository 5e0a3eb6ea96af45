"""FlashInfer's attention for prompts: how it is chosen and planned, and on a GPU its results."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import PrefillPlan
from engine.flashinfer_prefill import PLANS, FlashInferPrefill, find_flashinfer
from engine.model_config import ModelConfig, read_model_config
from perf.workloads import write_config
from tests.step_driver import int32

Tensor = torch.Tensor


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_model_config(write_config(tmp_path_factory.mktemp("qwen3"), "0.6B"))


class FakeWrapper:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.plans: list[tuple[Any, ...]] = []

    def plan(self, *arguments: Any, **more: Any) -> None:
        self.plans.append((*arguments, more))


def test_plans_take_turns(config: ModelConfig) -> None:
    """A plan is copied from pinned memory of its wrapper, maybe after the next step is planned."""
    wrappers = [FakeWrapper() for _ in range(PLANS)]
    attention = FlashInferPrefill(config, torch.bfloat16, [*wrappers])
    starts = int32([0, 3, 8])
    used = [attention.plan(starts, starts + 1, 0.5, 7) for _ in range(PLANS + 1)]
    assert used == [*wrappers, wrappers[0]]
    q_starts, kv_starts, *shape, more = wrappers[3].plans[0]
    assert (q_starts.tolist(), kv_starts.tolist()) == ([0, 3, 8], [1, 4, 9])
    assert shape == [config.heads, config.kv_heads, config.head_dim]
    assert more == {
        "causal": True, "sm_scale": 0.5, "window_left": 6, "q_data_type": torch.bfloat16
    }  # fmt: skip


def test_a_cpu_has_none(config: ModelConfig) -> None:
    assert find_flashinfer(config, torch.bfloat16, torch.device("cpu"), "auto") is None


def test_a_choice_is_checked(config: ModelConfig, tmp_path: Path) -> None:
    from engine.config import EngineConfig

    with pytest.raises(ValueError, match="prefill_attention is 'xformers'; it must be one of auto"):
        EngineConfig(tmp_path, prefill_attention="xformers")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_what_cannot_be_is_refused(config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="cannot be FlashInfer's: it takes 16-bit models"):
        find_flashinfer(config, torch.float32, torch.device("cuda"), "flashinfer")
    assert find_flashinfer(config, torch.float32, torch.device("cuda"), "auto") is None


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
)
@pytest.mark.parametrize("window", [None, 37])
def test_ragged_prompts_behind_contexts(config: ModelConfig, window: int | None) -> None:
    """Segments of 1 to 300 queries, with and without keys before them, against torch's kernels.

    Both round probabilities to bfloat16, 2^-9 of each, and the result once more.
    """
    lengths = [(1, 1), (1, 200), (17, 17), (64, 100), (300, 300), (129, 1024)]
    queries, keys = zip(*lengths, strict=True)
    starts = [np.cumsum([0, *counts]).astype(np.int32) for counts in (queries, keys)]
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(torch.bfloat16)

    q = random(sum(queries), heads, head_dim)
    k_cache, v_cache = (random(sum(keys), 1, kv_heads, head_dim) for _ in range(2))
    slots = torch.randperm(sum(keys), device="cuda").to(torch.int32)
    found = find_flashinfer(config, torch.bfloat16, torch.device("cuda"), "flashinfer")
    assert found is not None
    on_device = [torch.from_numpy(part).cuda() for part in starts]
    scale = head_dim**-0.5
    plans = [
        PrefillPlan(*on_device, slots, lengths, by_window)
        for by_window in (None, {window: found.plan(*starts, scale, window)})
    ]
    torchs, own = (plan.attend(q, k_cache, v_cache, scale, window) for plan in plans)
    error = float((own.double() - torchs.double()).norm() / torchs.double().norm())
    print(f"{error:.2e} of the norm")
    assert error <= 8e-3
