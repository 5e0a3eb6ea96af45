"""Attention backends of a CUDA device: which one takes a step's decode rows, which its prefill.

Knows shapes and rows' state; neither models nor requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from engine.model_config import ModelConfig
from gpu_ops.batch import FusedAttentionPlan
from gpu_ops.cuda_decode import (
    FEW_ROWS,
    TILE,
    DecodeAttention,
    DecodeInputs,
    HeadTransform,
    StepState,
    decode_tuning,
)
from gpu_ops.device_rows import gather_tokens
from gpu_ops.plain_decode import PlainDecodeAttention
from gpu_ops.token_inputs import TokenInputs

Tensor = torch.Tensor

ByWindow = dict[int | None, "DecodeBackend"]


class DecodeBackend(Protocol):
    """One query per sequence, for layers with one window."""

    def prepare(self, rows: Tensor, state: StepState, inputs: DecodeInputs) -> None: ...

    def plan(self, kv_lens: Tensor) -> None: ...

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_lens: Tensor,
        page_table: Tensor,
        scale: float,
        rows: Tensor | None = None,
        out: Tensor | None = None,
        keys_are_new: bool = False,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Decode rows of one step, an `AttentionPlan`."""

    by_window: ByWindow
    rows: Tensor
    inputs: DecodeInputs
    state: StepState

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """As `ops.paged_attention`."""
        return self.by_window[window].attend(
            q, k_cache, v_cache, self.inputs.kv_lens, self.state.page_table, scale, rows=self.rows
        )

    @property
    def fused(self) -> FusedAttentionPlan | None:
        """The plan where its backend also norms, rotates and stores."""
        whole = all(isinstance(part, DecodeAttention) for part in self.by_window.values())
        return self if whole else None

    def attend_qkv(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """As `ops.rope_attention`; for `fused` plans."""
        backend = self.by_window[window]
        assert isinstance(backend, DecodeAttention)
        return backend.attend_qkv(
            qkv, HeadTransform(q_weight, k_weight, eps, cos_sin), k_cache, v_cache,
            self.inputs.kv_lens, self.state.page_table, scale, rows=self.rows,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """A small step's tokens, each a sequence of one query, an `AttentionPlan`.

    Keys of the same step are stored before any token attends: a prompt's tokens see each other's.
    """

    by_window: ByWindow
    tokens: TokenInputs
    page_table: Tensor

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """As `ops.paged_attention`."""
        kv_lens, rows = self.tokens.inputs.kv_lens, self.tokens.rows
        return self.by_window[window].attend(
            q, k_cache, v_cache, kv_lens, self.page_table, scale, rows=rows, keys_are_new=True
        )


class DecodeAttentions:
    """The decode backends of a model, by number of rows and by window. Owned by the engine thread.

    max_rows  most rows of one step
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        page_size: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        windows = sorted(set(config.windows), key=lambda window: window or 0)
        with_kernel = has_decode_kernel(config, dtype, page_size, device)
        self._by_rows: list[tuple[int, ByWindow]] = []  # up to so many rows, ascending
        for most in sorted({min(FEW_ROWS, max_rows), max_rows}):
            tuning = decode_tuning(most, config.heads, config.kv_heads)
            by_window: ByWindow = {}
            for window in windows:
                by_window[window] = PlainDecodeAttention(page_size, window)
                if with_kernel:
                    by_window[window] = DecodeAttention(
                        config.heads, config.kv_heads, config.head_dim, page_size, most, device,
                        tuning, window,
                    )  # fmt: skip
            self._by_rows.append((most, by_window))

    def prepare(self, rows: Tensor, state: StepState, inputs: DecodeInputs) -> DecodePlan:
        """Starts a decode step of rows [n] int32; fills `inputs`. Capturable."""
        by_window = next(found for most, found in self._by_rows if len(rows) <= most)
        first, *others = by_window.values()
        first.prepare(rows, state, inputs)
        for backend in others:
            backend.plan(inputs.kv_lens)
        return DecodePlan(by_window, rows, inputs, state)

    def plan(self, tokens: TokenInputs, state: StepState) -> TokenPlan:
        """For tokens that are prepared. Capturable."""
        by_window = next(found for most, found in self._by_rows if len(tokens.rows) <= most)
        for backend in by_window.values():
            backend.plan(tokens.inputs.kv_lens)
        return TokenPlan(by_window, tokens, state.page_table)


def has_decode_kernel(
    config: ModelConfig, dtype: torch.dtype, page_size: int, device: torch.device
) -> bool:
    """Whether decode attention is our kernel, or plain torch."""
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and config.head_dim in (64, 128)
        and page_size >= TILE
        and page_size & (page_size - 1) == 0
        and config.heads // config.kv_heads <= 8
    )


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Prefill segments of one step, an `AttentionPlan`.

    q_starts, kv_starts  [segments + 1] int32 on the device: queries and keys of each segment
    kv_slots             [keys] int32: where the segments' keys are, each from position 0 on
    lengths              (queries, keys) of each segment
    by_window            FlashInfer's plan for each window; None: torch's kernels
    """

    q_starts: Tensor
    kv_starts: Tensor
    kv_slots: Tensor
    lengths: Sequence[tuple[int, int]]
    by_window: Mapping[int | None, Any] | None = None

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """As `ops.paged_attention`: causal, a segment's last query is its last key."""
        keys, values = gather_tokens(k_cache, v_cache, self.kv_slots)
        if self.by_window is not None:
            out: Tensor = self.by_window[window].run(q, keys, values)
            return out
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            return self._flash(q, keys, values, scale, window)
        return self._plain(q, keys, values, scale, window)

    def _flash(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        out, *_ = torch.ops.aten._flash_attention_forward(
            q, keys, values, self.q_starts, self.kv_starts,
            max(queries for queries, _ in self.lengths), max(count for _, count in self.lengths),
            0.0, True, False, scale=scale,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
        )  # fmt: skip
        result: Tensor = out
        return result

    def _plain(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        out, q_at, kv_at = torch.empty_like(q), 0, 0
        for queries, count in self.lengths:
            key = torch.arange(count, device=q.device)
            query = key[count - queries :, None]
            seen = key <= query
            if window is not None:
                seen &= key > query - window
            own = slice(kv_at, kv_at + count)
            q_heads, k_heads, v_heads = (
                part.transpose(0, 1)[None]
                for part in (q[q_at : q_at + queries], keys[own], values[own])
            )
            result = F.scaled_dot_product_attention(
                q_heads, k_heads, v_heads, seen, scale=scale, enable_gqa=True
            )
            out[q_at : q_at + queries] = result[0].transpose(0, 1)
            q_at, kv_at = q_at + queries, kv_at + count
        return out
