"""Prefill by FlashInfer's kernels: FlashAttention 3 on Hopper, where torch has version 2.

An optional package. Its planning is host work, done once a step and window, before the layers are
launched; it copies from pinned memory that it keeps, so plans in flight must not share one.
Knows shapes and lengths; neither models nor requests.
"""

import importlib
import importlib.util
import logging
from typing import Any, Final

import torch

from engine.model_config import ModelConfig
from engine.request import Int32Array

Tensor = torch.Tensor

log = logging.getLogger(__name__)

PLANS: Final = 8  # steps in flight times windows, and as many to spare
_WORKSPACE_BYTES: Final = 64 << 20
_HEAD_DIMS: Final = (64, 128, 256)


class FlashInferPrefill:
    """Plans and runs ragged causal attention. Owned by the engine thread.

    wrappers  FlashInfer's, PLANS of them, used in turn
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, wrappers: list[Any]) -> None:
        self._shape = config.heads, config.kv_heads, config.head_dim
        self._dtype, self._wrappers = dtype, wrappers
        self._next = 0

    def plan(
        self, q_starts: Int32Array, kv_starts: Int32Array, scale: float, window: int | None
    ) -> Any:
        """What runs the step's layers of this window: `run(q, keys, values)`.

        q_starts, kv_starts  [segments + 1] int32 on the host
        """
        wrapper = self._wrappers[self._next]
        self._next = (self._next + 1) % len(self._wrappers)
        wrapper.plan(
            torch.from_numpy(q_starts), torch.from_numpy(kv_starts), *self._shape, causal=True,
            sm_scale=scale, window_left=-1 if window is None else window - 1,
            q_data_type=self._dtype,
        )  # fmt: skip
        return wrapper


def find_flashinfer(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, choice: str
) -> FlashInferPrefill | None:
    """None where torch's kernels are to be used.

    choice  auto, torch or flashinfer

    Raises ValueError where flashinfer is asked for and cannot be.
    """
    if choice == "torch" or device.type != "cuda":
        return None
    reason = _why_not(config, dtype, device)
    if reason is not None:
        if choice == "flashinfer":
            raise ValueError(f"prefill attention cannot be FlashInfer's: {reason}")
        log.info("prompts are computed with torch's FlashAttention 2: %s", reason)
        return None
    flashinfer = importlib.import_module("flashinfer")  # heavy, and not everybody has it
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
    return FlashInferPrefill(
        config, dtype, [wrapper(workspace, "NHD", backend="fa3") for _ in range(PLANS)]
    )


def _why_not(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "its FlashAttention 3 is for compute capability 9.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes 16-bit models, not {dtype}"
    if config.head_dim not in _HEAD_DIMS:
        return f"head_dim is {config.head_dim}; it takes {', '.join(map(str, _HEAD_DIMS))}"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    return None
